"""A small held-out measurement that a run repeats while it trains: does it still get better where it counts?"""

from __future__ import annotations

from typing import Any

import numpy as np

from actors.engine.drafters.model import DraftModel
from actors.engine.training.dataset import OnPolicyDataset, Record
from actors.engine.training.evaluate import Replay, draft_blocks, macro_domains
from actors.engine.training.replay import Acceptance


class HeldOut:
    """The same few greedy answers every time: the first `per_domain` of each domain, by record id."""

    def __init__(self, data: OnPolicyDataset, per_domain: int, *, bf16: bool) -> None:
        """Choose the answers; ValueError when the text has none at temperature 0."""
        self.data, self.bf16 = data, bf16
        self.last: float | None = None  # acceptance length as measured last
        self.records: list[Record] = []
        taken: dict[str, int] = {}
        for record in sorted(data.records, key=lambda r: r.record_id):
            if record.temperature > 0 or record.num_anchors < 1:
                continue
            taken[record.domain] = taken.get(record.domain, 0) + 1
            if taken[record.domain] <= per_domain:
                self.records.append(record)
        if not self.records:
            raise ValueError(f"{data.root} holds no answer at temperature 0 to measure on")

    def measure(self, model: DraftModel) -> dict[str, Any]:
        """Return `acceptance_length` (macro mean), `by_domain`, and `agree` [gamma] over all anchors."""
        gamma = model.config.block_size
        tallies: dict[str, Acceptance] = {}
        hits, inside = np.zeros(gamma), np.zeros(gamma)
        for record in self.records:
            blocks = draft_blocks(model, self.data, record, Replay(bf16=self.bf16))
            tallies.setdefault(record.domain, Acceptance(gamma)).add(blocks)
            hits += blocks.accept.sum(0)
            inside += blocks.inside.sum(0)
        by_domain = {name: round(tally.length, 4) for name, tally in sorted(tallies.items())}
        chosen = [by_domain[domain] for domain in macro_domains(list(by_domain))]
        self.last = round(float(np.mean(chosen)), 4)
        return {
            "acceptance_length": self.last,
            "by_domain": by_domain,
            "agree": [round(float(h), 4) for h in hits / np.maximum(inside, 1)],
        }
