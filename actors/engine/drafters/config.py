"""The `config.json` of a DSpark drafter: DeepSpec's fields, plus a reduced vocabulary and tied weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from actors.engine.weights import CheckpointError

MARKOV_HEADS = ("vanilla",)


@dataclass(frozen=True)
class DSparkConfig:
    """Shapes and conventions of one drafter (spec 1.11); sizes are those of its target.

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
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int
    markov_head_type: str
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    qk_norm: bool  # Qwen3 layers normalise q and k per head; Llama-initialised ones do not
    tied_to_target: bool  # embed_tokens and lm_head come from the target, not from this file

    def __post_init__(self) -> None:
        """Refuse values this implementation cannot run; CheckpointError names field and remedy."""
        ids = self.target_layer_ids
        if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0:
            raise _bad("target_layer_ids", ids, "list decoder layers from 0, strictly increasing")
        if self.markov_rank > 0 and self.markov_head_type not in MARKOV_HEADS:
            raise _bad("markov_head_type", self.markov_head_type, f"use one of {MARKOV_HEADS}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise _bad("num_key_value_heads", self.num_key_value_heads, "divide the query heads")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise _bad("mask_token_id", self.mask_token_id, "use an id of the target's vocabulary")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise _bad("draft_vocab_size", self.draft_vocab_size, "use at most vocab_size")
        if self.block_size < 1:
            raise _bad("block_size", self.block_size, "draft at least one token")
        if (
            self.markov_rank == 0
            and self.enable_confidence_head
            and self.confidence_head_with_markov
        ):
            raise _bad("confidence_head_with_markov", True, "needs markov_rank > 0")

    @property
    def feature_dim(self) -> int:
        """Width of one token's features: all taps side by side."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def reduced(self) -> bool:
        """Whether drafts come from a part of the vocabulary."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def confidence_dim(self) -> int:
        """Input width of the confidence head."""
        return self.hidden_size + (self.markov_rank if self.confidence_head_with_markov else 0)

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> DSparkConfig:
        """Read DeepSpec's or this project's `config.json`; CheckpointError names a bad field."""
        architecture = (raw.get("architectures") or ["?"])[0]
        if "DSpark" not in str(architecture):
            raise _bad("architectures", architecture, "point at a DSpark drafter")
        if raw.get("rope_scaling") is not None:
            raise _bad("rope_scaling", raw["rope_scaling"], "only unscaled rotary drafters load")
        # Run with full attention, a drafter of windows would draft ever worse as contexts grow.
        if raw.get("use_sliding_window"):
            raise _bad("use_sliding_window", True, "only drafters with full attention load")
        if "sliding_attention" in (raw.get("layer_types") or ()):
            raise _bad("layer_types", raw["layer_types"], "only full_attention layers load")
        heads = _integer(raw, "num_attention_heads")
        hidden = _integer(raw, "hidden_size")
        vocab = _integer(raw, "vocab_size")
        rope = raw.get("rope_parameters") or {}
        rank = int(raw.get("markov_rank", 0))
        return cls(
            hidden_size=hidden,
            intermediate_size=_integer(raw, "intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=int(raw.get("num_key_value_heads", heads)),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            num_hidden_layers=_integer(raw, "num_hidden_layers"),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(raw.get("rope_theta", rope.get("rope_theta", 10_000.0))),
            max_position_embeddings=int(raw.get("max_position_embeddings", 8192)),
            vocab_size=vocab,
            draft_vocab_size=int(raw.get("draft_vocab_size") or vocab),
            block_size=_integer(raw, "block_size"),
            mask_token_id=_integer(raw, "mask_token_id"),
            target_layer_ids=tuple(int(i) for i in raw.get("target_layer_ids") or ()),
            markov_rank=rank,
            markov_head_type=str(raw.get("markov_head_type", "vanilla")),
            enable_confidence_head=bool(raw.get("enable_confidence_head", False)),
            confidence_head_with_markov=bool(raw.get("confidence_head_with_markov", rank > 0)),
            qk_norm=bool(raw.get("qk_norm", True)),
            tied_to_target=bool(raw.get("tied_to_target", False)),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the object to write as `config.json`."""
        fields = asdict(self)
        fields["target_layer_ids"] = list(self.target_layer_ids)
        architecture = "Qwen3DSparkModel" if self.qk_norm else "LlamaDSparkModel"
        return {"architectures": [architecture], "tie_word_embeddings": False, **fields}


def _integer(raw: Mapping[str, Any], field: str) -> int:
    value = raw.get(field)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _bad(field, value, "give an integer")
    return value


def _bad(field: str, value: object, remedy: str) -> CheckpointError:
    return CheckpointError(f"drafter config.json: {field}={value!r}: {remedy}")
