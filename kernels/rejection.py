"""Ragged acceptance: the public entry of the target engine.

batch = verify_batch(plan, device)              # before the forward: host arrays only
logits = lm_head(hidden[batch.token_rows])      # only the rows that decide a token
num_accepted, next_token = verify(logits, batch)
"""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.core.layout import StepPlan
from actors.core.sampling import RULE_COUPLED, RULE_GREEDY, RULE_REJECTION
from kernels import dispatch
from kernels.reference import Draws, RuleGroup, VerifyBatch

Int = npt.NDArray[np.int64]


def verify(logits: Tensor, batch: VerifyBatch, draws: Draws | None = None) -> tuple[Tensor, Tensor]:
    """num_accepted [R] and next_token [R] (int64; 0 and -1 for rows that do not sample); see `reference.verify`."""
    return cast(
        "tuple[Tensor, Tensor]", dispatch.chosen("verify", logits.device.type)(logits, batch, draws)
    )


def process_logits(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, *, truncates: bool = True
) -> Tensor:
    """The distributions that are served, [L, V]; see `reference.process_logits`."""
    op = dispatch.chosen("process_logits", logits.device.type)
    return cast("Tensor", op(logits, temperature, top_p, top_k, truncates=truncates))


def verify_batch(plan: StepPlan, device: torch.device | str = "cpu") -> VerifyBatch:
    """What `verify` needs of a step plan. Numpy work on the host, then one small copy per array."""
    requests = np.flatnonzero(plan.samples).astype(np.int64)
    query_len = plan.verify_len[requests].astype(np.int64) + 1
    starts = np.cumsum(query_len) - query_len
    # A sampling row decides with its last 1 + verify_len tokens: a round has no others, a prefill chunk many.
    token_rows = _ranges(plan.cu_query_len[requests + 1] - query_len, query_len)
    groups = []
    for rule in (RULE_GREEDY, RULE_REJECTION, RULE_COUPLED):
        own = np.flatnonzero(plan.sampling.rule[requests] == rule)
        if len(own):
            groups.append(_group(plan, rule, requests[own], starts[own], token_rows, device))
    return VerifyBatch(plan.num_requests, torch.from_numpy(token_rows).to(device), tuple(groups))


def _ranges(starts: Int, lengths: Int) -> Int:
    """concat(arange(s, s + n) for s, n in zip(starts, lengths))."""
    ends = np.cumsum(lengths)
    within: Int = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    return within + np.repeat(starts, lengths)


def _group(
    plan: StepPlan,
    rule: int,
    requests: Int,
    starts: Int,
    token_rows: Int,
    device: torch.device | str,
) -> RuleGroup:
    verify_len = plan.verify_len[requests].astype(np.int64)
    logit_rows = _ranges(starts, verify_len + 1)
    own_rows = token_rows[logit_rows]
    width = int(verify_len.max(initial=0))
    slots = np.arange(width)
    first = np.cumsum(verify_len + 1) - (verify_len + 1)
    draft_rows = np.minimum(first[:, None] + 1 + slots, len(own_rows) - 1)
    drafted = np.where(slots < verify_len[:, None], plan.token_ids[own_rows[draft_rows]], -1)
    q_ids = np.full((len(requests), width, 1), -1, np.int64)
    q_probs: npt.NDArray[np.floating] = np.zeros(q_ids.shape, np.float32)
    if plan.draft is not None and rule == RULE_REJECTION:
        q_ids = plan.draft.q_ids[requests, :width].astype(np.int64)
        q_probs = plan.draft.q_probs[requests, :width]
    sampling = plan.sampling.rows(requests)

    def put(array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return RuleGroup(
        rule=rule,
        requests=put(requests),
        logit_rows=None if len(logit_rows) == len(token_rows) else put(logit_rows),
        row_start=put(first),
        request_of_row=put(np.repeat(np.arange(len(requests)), verify_len + 1)),
        decided_positions=put(plan.positions[own_rows].astype(np.int64) + 1),
        verify_len=put(verify_len),
        draft_token_ids=put(drafted.astype(np.int64)),
        q_ids=put(q_ids),
        q_probs=put(q_probs),
        temperature=put(sampling.temperature),
        top_p=put(sampling.top_p),
        top_k=put(sampling.top_k.astype(np.int64)),
        noise_key=put(sampling.noise_key.view(np.int64)),
        truncates=bool(((sampling.top_p < 1.0) | (sampling.top_k > 0)).any()),
    )
