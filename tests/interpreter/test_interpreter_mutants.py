"""A kernel that is wrong in one place fails: positions off by one, blocks of nobody read, rows mixed up, draws reused.

Each mutant is a copy of a kernel's module with one piece of its source replaced; the check that passes for the module
itself must not pass for it.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch

from actors.core.sampling import SamplingBatch, SamplingParams
from kernels import block_reference, grouped_gemm, reference, token_permute
from kernels.block_reference import DraftSampling
from kernels.device import acceptance, attention, block_sample, budget, experts, rope_store
from kernels.reference import Draws
from kernels.rejection import verify_batch
from tests.interpreter import test_interpreter_acceptance as acceptance_tests
from tests.interpreter import test_interpreter_attention as attention_tests
from tests.interpreter import test_interpreter_block_sample as block_tests
from tests.interpreter import test_interpreter_budget as budget_tests
from tests.interpreter import test_interpreter_rope_store as rope_tests
from tests.interpreter.test_interpreter_attention import Step


class Mutant(NamedTuple):
    module: ModuleType
    kernel: str  # the launched one; what is replaced may be a function that it calls
    old: str
    new: str
    check: Callable[[ModuleType], None]


# --- checks ---------------------------------------------------------------------------------------------------------


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


# --- mutants --------------------------------------------------------------------------------------------------------

MUTANTS = {
    "a key after its position": Mutant(
        attention, "attend_kernel", "key[None, :] <= pos[:, None])",
        "key[None, :] <= pos[:, None] + 1)", attends,
    ),
    "not its own key": Mutant(
        attention, "attend_kernel", "key[None, :] <= pos[:, None])",
        "key[None, :] < pos[:, None])", attends,
    ),
    "blocks of nobody": Mutant(
        attention, "attend_kernel", "inside = known[:, None] & (d < DIM)[None, :]",
        "inside = (key >= 0)[:, None] & (d < DIM)[None, :]", attends,
    ),
    "a window too wide": Mutant(
        attention, "attend_kernel", "key[None, :] > pos[:, None] - window",
        "key[None, :] >= pos[:, None] - window", attends,
    ),
    "the block of another row": Mutant(
        attention, "attend_kernel", "tables + row * table_width", "tables + 0 * row", attends,
    ),
    "an offset in its block": Mutant(
        attention, "attend_kernel", "BLOCK_SIZE + key % BLOCK_SIZE",
        "BLOCK_SIZE + (key + 1) % BLOCK_SIZE", attends,
    ),
    "keys of another head": Mutant(
        attention, "attend_kernel", "kv_head.to(tl.int64) * head_slots", "kv_head * 0", attends,
    ),
    "the last key of a split": Mutant(
        attention, "attend_kernel", "(split + 1) * split_keys)", "(split + 1) * split_keys - 1)",
        attends,
    ),
    "the last split": Mutant(
        attention, "join_splits_kernel", "(pos + split_keys) // split_keys", "pos // split_keys",
        attends,
    ),
    "weights of a split": Mutant(
        attention, "join_splits_kernel", "mixed * shrink + own * own_shrink", "mixed * shrink + own",
        attends,
    ),
    "a rotation one position on": Mutant(
        rope_store, "rope_store_kernel", "tl.load(positions + token).to(tl.int64)",
        "(tl.load(positions + token) + 1).to(tl.int64)", stores,
    ),
    "padding is stored": Mutant(
        rope_store, "rope_store_kernel", "slot = tl.load(slots + token).to(tl.int64)",
        "slot = tl.maximum(tl.load(slots + token).to(tl.int64), 0)", stores,
    ),
    "one slot for all": Mutant(
        rope_store, "rope_store_kernel", "tl.load(slots + token)", "tl.load(slots + 0 * token)",
        stores,
    ),
    "keys scaled like queries": Mutant(
        rope_store, "rope_store_kernel", "tl.where(head < HEADS, q_scale, 1.0)", "q_scale", stores,
    ),
    "the bias of another row": Mutant(
        block_sample, "block_maxima_kernel", "previous + row.to(tl.int64) * previous_stride",
        "previous + 0 * row.to(tl.int64)", samples_blocks,
    ),
    "logits of the next row": Mutant(
        block_sample, "block_maxima_kernel", "inside = is_row[:, None] & is_token[None, :]",
        "inside = is_row[:, None] & (token >= 0)[None, :]", keeps_to_the_vocabulary,
    ),
    "one block too few": Mutant(
        block_sample, "choose_blocks_kernel", "left = count - tl.sum(above.to(tl.int32), 0)",
        "left = 0 * tl.sum(above.to(tl.int32), 0)", samples_blocks,
    ),
    "noise of the position before": Mutant(
        block_sample, "draw_kernel", "anchor_positions + row) + slot + 1",
        "anchor_positions + row) + slot", samples_blocks,
    ),
    "one draw for all slots": Mutant(
        block_sample, "draw_kernel", "slot + PURPOSE_DRAFT", "PURPOSE_DRAFT", samples_blocks,
    ),
    "the token after the drawn one": Mutant(
        block_sample, "draw_kernel", "(cumulated <= u * tl.max(cumulated, 0)).to(tl.int32), 0)",
        "(cumulated <= u * tl.max(cumulated, 0)).to(tl.int32), 0) + 1", samples_blocks,
    ),
    "sums of a row not rescaled": Mutant(
        acceptance, "row_stats_kernel", "total * tl.exp(top - base) +", "total +", distributes,
    ),
    "one token too few in top-k": Mutant(
        acceptance, "row_stats_kernel", "tl.minimum(top_k, vocab)", "tl.minimum(top_k - 1, vocab)",
        distributes,
    ),
    "the law of the first row": Mutant(
        acceptance, "probs_kernel", "_prob(logits + row * vocab, token", "_prob(logits, token",
        distributes,
    ),
    "noise of the next position": Mutant(
        acceptance, "emit_kernel", "tl.load(positions + row), 0)", "tl.load(positions + row) + 1, 0)",
        decides,
    ),
    "noise of the first request": Mutant(
        acceptance, "emit_kernel", "row_hash(tl.load(noise_keys + request)",
        "row_hash(tl.load(noise_keys + 0 * request)", decides,
    ),
    "every draft held against the first row": Mutant(
        acceptance, "accept_equal_kernel", "emitted + first + slots", "emitted + first + 0 * slots",
        accepts_runs,
    ),
    "the first row's token comes next": Mutant(
        acceptance, "accept_equal_kernel", "tl.load(emitted + first + run))", "tl.load(emitted + first))",
        accepts_runs,
    ),
    "q left out of the ratio": Mutant(
        acceptance, "accept_reject_kernel", "u * q.to(tl.float64) <", "u <", decides,
    ),
    "drafts outside the support": Mutant(
        acceptance, "accept_reject_kernel", "known & (q > 0) &", "known &", decides,
    ),
    "draws of the next position": Mutant(
        acceptance, "accept_reject_kernel", "uniform(key, tl.load(positions + row), PURPOSE_SAMPLE)",
        "uniform(key, tl.load(positions + row) + 1, PURPOSE_SAMPLE)", decides,
    ),
    "a residual after the last slot": Mutant(
        acceptance, "accept_reject_kernel", "tl.where(run < length, support, 0)",
        "tl.where(run <= length, support, 0)", keeps_the_bonus,
    ),
    "no residual": Mutant(
        acceptance, "accept_reject_kernel", "use = left > MIN_RESIDUAL_MASS", "use = left > 2.0",
        decides,
    ),
    "confidences not multiplied": Mutant(
        budget, "survivals_kernel", "survival *= ", "survival = ", survives,
    ),
    "ties to the later": Mutant(
        budget, "allocate_kernel", "(0x7FFFFFFF - order)", "order", allocates,
    ),
    "one slot over the cap": Mutant(
        budget, "allocate_kernel", "slot[None, :] < cap[:, None]", "slot[None, :] <= cap[:, None]",
        allocates,
    ),
    "the price itself refused": Mutant(
        budget, "allocate_kernel", "a >= tl.load(min_survival)", "a > tl.load(min_survival)",
        allocates,
    ),
    "tiles sorted over each other": Mutant(
        experts, "sort_kernel", "place += tl.sum(is_own.to(tl.int32), 0)", "place += 0", dispatches,
    ),
    "copies of another token": Mutant(
        experts, "sort_kernel", "copy // top_k", "copy % top_k", dispatches,
    ),
    "one row for all copies": Mutant(
        experts, "gather_kernel", "token_of_copy + copy)", "token_of_copy + 0 * copy)", dispatches,
    ),
    "the weight of the first expert": Mutant(
        experts, "combine_kernel", "weights + token * TOP_K + j", "weights + token * TOP_K", dispatches,
    ),
    "the weights of the first expert": Mutant(
        experts, "grouped_kernel", "skipped = expert.to(tl.int64) *", "skipped = 0 * expert.to(tl.int64) *",
        multiplies,
    ),
    "a row's neighbour": Mutant(
        experts, "grouped_kernel", "mask=is_row[:, None] & (k < WIDTH_IN)[None, :]",
        "mask=is_row[:, None] & (k >= 0)[None, :]", multiplies,
    ),
}  # fmt: skip
CHECKS = {mutant.check: mutant.module for mutant in MUTANTS.values()}


def broken(mutant: Mutant, folder: Path) -> ModuleType:
    """The module with the piece replaced, from a file: Triton reads a kernel's source there."""
    assert mutant.module.__file__ is not None
    source = Path(mutant.module.__file__).read_text()
    assert source.count(mutant.old) == 1, (
        f"{mutant.old!r} is there {source.count(mutant.old)} times"
    )
    path = folder / "broken.py"
    path.write_text(source.replace(mutant.old, mutant.new))
    spec = importlib.util.spec_from_file_location(f"broken_{folder.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_kernels_pass_the_checks_their_mutants_fail(check: Callable[[ModuleType], None]) -> None:
    check(CHECKS[check])


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kernel_mutant_is_found(name: str, tmp_path: Path) -> None:
    mutant = MUTANTS[name]
    with pytest.raises(AssertionError):
        mutant.check(broken(mutant, tmp_path))


def test_every_kernel_has_a_mutant() -> None:
    written = set()
    for module in {mutant.module for mutant in MUTANTS.values()}:
        assert module.__file__ is not None
        written |= set(re.findall(r"^def (\w+_kernel)\(", Path(module.__file__).read_text(), re.M))
    assert written == {mutant.kernel for mutant in MUTANTS.values()}
    assert np.unique([m.module.__name__ for m in MUTANTS.values()]).size == 6
