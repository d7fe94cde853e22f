"""The `config.json` of a drafter: DeepSpec's fields (spec 1.11), plus a reduced vocabulary and tied weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self

from actors.engine.weights import CheckpointError

Kind = Literal["dspark", "dflash", "eagle3", "mtp"]
KINDS: tuple[Kind, ...] = ("dspark", "dflash", "eagle3", "mtp")
MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class DrafterConfig:
    """Shapes and conventions every trained drafter has; sizes are those of its target.

    Slots are anchor-first: slot j sits at position anchor + j and predicts the token after it.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_hidden_layers: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int  # equal to vocab_size: no map, the head covers every id
    block_size: int  # gamma
    target_layer_ids: tuple[int, ...]
    qk_norm: bool  # Qwen3 layers normalise q and k per head; Llama-initialised ones do not
    tied_to_target: bool  # embed_tokens and lm_head come from the target, not from this file

    def __post_init__(self) -> None:
        """Refuse values this implementation cannot run; CheckpointError names field and remedy."""
        ids = self.target_layer_ids
        if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0:
            raise bad("target_layer_ids", ids, "list decoder layers from 0, strictly increasing")
        if self.num_attention_heads % self.num_key_value_heads:
            raise bad("num_key_value_heads", self.num_key_value_heads, "divide the query heads")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise bad("draft_vocab_size", self.draft_vocab_size, "use at most vocab_size")
        if self.block_size < 1:
            raise bad("block_size", self.block_size, "draft at least one token")

    @property
    def kind(self) -> Kind:
        """Which architecture this is, in the words of the command line."""
        raise NotImplementedError

    @property
    def architecture(self) -> str:
        """The class name that `config.json` gives."""
        raise NotImplementedError

    @property
    def feature_dim(self) -> int:
        """Width of one token's features: all taps side by side."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def reduced(self) -> bool:
        """Whether drafts come from a part of the vocabulary."""
        return self.draft_vocab_size < self.vocab_size

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        """Read DeepSpec's or this project's `config.json`; CheckpointError names a bad field."""
        given = {**common_fields(raw), **cls._own_fields(raw)}
        return cls(**{field.name: given[field.name] for field in fields(cls)})

    @classmethod
    def _own_fields(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Fields that only this architecture has, or reads in its own way."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return the object to write as `config.json`."""
        own = asdict(self)
        own["target_layer_ids"] = list(self.target_layer_ids)
        return {"architectures": [self.architecture], "tie_word_embeddings": False, **own}


@dataclass(frozen=True)
class DSparkConfig(DrafterConfig):
    """DSpark, and with `markov_rank` 0 DFlash, which has the same backbone and no sequential head."""

    mask_token_id: int
    markov_rank: int
    markov_head_type: str
    enable_confidence_head: bool
    confidence_head_with_markov: bool

    def __post_init__(self) -> None:
        """See `DrafterConfig`."""
        super().__post_init__()
        if self.markov_rank > 0 and self.markov_head_type not in MARKOV_HEADS:
            raise bad("markov_head_type", self.markov_head_type, f"use one of {MARKOV_HEADS}")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise bad("mask_token_id", self.mask_token_id, "use an id of the target's vocabulary")
        reads_code = self.enable_confidence_head and self.confidence_head_with_markov
        if self.markov_rank == 0 and reads_code:
            raise bad("confidence_head_with_markov", True, "needs markov_rank > 0")

    @property
    def kind(self) -> Kind:
        return "dspark" if self.markov_rank else "dflash"

    @property
    def architecture(self) -> str:
        return "Qwen3DSparkModel" if self.qk_norm else "LlamaDSparkModel"

    @property
    def confidence_dim(self) -> int:
        """Input width of the confidence head."""
        return self.hidden_size + (self.markov_rank if self.confidence_head_with_markov else 0)

    @classmethod
    def _own_fields(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        rank = int(raw.get("markov_rank", 0))
        return {
            "num_hidden_layers": integer(raw, "num_hidden_layers"),
            "block_size": integer(raw, "block_size"),
            "mask_token_id": integer(raw, "mask_token_id"),
            "markov_rank": rank,
            "markov_head_type": str(raw.get("markov_head_type", "vanilla")),
            "enable_confidence_head": bool(raw.get("enable_confidence_head", False)),
            "confidence_head_with_markov": bool(raw.get("confidence_head_with_markov", rank > 0)),
        }


@dataclass(frozen=True)
class PairConfig(DrafterConfig):
    """One layer that reads (target feature, next token) pairs, as EAGLE-3 and MTP do."""

    def __post_init__(self) -> None:
        """See `DrafterConfig`."""
        super().__post_init__()
        if self.num_hidden_layers != 1:
            raise bad("num_hidden_layers", self.num_hidden_layers, "these drafters have one layer")


@dataclass(frozen=True)
class Eagle3Config(PairConfig):
    """EAGLE-3 as DeepSpec has it (spec 9.1); `block_size` is its `ttt_length`."""

    @property
    def kind(self) -> Kind:
        return "eagle3"

    @property
    def architecture(self) -> str:
        return "Qwen3Eagle3Model" if self.qk_norm else "LlamaEagle3Model"

    @classmethod
    def _own_fields(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        # num_hidden_layers of a DeepSpec file may still be the target's.
        return {
            "num_hidden_layers": int(raw.get("draft_num_hidden_layers", 1)),
            "block_size": integer(raw, "ttt_length"),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the object to write as `config.json`, with DeepSpec's names."""
        names = {"ttt_length": self.block_size, "draft_num_hidden_layers": 1}
        return {**super().to_json(), **names, "step_loss_decay": 0.8}


@dataclass(frozen=True)
class MtpConfig(PairConfig):
    """MTP-1 (spec 9.3): one token beyond the anchor, from the output of the target's last layer."""

    def __post_init__(self) -> None:
        """See `DrafterConfig`."""
        super().__post_init__()
        if self.block_size != 1:
            raise bad("block_size", self.block_size, "MTP-1 drafts one token")
        if len(self.target_layer_ids) != 1:
            raise bad("target_layer_ids", self.target_layer_ids, "tap the target's last layer only")

    @property
    def kind(self) -> Kind:
        return "mtp"

    @property
    def architecture(self) -> str:
        return "Qwen3MTPModel" if self.qk_norm else "LlamaMTPModel"

    @classmethod
    def _own_fields(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        return {"num_hidden_layers": int(raw.get("num_hidden_layers", 1)), "block_size": 1}


_ARCHITECTURES: tuple[tuple[str, type[DrafterConfig]], ...] = (
    ("DSpark", DSparkConfig),
    ("Eagle3", Eagle3Config),
    ("MTP", MtpConfig),
)


def parse_config(raw: Mapping[str, Any]) -> DrafterConfig:
    """Read a `config.json` as the architecture it names; CheckpointError names a bad field."""
    architecture = str((raw.get("architectures") or ["?"])[0])
    for part, config in _ARCHITECTURES:
        if part in architecture:
            return config.parse(raw)
    known = ", ".join(part for part, _ in _ARCHITECTURES)
    raise bad("architectures", architecture, f"point at a drafter: one of {known}")


def common_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields every architecture has, from a config that may be a target's."""
    if raw.get("rope_scaling") is not None:
        raise bad("rope_scaling", raw["rope_scaling"], "only unscaled rotary drafters load")
    # Run with full attention, a drafter of windows would draft ever worse as contexts grow.
    if raw.get("use_sliding_window"):
        raise bad("use_sliding_window", True, "only drafters with full attention load")
    if "sliding_attention" in (raw.get("layer_types") or ()):
        raise bad("layer_types", raw["layer_types"], "only full_attention layers load")
    heads, hidden = integer(raw, "num_attention_heads"), integer(raw, "hidden_size")
    vocab, rope = integer(raw, "vocab_size"), raw.get("rope_parameters") or {}
    return {
        "hidden_size": hidden,
        "intermediate_size": integer(raw, "intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": int(raw.get("num_key_value_heads", heads)),
        "head_dim": int(raw.get("head_dim") or hidden // heads),
        "rms_norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "rope_theta": float(raw.get("rope_theta", rope.get("rope_theta", 10_000.0))),
        "max_position_embeddings": int(raw.get("max_position_embeddings", 8192)),
        "vocab_size": vocab,
        "draft_vocab_size": int(raw.get("draft_vocab_size") or vocab),
        "target_layer_ids": tuple(int(i) for i in raw.get("target_layer_ids") or ()),
        "qk_norm": bool(raw.get("qk_norm", True)),
        "tied_to_target": bool(raw.get("tied_to_target", False)),
    }


def integer(raw: Mapping[str, Any], field: str) -> int:
    """Return an integer field; CheckpointError when it is absent or something else."""
    value = raw.get(field)
    if not isinstance(value, int) or isinstance(value, bool):
        raise bad(field, value, "give an integer")
    return value


def bad(field: str, value: object, remedy: str) -> CheckpointError:
    """Return the error to raise about a field of a drafter's config."""
    return CheckpointError(f"drafter config.json: {field}={value!r}: {remedy}")
