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

from kernels.device import acceptance, attention, block_sample, budget, experts, rope_store
from tests.interpreter.kernel_checks import (
    accepts_runs,
    allocates,
    attends,
    decides,
    dispatches,
    distributes,
    keeps_the_bonus,
    keeps_to_the_vocabulary,
    multiplies,
    samples_blocks,
    stores,
    survives,
)


class Mutant(NamedTuple):
    module: ModuleType
    kernel: str  # the launched one; what is replaced may be a function that it calls
    old: str
    new: str
    check: Callable[[ModuleType], None]


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
