"""What a module of kernels must do right, each in a small shape: passed by the kernels, failed by their mutants."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from actors.core.sampling import SamplingBatch, SamplingParams
from kernels import block_reference, grouped_gemm, reference, token_permute
from kernels.block_reference import DraftSampling
from kernels.reference import Draws
from kernels.rejection import verify_batch
from tests.interpreter import test_interpreter_acceptance as acceptance_tests
from tests.interpreter import test_interpreter_attention as attention_tests
from tests.interpreter import test_interpreter_block_sample as block_tests
from tests.interpreter import test_interpreter_budget as budget_tests
from tests.interpreter import test_interpreter_rope_store as rope_tests
from tests.interpreter.test_interpreter_attention import Step


def attends(module: ModuleType) -> None:
    """Rounds and decode rows, over several key blocks and splits, with and without a window."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_tests, "attention", module)
        Step(((150, 3), (3, 1), (63, 2)), split_keys=64).check()
        Step(((40, 5), (100, 2)), window=9, block_size=1).check()


def stores(module: ModuleType) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rope_tests, "device", module)
        arguments = rope_tests.inputs(5, 3, 1, 16, torch.float32, has_norm=True)
        arguments[4][2] = -1
        arguments[3][:] = torch.tensor([4, 0, 9, 30, 48])
        rope_tests.check(torch.float32, arguments)


def samples_blocks(module: ModuleType) -> None:
    """Flat distributions, so that another draw is another token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_tests, "block_sample", module)
        params = [
            SamplingParams(noise_key=3, temperature=9.0),
            SamplingParams(seed=5, noise_key=9, temperature=9.0),
            SamplingParams(noise_key=6, temperature=9.0),
        ]
        block_tests.agree(*block_tests.both(params, 3, 200, 8, 3, torch.float32), atol=1e-5)


def keeps_to_the_vocabulary(module: ModuleType) -> None:
    """What lies behind a row's last logit is the next row's first: larger than anything in this one."""
    base = torch.randn(2, 1, 500, generator=torch.Generator().manual_seed(0))
    base[1, 0, :6] = 50.0
    sampling = DraftSampling.of(SamplingBatch.of([SamplingParams()] * 2))
    arguments = (base, None, torch.zeros(2, dtype=torch.long), torch.arange(2), sampling, 2)
    found, wanted = (m.sample_block(*arguments).q_ids for m in (module, block_reference))
    assert torch.equal(found, wanted)


def accepts_runs(module: ModuleType) -> None:
    """Tokens equal to what the target emits, up to one that is not."""
    greedy, seeded = SamplingParams(temperature=0.0), SamplingParams(seed=2, noise_key=2)
    step = acceptance_tests.plan([(greedy, 2), (greedy, 3), (seeded, 2), (seeded, 3)], 50)
    batch = verify_batch(step)
    rows = batch.token_rows
    logits = torch.randn(step.batch_tokens, 50, generator=torch.Generator().manual_seed(1))
    following = torch.from_numpy(step.token_ids).long().roll(-1)
    logits[torch.arange(step.batch_tokens), following] += 40.0
    logits[rows[5]] = logits[rows[5]].roll(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "COUPLED_TILE", 64)
        found = module.verify(logits[rows], batch)
    wanted = reference.verify(logits[rows], batch)
    assert wanted[0].tolist() == [2, 2, 2, 3]
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


def keeps_the_bonus(module: ModuleType) -> None:
    """After the last scheduled slot the plain law is sampled, whatever the drafter proposed beyond it."""
    step = acceptance_tests.plan([(SamplingParams(), 1), (SamplingParams(), 2)], 50)
    assert step.draft is not None
    step.draft.q_ids[0, 1], step.draft.q_probs[0, 1] = np.arange(30, 35), np.eye(5)[0]
    batch = verify_batch(step)
    logits = torch.randn(len(batch.token_rows), 50, generator=torch.Generator().manual_seed(1))
    logits[1, 30] = 8.0
    draws = Draws(torch.full((2, 3), 1e-12).double(), torch.full((2,), 0.5).double())
    found, wanted = (m.verify(logits, batch, draws) for m in (module, reference))
    assert wanted[0][0] == 1 and wanted[1][0] == 30
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


def decides(module: ModuleType) -> None:
    """Every rule, with drafts accepted and refused, draws keyed and given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acceptance_tests, "acceptance", module)
        patch.setattr(module, "VOCAB_TILE", 64)
        patch.setattr(module, "COUPLED_TILE", 64)
        keyed = [SamplingParams(noise_key=n) for n in range(5)]
        coupled = [SamplingParams(seed=n, noise_key=n) for n in range(1, 4)]
        for kinds in (keyed, coupled):
            step = acceptance_tests.plan([(kind, 2 - i % 3) for i, kind in enumerate(kinds)], 70)
            found, wanted = acceptance_tests.both(step, 70)
            assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
        acceptance_tests.test_kernel_refuses_a_draft_token_outside_its_support()
        acceptance_tests.test_kernel_draws_the_recovered_token_from_the_residual()


def distributes(module: ModuleType) -> None:
    rng = torch.Generator().manual_seed(2)
    logits = torch.randn(4, 100, generator=rng) * 3
    logits[:, 80] = 15.0  # the maximum lies in the second tile
    arguments = (logits, torch.tensor([1.0, 0.5, 2.0, 1.0]), torch.tensor([1.0, 0.8, 0.9, 1.0]))
    top_k = torch.tensor([7, 0, 5, 0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "VOCAB_TILE", 64)
        found = module.process_logits(*arguments, top_k)
    torch.testing.assert_close(found, reference.process_logits(*arguments, top_k))


def allocates(module: ModuleType) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget_tests, "budget", module)
        budget_tests.test_kernel_gives_ties_to_the_earlier_slot_then_to_the_earlier_row()
        budget_tests.test_kernel_takes_its_budget_from_the_device()
    a = torch.tensor([[0.9, 0.5, 0.4], [0.8, 0.7, 0.6]])
    assert module.allocate(a, 6, 0.5, torch.tensor([1, 3])).tolist() == [1, 3]
    assert module.allocate(a, 6, 0.5, torch.tensor([3, 1])).tolist() == [2, 1]


def survives(module: ModuleType) -> None:
    found = module.survivals(
        torch.tensor([[0.5, 0.5, 0.0], [0.25, 2.0, 1.0]]), torch.tensor([True] * 2)
    )
    assert found.tolist() == [[0.5, 0.25, 0.0], [0.25, 0.25, 0.25]]
    assert module.survivals(torch.ones(2, 2), torch.tensor([True, False])).sum() == 2


def dispatches(module: ModuleType) -> None:
    rng = torch.Generator().manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "COPY_TILE", 16)
        patch.setattr(module, "WIDTH_TILE", 16)
        ids = torch.randint(0, 5, (37, 2), generator=rng)
        order = module.permutation(ids, 5)
        for ours, theirs in zip(order, token_permute.permutation(ids, 5), strict=True):
            assert torch.equal(ours, theirs)
        tokens = torch.randn(37, 20, generator=rng)
        copies = module.permute(tokens, order)
        assert torch.equal(copies, token_permute.permute(tokens, order))
        weights = torch.rand(37, 2, generator=rng)
        combined = token_permute.combine(copies, weights, order)
        torch.testing.assert_close(module.combine(copies, weights, order), combined)


def multiplies(module: ModuleType) -> None:
    """The second expert's rows are not numbers: the first one's must not notice."""
    rng = torch.Generator().manual_seed(0)
    counts = torch.tensor([3, 2, 66])
    rows, weights, up = (
        torch.randn(shape, generator=rng) for shape in ((71, 70), (3, 65, 70), (3, 65, 70))
    )
    rows[3:5] = torch.nan
    for second in (None, up):
        found = module.grouped_linear(rows, counts, weights, second)
        wanted = grouped_gemm.grouped_linear(rows, counts, weights, second)
        torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-4, equal_nan=True)
