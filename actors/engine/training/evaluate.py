"""Held-out acceptance by replay, at temperature 0 and 1, and the rounds that calibration is fitted to.

Blocks are drafted at every anchor of recorded answers, teacher forced up to the anchor, and judged by the law of the
acceptance rule given the text (`slot_law`); `replay` then follows the rounds decoding would make.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from actors.engine.drafters.model import BlockInputs, DraftModel, peak
from actors.engine.training.dataset import OnPolicyDataset, Record
from actors.engine.training.replay import Acceptance, Blocks
from actors.engine.training.slot_law import Draws, Rule, Slot, accept_probability, draw
from configs.machine import multiplies_bfloat16
from kernels.reference import largest

MACRO_DOMAINS = (
    "code",
    "math",
    "chat",
)  # what "macro" means here; other domains are reported beside it
DRAFT_TOP_K = 64


@dataclass(frozen=True)
class Replay:
    """By which rule drafts are judged. Above temperature 0 the text must have been sampled at temperature 1.

    Args:
        head: [V, d] the target's output head; needed above temperature 0.
        draft_top_k: support of the distribution that is drafted from (C2).
        bf16: whether the drafter computes in bfloat16; None: where the CPU multiplies it.
    """

    rule: Rule = "greedy"
    head: Tensor | None = None
    draft_top_k: int = DRAFT_TOP_K
    bf16: bool | None = None

    @property
    def temperature(self) -> float:
        """Of the text this can be replayed on."""
        return 0.0 if self.rule == "greedy" else 1.0


GREEDY = Replay()


class _Judge:
    """Chooses the draft tokens of all blocks of one answer, slot by slot, and keeps what becomes of them."""

    def __init__(
        self, draft_ids: Tensor, record: Record, parts: dict[str, Tensor], replay: Replay
    ) -> None:
        self._draft_ids, self._replay = draft_ids, replay
        self._text = parts["ids"][record.prompt_len + 1 :]  # what slot 1 of anchor i should be
        count = self._num = len(self._text)
        self._rng = torch.Generator().manual_seed(
            zlib.crc32(f"{record.record_id} {replay.rule}".encode())
        )
        self._log_p: Tensor | None = None
        if replay.rule != "greedy":
            if replay.head is None:
                raise ValueError(f"rule {replay.rule}: give the target's output head")
            rows = slice(record.prompt_len, record.prompt_len + count)
            head = replay.head[draft_ids].float()
            logits = parts["hidden"][rows].float() @ head.T
            self._log_p = logits - parts["lse"][rows, None]
        self.accept: list[Tensor] = []
        self.prefix: list[Tensor] = []
        self.inside: list[Tensor] = []
        self.peaks: list[Tensor] = []

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the target ids [1, A] drafted from the next slot's logits [1, A, Vd]."""
        at = torch.arange(self._num) + len(self.accept)
        inside = at < self._num
        at = at.clamp_max(self._num - 1)
        width = 1 if self._replay.rule == "greedy" else self._replay.draft_top_k
        values, index = largest(logits[0], min(width, logits.shape[-1]))
        ids = self._draft_ids[index]
        q = torch.softmax(values.float(), -1)
        p = torch.zeros_like(q) if self._log_p is None else self._log_p[at[:, None], index].exp()
        slot = Slot(q, p, (ids == self._text[at, None]) & inside[:, None])
        reached = self.prefix[-1] if self.prefix else torch.ones(self._num, dtype=torch.bool)
        draws = Draws.of(slot, self._rng)
        chosen = draw(slot, self._replay.rule, reached, draws)[:, None]
        self.accept.append(accept_probability(slot, self._replay.rule))
        self.prefix.append(reached & slot.is_text.gather(1, chosen)[:, 0])
        self.inside.append(inside)
        self.peaks.append(peak(logits[0]))
        return ids.gather(1, chosen).T


@torch.inference_mode()
def draft_blocks(
    model: DraftModel, data: OnPolicyDataset, record: Record, replay: Replay = GREEDY
) -> Blocks:
    """Draft at every anchor of `record` and judge each slot.

    A drafter without a confidence head gets the logit of how peaked each slot's distribution is.
    """
    parts = data.read(record)
    ids = parts["ids"]
    bf16 = multiplies_bfloat16() if replay.bf16 is None else replay.bf16
    anchors = torch.arange(record.prompt_len, record.length - 1)
    features = data.features(parts)[: record.length - 2]
    inputs = BlockInputs(
        features[None].to(torch.bfloat16 if bf16 else torch.float32),
        ids[None, 1 : 1 + len(features)],
        anchors[None],
        ids[anchors][None],
    )
    judge = _Judge(model.draft_ids, record, parts, replay)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model.draft(inputs, judge)
    if logits is None:
        logits = torch.logit(torch.stack(judge.peaks, -1), eps=1e-6)[None]
    return Blocks(
        torch.stack(judge.accept, -1).numpy(),
        torch.stack(judge.prefix, -1).numpy(),
        torch.stack(judge.inside, -1).numpy(),
        logits[0].float().numpy(),
        record.domain,
        record.record_id,
    )


def replayed(
    model: DraftModel,
    data: OnPolicyDataset,
    replay: Replay = GREEDY,
    *,
    per_domain: int | None = None,
) -> list[Blocks]:
    """Return the blocks of the answers of `data` that `replay` can judge, at most `per_domain` of each domain."""
    taken: dict[str, int] = {}
    records = []
    for record in data.records:
        fits = record.num_anchors >= 1 and record.temperature == replay.temperature
        if not fits or taken.get(record.domain, 0) == per_domain:
            continue
        taken[record.domain] = taken.get(record.domain, 0) + 1
        records.append(record)
    bar = tqdm(records, desc=f"held-out blocks, {replay.rule}", unit="answer")
    return [draft_blocks(model, data, record, replay) for record in bar]


def acceptance(every: Sequence[Blocks], gamma: int) -> dict[str, Acceptance]:
    """Return the rounds by domain with blocks cut to `gamma` draft tokens."""
    result: dict[str, Acceptance] = {}
    for blocks in every:
        result.setdefault(blocks.domain, Acceptance(gamma)).add(blocks)
    return result


def evaluate(
    model: DraftModel,
    data: OnPolicyDataset,
    gammas: tuple[int, ...] = (3, 5),
    *,
    per_domain: int | None = None,
    replay: Replay = GREEDY,
) -> tuple[dict[str, dict[int, Acceptance]], list[Blocks]]:
    """Return acceptance by domain and gamma, and every block."""
    every = replayed(model, data, replay, per_domain=per_domain)
    result: dict[str, dict[int, Acceptance]] = {}
    for gamma in gammas:
        for domain, tally in acceptance(every, gamma).items():
            result.setdefault(domain, {})[gamma] = tally
    return result, every


def macro_domains(domains: Sequence[str]) -> list[str]:
    """Return which of `domains` the macro mean is over: code, math and chat, or all where none of these is there."""
    return [d for d in domains if d in MACRO_DOMAINS] or list(domains)


def macro(result: dict[str, dict[int, Acceptance]], gamma: int) -> float:
    """Return the mean over the macro domains of the acceptance length at `gamma`."""
    return float(np.mean([result[d][gamma].length for d in macro_domains(list(result))]))
