"""Ragged acceptance: the rules row by row, whatever else lies in the batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from actors.core.layout import DraftTokens, StepPlan
from actors.core.sampling import SamplingBatch, SamplingParams
from kernels import dispatch
from kernels.markov_sample import DraftSampling, sample_block
from kernels.reference import Draws
from kernels.rejection import verify, verify_batch

VOCAB, WIDTH, SUPPORT = 50, 4, 8
GREEDY = SamplingParams(temperature=0.0)
PLAIN = SamplingParams(noise_key=5)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=6, noise_key=6)
MIXED = [
    GREEDY,
    PLAIN,
    SEEDED,
    replace(PLAIN, top_k=5),
    replace(GREEDY, noise_key=9),
    replace(SEEDED, top_k=7),
]


def plan(
    params: list[SamplingParams],
    verify_len: list[int],
    *,
    prefill: list[int] | None = None,
    samples: list[bool] | None = None,
    first_position: int = 20,
    seed: int = 0,
) -> StepPlan:
    """Rows with random tokens; `prefill` gives extra prompt tokens before a row's anchor."""
    rows, rng = len(params), np.random.default_rng(seed)
    lens = np.array(verify_len, np.int32)
    query = 1 + lens + np.array(prefill or [0] * rows, np.int32)
    cu = np.concatenate([[0], np.cumsum(query)]).astype(np.int32)
    total = int(cu[-1])
    q_ids = np.stack([rng.permutation(VOCAB)[:SUPPORT] for _ in range(rows * WIDTH)]).reshape(
        rows, WIDTH, SUPPORT
    )
    q_probs = rng.dirichlet(np.ones(SUPPORT), (rows, WIDTH)).astype(np.float32)
    tokens = rng.integers(0, VOCAB, total).astype(np.int32)
    for row in range(rows):  # scheduled tokens lie in their supports
        for k in range(lens[row]):
            tokens[cu[row + 1] - lens[row] + k] = q_ids[row, k, rng.integers(SUPPORT)]
    return StepPlan(
        step=1,
        request_ids=tuple(map(str, range(rows))),
        token_ids=tokens,
        positions=np.concatenate(
            [first_position + row + np.arange(n) for row, n in enumerate(query)]
        ).astype(np.int32),
        cu_query_len=cu,
        context_len=np.zeros(rows, np.int32),
        block_tables=np.zeros((rows, 1), np.int32),
        slot_mapping=np.zeros(total, np.int32),
        verify_len=lens,
        samples=np.array(samples or [True] * rows),
        sampling=SamplingBatch.of(params),
        draft=DraftTokens(q_ids.astype(np.int32), q_probs),
    )


def logits_of(step: StepPlan, seed: int = 1) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(step.batch_tokens, VOCAB, generator=rng) * 2


def decide(step: StepPlan, logits: torch.Tensor) -> tuple[list[int], list[int]]:
    batch = verify_batch(step)
    accepted, token = verify(logits[batch.token_rows], batch)
    return accepted.tolist(), token.tolist()


def row_of(step: StepPlan, row: int) -> tuple[StepPlan, slice]:
    start, end = step.cu_query_len[row : row + 2].tolist()
    assert step.draft is not None
    alone = replace(
        step,
        request_ids=step.request_ids[row : row + 1],
        token_ids=step.token_ids[start:end],
        positions=step.positions[start:end],
        cu_query_len=np.array([0, end - start], np.int32),
        context_len=step.context_len[row : row + 1],
        block_tables=step.block_tables[row : row + 1],
        slot_mapping=step.slot_mapping[start:end],
        verify_len=step.verify_len[row : row + 1],
        samples=step.samples[row : row + 1],
        sampling=step.sampling.rows([row]),
        draft=DraftTokens(step.draft.q_ids[row : row + 1], step.draft.q_probs[row : row + 1]),
    )
    return alone, slice(start, end)


def test_a_mixed_batch_decides_every_row_as_if_it_were_alone() -> None:
    for seed in range(30):
        step = plan(MIXED, [4, 3, 2, 1, 0, 4], prefill=[0, 0, 3, 0, 5, 0], seed=seed)
        logits = logits_of(step, seed)
        accepted, token = decide(step, logits)
        for row in range(len(MIXED)):
            alone, rows = row_of(step, row)
            assert decide(alone, logits[rows]) == ([accepted[row]], [token[row]])


def test_only_rows_that_decide_a_token_need_logits() -> None:
    step = plan([PLAIN, GREEDY, SEEDED], [0, 2, 0], prefill=[4, 0, 6], samples=[True, True, False])
    assert verify_batch(step).token_rows.tolist() == [4, 5, 6, 7]


def test_a_row_that_does_not_sample_yields_no_token() -> None:
    step = plan([PLAIN, GREEDY, SEEDED], [0, 2, 0], prefill=[4, 0, 6], samples=[True, True, False])
    accepted, token = decide(step, logits_of(step))
    assert (accepted[2], token[2]) == (0, -1)
    assert token[0] >= 0 and token[1] >= 0


def test_a_step_in_which_nothing_samples_yields_nothing() -> None:
    step = plan([PLAIN, GREEDY], [0, 0], prefill=[3, 3], samples=[False, False])
    batch = verify_batch(step)
    accepted, token = verify(torch.zeros(0, VOCAB), batch)
    assert batch.groups == () and accepted.tolist() == [0, 0] and token.tolist() == [-1, -1]


def test_greedy_accepts_exactly_the_leading_argmaxes() -> None:
    step = plan([GREEDY] * 5, [4] * 5)
    logits = logits_of(step)
    best = logits.argmax(-1).view(5, 5)
    tokens = step.token_ids.reshape(5, 5).copy()
    for row in range(
        5
    ):  # row r agrees on its first r slots, and on the last one, which must not count
        tokens[row, 1 : 1 + row] = best[row, :row]
        tokens[row, 1 + row : 4] = (best[row, row:3] + 1) % VOCAB
        tokens[row, 4] = best[row, 3]
    accepted, token = decide(replace(step, token_ids=tokens.reshape(-1)), logits)
    assert accepted == [0, 1, 2, 4, 4]
    assert token == [int(best[row, n]) for row, n in enumerate(accepted)]


def test_a_draft_the_target_is_certain_of_is_always_accepted_and_its_bonus_is_the_last_row() -> (
    None
):
    for params in (GREEDY, PLAIN, SEEDED):
        step = plan([params], [3])
        logits = torch.full((4, VOCAB), -1e4)
        logits[torch.arange(3), torch.from_numpy(step.token_ids[1:].astype(np.int64))] = 1e4
        logits[3, 17] = 1e4
        assert decide(step, logits) == ([3], [17])


def test_a_draft_the_target_forbids_is_always_rejected() -> None:
    for params in (GREEDY, PLAIN, SEEDED):
        step = plan([params], [3])
        logits = logits_of(step)
        logits[0, step.token_ids[1]] = -torch.inf
        accepted, token = decide(step, logits)
        assert accepted == [0] and token != [int(step.token_ids[1])]


def test_a_residual_without_mass_falls_back_to_the_target() -> None:
    """q lies a hair above p everywhere: a refused draft leaves no residual to sample from."""
    logits = torch.arange(VOCAB) / 10.0
    p = torch.softmax(logits, -1).numpy()
    q_ids = np.arange(VOCAB, dtype=np.int32)[None, None]
    step = replace(
        plan([PLAIN], [1]),
        token_ids=np.array([0, 3], np.int32),
        draft=DraftTokens(q_ids, (p * np.float32(1 + 1e-5))[None, None]),
    )
    draws = Draws(torch.tensor([[1 - 1e-12]]).double(), torch.tensor([0.5]).double())
    accepted, token = verify(torch.stack([logits, torch.zeros(VOCAB)]), verify_batch(step), draws)
    assert accepted.tolist() == [0]
    cumulated = np.cumsum(p, dtype=np.float64)
    assert token.tolist() == [int(np.searchsorted(cumulated, 0.5 * cumulated[-1]))]


def test_a_draft_outside_the_support_it_came_with_is_refused() -> None:
    """The drafter broke its contract: there is no probability to divide by, so nothing is accepted."""
    step = plan([PLAIN], [1])
    assert step.draft is not None
    missing = int(np.setdiff1d(np.arange(VOCAB), step.draft.q_ids[0, 0])[0])
    step = replace(step, token_ids=np.array([0, missing], np.int32))
    logits = torch.zeros(2, VOCAB)
    logits[0, missing] = 20.0
    assert decide(step, logits)[0] == [0]


@pytest.mark.parametrize("params", [SEEDED, replace(SEEDED, top_k=7), replace(SEEDED, top_p=0.5)])
def test_a_coupled_drafter_that_equals_the_target_is_accepted_to_the_end(
    params: SamplingParams,
) -> None:
    """Drafter and target meet at the same noise: same position, same processing, same token."""
    rows = 40
    sampling = SamplingBatch.of([replace(params, seed=i, noise_key=i) for i in range(rows)])
    base = torch.randn(rows, WIDTH, VOCAB, generator=torch.Generator().manual_seed(5))
    anchors = torch.zeros(rows, dtype=torch.long)
    block = sample_block(
        base, None, anchors, torch.arange(rows) + 20, DraftSampling.of(sampling), VOCAB
    )
    step = plan(MIXED[:1] * rows, [WIDTH] * rows)
    tokens = torch.cat([anchors[:, None], block.draft_token_ids], 1)
    step = replace(step, token_ids=tokens.reshape(-1).numpy().astype(np.int32), sampling=sampling)
    logits = torch.cat([base, torch.zeros(rows, 1, VOCAB)], 1).view(-1, VOCAB)
    assert decide(step, logits)[0] == [WIDTH] * rows


@pytest.mark.parametrize("params", [PLAIN, SEEDED])
def test_draws_follow_the_absolute_position_not_the_place_in_the_block(
    params: SamplingParams,
) -> None:
    """The same position decided as bonus of a longer row and as the first token of a shorter one: same noise."""
    long, short = plan([params], [2], first_position=20), plan([params], [0], first_position=22)
    logits = torch.full((3, VOCAB), -1e4)
    logits[torch.arange(2), torch.from_numpy(long.token_ids[1:].astype(np.int64))] = 1e4
    logits[2] = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    accepted, token = decide(long, logits)
    assert accepted == [2]
    assert decide(short, logits[2:]) == ([0], token)
    elsewhere = [
        decide(plan([params], [0], first_position=p), logits[2:])[1] for p in range(30, 60)
    ]
    assert any(other != token for other in elsewhere)


def test_another_key_gives_other_draws() -> None:
    logits = torch.zeros(1, VOCAB)
    tokens = {decide(plan([replace(PLAIN, noise_key=key)], [0]), logits)[1][0] for key in range(50)}
    assert len(tokens) > 20


def test_bfloat16_logits_are_decided_in_float32() -> None:
    step = plan(MIXED, [4, 3, 2, 1, 0, 4])
    logits = logits_of(step).bfloat16()
    assert decide(step, logits) == decide(step, logits.float())


def test_the_batch_holds_no_python_object_per_request() -> None:
    """One group a rule, whatever the number of requests: nothing on the hot path grows in Python."""
    params: list[SamplingParams] = [MIXED[i % 6] for i in range(96)]
    batch = verify_batch(plan(params, [int(i % 5) for i in range(96)]))
    assert len(batch.groups) == 3
    sizes: npt.NDArray[np.int64] = np.array([len(group.requests) for group in batch.groups])
    assert sizes.sum() == 96


def test_the_reference_runs_where_no_kernel_is_registered() -> None:
    assert dispatch.implementation("verify", "cpu") == "reference"
