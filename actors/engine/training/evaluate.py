"""Held-out acceptance at temperature 0, and the data for calibrating confidences.

Greedy speculative decoding commits exactly the target's own greedy text, so rounds can be replayed on
recorded text: a draft token is accepted when it equals the text there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from actors.engine.drafters.model import BlockInputs, DraftModel
from actors.engine.training.dataset import OnPolicyDataset, Record

BoolArray = npt.NDArray[np.bool_]


@dataclass
class Blocks:
    """Every block of one answer: one row an anchor, in order."""

    hits: BoolArray  # [A, gamma] the draft token equals the text; false beyond its end
    inside: BoolArray  # [A, gamma] the slot lies within the text
    confidence_logits: npt.NDArray[np.float32] | None  # [A, gamma]; None without a confidence head

    @property
    def prefix(self) -> BoolArray:
        """[A, gamma] whether all draft tokens up to here are accepted."""
        return np.logical_and.accumulate(self.hits, axis=1)


@dataclass
class Acceptance:
    """Rounds of one domain: committed tokens, bonus included, over rounds (spec 7.3)."""

    committed: int = 0
    rounds: int = 0
    accepted_at: list[int] = field(default_factory=list)

    @property
    def length(self) -> float:
        """Acceptance length: committed tokens a round."""
        return self.committed / max(1, self.rounds)


@torch.inference_mode()
def draft_blocks(model: DraftModel, data: OnPolicyDataset, record: Record, bf16: bool) -> Blocks:
    """Draft greedily at every anchor of `record`, each token conditioned on those before it."""
    parts = data.read(record)
    ids, gamma = parts["ids"], model.config.block_size
    anchors = torch.arange(record.prompt_len, record.length - 1)
    features = data.features(parts)[: record.length - 2]
    inputs = BlockInputs(
        features[None].to(torch.bfloat16 if bf16 else torch.float32),
        ids[None, 1 : 1 + len(features)],
        anchors[None],
        ids[anchors][None],
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        drafted = model.draft_greedy(inputs)
    text = anchors[:, None] + 1 + torch.arange(gamma)
    inside = text < len(ids)
    hits = (drafted.token_ids[0] == ids[text.clamp_max(len(ids) - 1)]) & inside
    logits = drafted.confidence_logits
    confidences = None if logits is None else logits[0].float().numpy()
    return Blocks(hits.numpy(), inside.numpy(), confidences)


def rounds(blocks: Blocks, gamma: int) -> list[int]:
    """Return the anchors (rows of `blocks`) greedy decoding with `gamma` draft tokens visits."""
    lengths = blocks.prefix[:, :gamma].sum(1)
    visited, at = [], 0
    while at < len(lengths):
        visited.append(at)
        at += int(lengths[at]) + 1
    return visited


def replay(blocks: Blocks, gamma: int, into: Acceptance) -> None:
    """Add the rounds greedy decoding with `gamma` draft tokens would make over this answer."""
    prefix = blocks.prefix[:, :gamma]
    visited = rounds(blocks, gamma)
    into.rounds += len(visited)
    # Every answer token after the first is committed in some round; the text ends with the answer.
    into.committed += len(prefix)
    at_slot = prefix[visited].sum(0)
    into.accepted_at = [
        a + int(b) for a, b in zip(into.accepted_at or [0] * gamma, at_slot, strict=True)
    ]


def evaluate(
    model: DraftModel,
    data: OnPolicyDataset,
    gammas: tuple[int, ...] = (3, 5),
    *,
    per_domain: int | None = None,
    bf16: bool = True,
) -> tuple[dict[str, dict[int, Acceptance]], list[Blocks]]:
    """Return acceptance by domain and gamma, and every block, for greedy records of `data`."""
    result: dict[str, dict[int, Acceptance]] = {}
    every: list[Blocks] = []
    taken: dict[str, int] = {}
    for record in tqdm(data.records, desc="held-out blocks", unit="answer"):
        taken[record.domain] = taken.get(record.domain, 0) + 1
        if record.num_anchors < 1 or record.temperature > 0:
            continue
        if per_domain is not None and taken[record.domain] > per_domain:
            continue
        blocks = draft_blocks(model, data, record, bf16)
        every.append(blocks)
        domain = result.setdefault(record.domain, {g: Acceptance() for g in gammas})
        for gamma, tally in domain.items():
            replay(blocks, gamma, tally)
    return result, every


def macro(result: dict[str, dict[int, Acceptance]], gamma: int) -> float:
    """Return the mean over domains of the acceptance length at `gamma`."""
    return float(np.mean([by_gamma[gamma].length for by_gamma in result.values()]))


def pooled(every: list[Blocks]) -> tuple[Tensor, Tensor]:
    """Return confidence logits and prefix labels [rounds, gamma] of the rounds decoding makes.

    Rounds start where the one before was refused, so they are harder than an average position;
    calibration must see what serving sees. Blocks that reach beyond their text are left out.
    Raises ValueError for a drafter without a confidence head.
    """
    logits, labels = [], []
    for blocks in every:
        if blocks.confidence_logits is None:
            raise ValueError("this drafter has no confidence head: there is nothing to calibrate")
        visited = [a for a in rounds(blocks, blocks.hits.shape[1]) if blocks.inside[a].all()]
        logits.append(blocks.confidence_logits[visited])
        labels.append(blocks.prefix[visited])
    return torch.from_numpy(np.concatenate(logits)), torch.from_numpy(np.concatenate(labels))
