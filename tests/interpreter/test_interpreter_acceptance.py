"""The acceptance kernels decide what their torch twin decides: rules, truncation, residuals, draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.core.layout import DraftTokens, StepPlan
from actors.core.sampling import SamplingBatch, SamplingParams
from kernels import reference
from kernels.device import acceptance
from kernels.reference import Draws
from kernels.rejection import verify_batch

WIDTH = 3
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.6, 1.0]),
    top_p=st.sampled_from([1.0, 0.85]),
    top_k=st.sampled_from([0, 1, 7]),
    seed=st.sampled_from([None, 3]),
    noise_key=st.integers(0, 2**64 - 1),
)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles a row, the last one partly beyond the vocabulary."""
    monkeypatch.setattr(acceptance, "VOCAB_TILE", 64)
    monkeypatch.setattr(acceptance, "COUPLED_TILE", 64)


def plan(
    rows: list[tuple[SamplingParams, int]],
    vocab: int,
    *,
    support: int = 5,
    first_position: int = 20,
) -> StepPlan:
    """Rounds of (parameters, verify_len), with a prompt token before every second anchor."""
    rng = np.random.default_rng(len(rows) + vocab)
    lens = np.array([n for _, n in rows], np.int32)
    query = 1 + lens + np.arange(len(rows), dtype=np.int32) % 2
    cu = np.concatenate([[0], np.cumsum(query)]).astype(np.int32)
    shape = (len(rows), WIDTH, support)
    q_ids = np.argsort(rng.random((*shape[:2], vocab)), axis=-1)[..., :support]
    tokens = rng.integers(0, vocab, cu[-1])
    for row, length in enumerate(lens):
        tokens[cu[row + 1] - length : cu[row + 1]] = q_ids[row, :length, 0]
    return StepPlan(
        step=1,
        request_ids=tuple(map(str, range(len(rows)))),
        token_ids=tokens.astype(np.int32),
        positions=np.concatenate([first_position + np.arange(n) for n in query]).astype(np.int32),
        cu_query_len=cu,
        context_len=np.zeros(len(rows), np.int32),
        block_tables=np.zeros((len(rows), 1), np.int32),
        slot_mapping=np.zeros(cu[-1], np.int32),
        verify_len=lens,
        samples=(np.arange(len(rows)) != 4) | (lens > 0),
        sampling=SamplingBatch.of([p for p, _ in rows]),
        draft=DraftTokens(
            q_ids.astype(np.int32), rng.dirichlet(np.ones(support), shape[:2]).astype(np.float32)
        ),
    )


def both(
    step: StepPlan, vocab: int, dtype: torch.dtype = torch.float32, draws: Draws | None = None
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    batch = verify_batch(step)
    rng = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(step.batch_tokens, vocab, generator=rng) * 2).to(dtype)
    # A row that agrees with its drafts accepts some of them.
    drafted = torch.from_numpy(step.token_ids).long().roll(-1)
    logits[torch.arange(step.batch_tokens), drafted] += 3
    logits = logits[batch.token_rows]
    return acceptance.verify(logits, batch, draws), reference.verify(logits, batch, draws)


@settings(deadline=None, max_examples=8)
@given(
    st.lists(st.tuples(PARAMS, st.integers(0, WIDTH)), min_size=1, max_size=2),
    st.sampled_from([33, 50, 97]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_kernel_equals_twin_over_shapes(
    rows: list[tuple[SamplingParams, int]], vocab: int, dtype: torch.dtype
) -> None:
    found, wanted = both(plan(rows, vocab), vocab, dtype)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


def test_kernel_serves_rows_without_drafts_and_rows_that_do_not_sample() -> None:
    kinds = [
        SamplingParams(noise_key=n, seed=n or None, temperature=float(n < 2)) for n in range(3)
    ]
    step = plan([(kind, 0) for kind in [*kinds, *kinds]], 40)
    found, wanted = both(step, 40)
    assert torch.equal(found[1], wanted[1])
    assert found[1][4] == -1 and found[0].tolist() == [0] * 6


def test_kernel_draws_the_recovered_token_from_the_residual() -> None:
    """Every outcome of the residual comes up exactly where the twin's inverse distribution has it."""
    step = plan([(SamplingParams(), 2)] * 12, 50)
    refuse = torch.full((12, WIDTH), 1.0 - 1e-12, dtype=torch.float64)
    u = torch.linspace(1e-9, 1 - 1e-9, 12, dtype=torch.float64)
    found, wanted = both(step, 50, draws=Draws(refuse, u))
    assert torch.equal(found[1], wanted[1])
    assert torch.equal(found[0], wanted[0])
    assert (found[0] < 2).any()


def test_kernel_samples_the_bonus_token_from_the_whole_law() -> None:
    step = plan([(SamplingParams(top_k=9, top_p=0.9), 1)] * 4, 50)
    accept = torch.full((4, WIDTH), 1e-12, dtype=torch.float64)
    u = torch.linspace(1e-9, 1 - 1e-9, 4, dtype=torch.float64)
    found, wanted = both(step, 50, draws=Draws(accept, u))
    assert torch.equal(found[1], wanted[1])
    assert torch.equal(found[0], wanted[0]) and found[0].sum() > 1


def test_kernel_uses_the_noise_of_the_position_it_decides() -> None:
    rows = [(SamplingParams(noise_key=7), 2), (SamplingParams(seed=1, noise_key=8), 2)] * 3
    here, there = plan(rows, 97), plan(rows, 97, first_position=21)
    one, twin_one = both(here, 97)
    other, twin_other = both(there, 97)
    assert torch.equal(one[1], twin_one[1]) and torch.equal(other[1], twin_other[1])
    assert not torch.equal(one[1], other[1])


@pytest.mark.parametrize("truncates", [True, False])
def test_kernel_distributions_equal_the_twins(truncates: bool) -> None:
    rng = torch.Generator().manual_seed(2)
    logits = torch.randn(6, 100, generator=rng) * 3
    logits[2, :50] = -torch.inf
    logits[3] = logits[3].round()
    temperature = torch.tensor([1.0, 0.5, 1.0, 2.0, 1.0, 1e-9])
    top_p = torch.tensor([1.0, 0.8, 0.999, 1.0, 0.05, 1.0]) if truncates else torch.ones(6)
    top_k = torch.tensor([0, 10, 0, 5, 200, 0]) if truncates else torch.zeros(6, dtype=torch.long)
    arguments = (logits, temperature, top_p, top_k)
    found = acceptance.process_logits(*arguments, truncates=truncates)
    wanted = reference.process_logits(*arguments, truncates=truncates)
    assert torch.equal(found > 0, wanted > 0)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


def test_kernel_refuses_a_draft_token_outside_its_support() -> None:
    step = plan([(SamplingParams(noise_key=4), 2)] * 2, 50)
    assert step.draft is not None
    step.draft.q_ids[0, 0] = (step.token_ids[1] + 1 + np.arange(5)) % 50
    found, wanted = both(step, 50)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    assert found[0][0] == 0
