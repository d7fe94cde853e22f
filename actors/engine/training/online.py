"""Text without stored features: the target computes them when a step needs them.

Only hidden states come from it, which may be another process; the output head is applied here, beside the trainer. It
costs a forward of the target for every answer of every step and saves the disk that features fill.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from actors.engine.training.dataset import OnPolicyDataset, Record
from actors.engine.training.frozen_target import FrozenTarget


class FeatureSource(Protocol):
    """A target that says what it sees in a text."""

    def features(self, token_ids: list[int]) -> tuple[Tensor, Tensor]:
        """Return (taps [n, m, d], hidden [n, d] after the final norm) of n tokens."""
        ...


class LocalFeatures:
    """The target in this process; implements `FeatureSource`."""

    def __init__(
        self, model_dir: Path, taps: tuple[int, ...], dtype: torch.dtype, max_len: int
    ) -> None:
        """Load the target for texts of at most `max_len` tokens."""
        self._target = FrozenTarget(model_dir, taps, dtype, max_len)
        self._rows = self._target.new_rows(1)

    def features(self, token_ids: list[int]) -> tuple[Tensor, Tensor]:
        """See `FeatureSource`."""
        start = torch.zeros(1, dtype=torch.long)
        out = self._target.forward(torch.tensor([token_ids]), start, self._rows, 0)
        return out.taps[0], out.hidden[0]


class OnlineDataset(OnPolicyDataset):
    """Records of a file of token ids, one {"ids": […], "prompt_len": n, "domain": …, "temperature": …} a line.

    `prompt_len` (default 1) tokens come before what the target wrote itself.
    """

    def __init__(
        self, file: Path, source: FeatureSource, head: Tensor, final_norm: Tensor | None = None
    ) -> None:
        """Read `file`; `head` [V, d] is the target's output head. Raises ValueError naming a bad line."""
        self.root, self.shards, self.final_norm = file, [file.name], final_norm
        self._source, self._head = source, head
        self._ids: dict[str, list[int]] = {}
        self.records = []
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if line.strip():
                self._add(json.loads(line), f"{file}:{number}", len(head))
        if not self.records:
            raise FileNotFoundError(f"{file} holds no text; give one object of token ids a line")

    def _add(self, raw: dict[str, Any], where: str, vocab_size: int) -> None:
        ids, prompt_len = raw.get("ids"), int(raw.get("prompt_len", 1))
        if not isinstance(ids, list) or not all(
            isinstance(i, int) and 0 <= i < vocab_size for i in ids
        ):
            raise ValueError(f'{where}: "ids" must be a list of token ids below {vocab_size}')
        if not 1 <= prompt_len < len(ids):
            raise ValueError(f"{where}: prompt_len={prompt_len}: use 1 to {len(ids) - 1}")
        record_id = str(len(self.records))
        self._ids[record_id] = ids
        domain, temperature = str(raw.get("domain", "own")), float(raw.get("temperature", 0.0))
        self.records.append(Record("", 0, 0, len(ids), prompt_len, domain, temperature, record_id))

    def ids(self, record: Record) -> Tensor:
        """See `OnPolicyDataset`."""
        return torch.tensor(self._ids[record.record_id])

    def read(self, record: Record) -> dict[str, Tensor]:
        """See `OnPolicyDataset`; the log-normaliser is computed here, for the answer alone."""
        ids = self._ids[record.record_id]
        taps, hidden = self._source.features(ids[:-1])
        lse = torch.zeros(len(hidden))
        answer = slice(record.prompt_len - 1, None)
        lse[answer] = (hidden[answer].to(self._head.dtype) @ self._head.T).float().logsumexp(-1)
        return {"ids": torch.tensor(ids), "taps": taps, "hidden": hidden, "lse": lse}


def longest(file: Path) -> int:
    """Return the most tokens that a line of `file` has."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return max((len(json.loads(line).get("ids", ())) for line in lines if line.strip()), default=1)
