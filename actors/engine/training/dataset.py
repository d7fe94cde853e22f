"""On-policy shards as training batches: some sequences, and random anchors inside their answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from torch import Tensor

from actors.engine.drafters.model import BlockInputs


@dataclass(frozen=True)
class Record:
    """One prompt with the target's answer, as a slice of a shard."""

    shard: str
    first_token: int  # into `ids`
    first_row: int  # into `taps`, `hidden`, `lse`: one row fewer a record than tokens
    length: int
    prompt_len: int
    domain: str
    temperature: float
    record_id: str

    @property
    def num_anchors(self) -> int:
        """Answer tokens that have a successor; each may be an anchor."""
        return self.length - self.prompt_len - 1


@dataclass(frozen=True)
class Drawn:
    """One sequence of a step: its anchors, and which slots of their blocks count."""

    record: Record
    anchors: npt.NDArray[np.int64]  # [n] positions
    kept: npt.NDArray[np.bool_]  # [n, gamma]


@dataclass(frozen=True)
class Batch:
    """B sequences with N anchors each; of slots only those `kept` count."""

    features: Tensor  # [B, S, feature_dim]
    next_ids: Tensor  # [B, S] the token after each position
    anchors: Tensor  # [B, N] positions
    anchor_ids: Tensor  # [B, N]
    labels: Tensor  # [B, N, gamma] target ids
    previous: Tensor  # [B, N, gamma] target ids
    teacher_hidden: Tensor  # [B, N, gamma, d]
    teacher_lse: Tensor  # [B, N, gamma]
    kept: Tensor  # [B, N, gamma] bool: within the text, and drawn

    def inputs(self, dtype: torch.dtype | None = None) -> BlockInputs:
        """What the drafter sees; its features in `dtype`."""
        features = self.features if dtype is None else self.features.to(dtype)
        return BlockInputs(features, self.next_ids, self.anchors, self.anchor_ids)


class OnPolicyDataset:
    """The records of a folder of shards, read lazily; `shards` fixes the snapshot.

    Features are the taps, or with `final_norm` [d], the weight of the target's final norm, the output of the target's
    last layer up to its scale (see `actors.engine.drafters.mtp`), which shards hold only normed.
    """

    def __init__(
        self, root: Path, shards: list[str] | None = None, final_norm: Tensor | None = None
    ) -> None:
        """Index complete shards; FileNotFoundError when there is none."""
        self.root, self.final_norm = root, final_norm
        self.shards = shards or sorted(p.stem for p in root.glob("shard-*.json"))
        if not self.shards:
            raise FileNotFoundError(f"no shards in {root}; generate on-policy text first")
        self.records = [r for name in self.shards for r in self._index(name)]
        self._open: dict[str, Any] = {}

    def _index(self, name: str) -> list[Record]:
        token = row = 0
        records = []
        for meta in json.loads((self.root / f"{name}.json").read_text(encoding="utf-8")):
            length = int(meta["length"])
            records.append(
                Record(
                    name,
                    token,
                    row,
                    length,
                    int(meta["prompt_len"]),
                    meta["domain"],
                    float(meta["temperature"]),
                    meta["record_id"],
                )
            )
            token += length
            row += length - 1
        return records

    @property
    def num_usable(self) -> int:
        """Answers with at least one anchor."""
        return sum(r.num_anchors > 0 for r in self.records)

    @property
    def num_answer_tokens(self) -> int:
        """Tokens the target wrote itself."""
        return sum(r.length - r.prompt_len for r in self.records)

    def ids(self, record: Record) -> Tensor:
        """Return the token ids [n] of one record."""
        return self.read(record)["ids"]

    def read(self, record: Record) -> dict[str, Tensor]:
        """Return ids [n] (int64), taps [n-1, m, d], hidden [n-1, d], lse [n-1] of one record."""
        shard = self._open.get(record.shard)
        if shard is None:
            shard = safe_open(self.root / f"{record.shard}.safetensors", framework="pt")
            self._open[record.shard] = shard
        rows = slice(record.first_row, record.first_row + record.length - 1)
        ids = shard.get_slice("ids")[record.first_token : record.first_token + record.length]
        parts = {name: shard.get_slice(name)[rows] for name in ("taps", "hidden", "lse")}
        return {"ids": ids.long(), **parts}

    def features(self, parts: dict[str, Tensor]) -> Tensor:
        """Return [n - 1, feature_dim] for what `read` gave."""
        if self.final_norm is None:
            return parts["taps"].flatten(1)
        hidden = parts["hidden"]
        return (hidden.float() / self.final_norm.float()).to(hidden.dtype)

    def token_counts(self, vocab_size: int, prompt_weight: float = 0.25) -> Tensor:
        """Return how often each id occurs, [vocab_size]; prompt tokens count `prompt_weight`."""
        counts = torch.zeros(vocab_size)
        for record in self.records:
            ids = self.ids(record)
            one = torch.ones(len(ids))
            one[: record.prompt_len] = prompt_weight
            counts.index_add_(0, ids, one)
        return counts

    def draw(
        self,
        rng: np.random.Generator,
        num_sequences: int,
        num_anchors: int,
        chances: npt.NDArray[np.float64],
    ) -> list[Drawn]:
        """Draw records in proportion to their anchors, and up to `num_anchors` anchors of each.

        Slot j of a block is kept with probability `chances[j]`, [gamma], if it lies within the text. Nothing is read:
        every trainer of a step can draw all of it and load its own part.
        """
        usable = [r for r in self.records if r.num_anchors > 0]
        weights = np.array([r.num_anchors for r in usable], np.float64)
        chosen = rng.choice(len(usable), num_sequences, replace=False, p=weights / weights.sum())
        return [self._anchors(rng, usable[i], num_anchors, chances) for i in chosen]

    @staticmethod
    def _anchors(
        rng: np.random.Generator, record: Record, count: int, chances: npt.NDArray[np.float64]
    ) -> Drawn:
        where = record.prompt_len + rng.permutation(record.num_anchors)[:count].astype(np.int64)
        inside = where[:, None] + np.arange(1, len(chances) + 1) < record.length
        return Drawn(record, where, inside & (rng.random(inside.shape) < chances))

    def batch(self, drawn: list[Drawn]) -> Batch:
        """Collate drawn records and anchors, padded to the longest of each."""
        gamma = drawn[0].kept.shape[1]
        loaded = [(self.read(d.record), torch.from_numpy(d.anchors)) for d in drawn]
        features = [self.features(parts) for parts, _ in loaded]
        count = max(len(where) for _, where in loaded)
        span = max(int(where.max()) for _, where in loaded)
        width = loaded[0][0]["hidden"].shape[-1]
        b = len(loaded)
        out = Batch(
            features=torch.zeros((b, span, features[0].shape[-1]), dtype=features[0].dtype),
            next_ids=torch.zeros((b, span), dtype=torch.long),
            anchors=torch.zeros((b, count), dtype=torch.long),
            anchor_ids=torch.zeros((b, count), dtype=torch.long),
            labels=torch.zeros((b, count, gamma), dtype=torch.long),
            previous=torch.zeros((b, count, gamma), dtype=torch.long),
            teacher_hidden=torch.zeros(
                (b, count, gamma, width), dtype=loaded[0][0]["hidden"].dtype
            ),
            teacher_lse=torch.zeros((b, count, gamma)),
            kept=torch.zeros((b, count, gamma), dtype=torch.bool),
        )
        for i, (parts, where) in enumerate(loaded):
            _fill(out, i, parts, where, gamma)
            out.kept[i, : len(where)] = torch.from_numpy(drawn[i].kept)
            rows = features[i][:span]
            out.features[i, : len(rows)] = rows
        return out


def _fill(out: Batch, i: int, parts: dict[str, Tensor], where: Tensor, gamma: int) -> None:
    """Write sequence `i` of the batch in place."""
    ids = parts["ids"]
    n = len(where)
    following = ids[1 : 1 + out.next_ids.shape[1]]
    out.next_ids[i, : len(following)] = following
    out.anchors[i, :n] = where
    out.anchor_ids[i, :n] = ids[where]
    source = where[:, None] + torch.arange(gamma)  # the row whose distribution predicts the label
    source = source.clamp_max(len(ids) - 2)
    out.labels[i, :n] = ids[source + 1]
    out.previous[i, :n] = ids[source]
    out.teacher_hidden[i, :n] = parts["hidden"][source]
    out.teacher_lse[i, :n] = parts["lse"][source]
