"""K/V kept from step to step must be what the store holds, whatever happened to rows and blocks in between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from actors.core.kv_blocks import BlockLease, BlockPool
from actors.engine.trial import TrialSequences
from kernels import row_mirror
from kernels.kv_store import KvStore, wide
from kernels.ragged_attention import (
    AttentionLayout,
    RaggedRows,
    Tiling,
    attend,
    attention_layout,
    ragged_rows,
)
from kernels.row_mirror import MirrorStep, RowMirrors
from tests.torch_cpu.tiny_target import tiny_engine

HEADS, KV_HEADS, DIM, BLOCK, LAYERS, NUM_BLOCKS = 4, 2, 16, 4, 2, 160
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def keep_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_mirror, "LEAST_TOKENS", 1)


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    """Products this small only wait for a second one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Row:
    lease: BlockLease
    length: int = 0  # committed tokens


@dataclass
class World:
    """Rows that live as those of a rank do, over one store; every step is computed with and without mirrors."""

    seed: int
    dtype: torch.dtype = torch.float32
    windows: tuple[int, ...] = (0,)
    rows: dict[str, Row] = field(default_factory=dict)
    num_begun: int = 0
    num_kept: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.noise = torch.Generator().manual_seed(self.seed)
        self.store = KvStore(LAYERS, KV_HEADS, DIM, NUM_BLOCKS, BLOCK, self.dtype, CPU)
        self.pool = BlockPool(NUM_BLOCKS, BLOCK)
        self.mirrors = {window: RowMirrors(self.store) for window in self.windows}

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.noise).to(self.dtype)

    def come(self, shared: tuple[int, ...] = ()) -> None:
        lease = self.pool.lease(len(shared) * BLOCK + 1, shared)
        if lease is not None:
            self.rows[f"row {self.num_begun}"] = Row(lease, len(shared) * BLOCK)
            self.num_begun += 1

    def share(self) -> None:
        """A row that begins with the full blocks of another one."""
        for row in self.rows.values():
            if row.length >= BLOCK:
                block = int(row.lease.blocks[0])
                self.pool.name(block, b"%d %d" % (block, self.num_begun))
                self.come((block,))
                return

    def go(self) -> None:
        if self.rows:
            name = str(self.rng.choice(list(self.rows)))
            self.rows.pop(name).lease.release()

    def step(self, query_len: dict[str, int], *, fails: bool = False) -> None:
        """The given rows compute so many tokens; fewer of them are committed."""
        counts = {
            name: count
            for name, count in query_len.items()
            if self.rows[name].lease.extend(self.rows[name].length + count)
        }
        if not counts:
            return
        plan = self.plan(counts)
        slots = self.slots(plan)
        queries = self.random(len(slots), HEADS, DIM)
        kept = {window: self.layout(plan, window, self.mirrors[window]) for window in self.windows}
        for layer in range(LAYERS):
            if fails and layer:
                return  # it wrote and attended in part, and nobody learns of its end
            window = self.windows[layer % len(self.windows)]
            self.store.write(layer, slots, self.random(len(slots), 2 * KV_HEADS, DIM))
            found = attend(queries, self.store, layer, kept[window])
            plain = attend(queries, self.store, layer, self.layout(plan, window))
            assert torch.equal(found, plain)
        for layout in kept.values():
            layout.done()
            self.num_kept += sum(isinstance(g.source, MirrorStep) for g in layout.groups)
        for name, count in counts.items():
            self.rows[name].length += int(self.rng.integers(1, count + 1))

    def plan(self, counts: dict[str, int]) -> RaggedRows:
        own = [self.rows[name] for name in counts]
        width = max(row.lease.num_blocks for row in own)
        tables = np.zeros((len(own), width), np.int32)
        for table, row in zip(tables, own, strict=True):
            table[: row.lease.num_blocks] = row.lease.blocks
        return ragged_rows(
            np.cumsum([0, *counts.values()]).astype(np.int32),
            np.concatenate(
                [r.length + np.arange(n) for r, n in zip(own, counts.values(), strict=True)]
            ).astype(np.int32),
            np.array([row.length for row in own], np.int32),
            tables,
            tuple(counts),
        )

    def slots(self, plan: RaggedRows) -> Tensor:
        row = np.repeat(np.arange(len(plan.kv_len)), np.diff(plan.cu_query_len))
        blocks: npt.NDArray[np.int64] = plan.block_tables[row, plan.positions // BLOCK]
        return torch.from_numpy(blocks * BLOCK + plan.positions % BLOCK)

    def layout(
        self, plan: RaggedRows, window: int, mirrors: RowMirrors | None = None
    ) -> AttentionLayout:
        like = torch.zeros(0, dtype=self.dtype)
        tiling = Tiling.of(self.dtype, reproducible=False)
        return attention_layout(plan, self.store, HEADS // KV_HEADS, tiling, like, window, mirrors)

    def live(self, num_steps: int) -> None:
        for _ in range(num_steps):
            happens = self.rng.random()
            if happens < 0.25 or not self.rows:
                self.come()
            elif happens < 0.33:
                self.share()
            elif happens < 0.45:
                self.go()
            elif happens < 0.5 and len(self.rows) > 1:
                self.copy()
            names = [name for name in self.rows if self.rng.random() < 0.9]
            longest = 20 if self.rng.random() < 0.15 else 4  # now and then a chunk of a prompt
            counts = {name: int(self.rng.integers(1, longest + 1)) for name in names}
            self.step(counts, fails=self.rng.random() < 0.1)
            assert all(m.num_tokens <= NUM_BLOCKS * BLOCK for m in self.mirrors.values())

    def copy(self) -> None:
        """The store's own copying changes blocks behind everybody's back."""
        one, other = list(self.rows.values())[:2]
        self.store.copy_blocks(one.lease.blocks[:1], other.lease.blocks[:1])


@pytest.mark.parametrize("windows", [(0,), (6,), (0, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(5))
def test_what_is_kept_is_what_the_store_holds(
    seed: int, dtype: torch.dtype, windows: tuple[int, ...]
) -> None:
    world = World(seed, dtype, windows)
    world.live(150)
    assert world.num_kept > 50 and world.num_begun > 15


def begun(*lengths: int) -> World:
    """Rows of these lengths after one step of all."""
    world = World(0)
    for _ in lengths:
        world.come()
    for name, length in zip(world.rows, lengths, strict=True):
        world.step({name: length})
        world.rows[name].length = length
    advance(world)
    return world


def advance(world: World) -> MirrorStep:
    """A decode step of all rows; what it did to the mirror."""
    names = list(world.rows)
    world.step(dict.fromkeys(names, 1))
    (mirror,) = world.mirrors[0]._mirrors.values()
    assert mirror.step is not None
    return mirror.step


def test_rows_that_go_on_copy_nothing_but_their_tokens() -> None:
    world = begun(5, 9, 13)
    assert advance(world).blocks is None
    assert len(advance(world).tokens[0]) == 3 * 2 * KV_HEADS


def test_a_row_that_leaves_moves_one_other_and_one_that_comes_moves_none() -> None:
    world = begun(5, 9, 5, 13)
    world.rows.pop("row 1").lease.release()
    step = advance(world)
    assert step.blocks is not None
    moved = world.rows["row 3"].lease.num_blocks
    assert len(step.blocks[0]) == moved * 2 * KV_HEADS
    assert [list(world.rows)[row] for row in step.order] == ["row 0", "row 3", "row 2"]
    world.come()
    step = advance(world)
    assert step.blocks is not None and len(step.blocks[0]) == 2 * KV_HEADS


def test_mirrors_never_take_more_than_the_store() -> None:
    store = KvStore(1, KV_HEADS, DIM, 32, BLOCK, torch.float32, CPU)
    mirrors = RowMirrors(store)
    assert mirrors.find("a", 129) is None, "more than the store, by padding"
    first, second = mirrors.find("a", 64), mirrors.find("b", 40)
    assert first is not None and second is not None
    assert mirrors.num_tokens == 80 + 48, "a quarter to spare, as far as there is room"
    assert mirrors.find("a", 129) is None and mirrors.find("a", 64) is first
    assert mirrors.find("c", 40) is None, "both are in use"
    for _ in range(row_mirror.IN_USE):
        assert mirrors.find("b", 40) is second
    assert mirrors.find("c", 40) is not None and mirrors.num_tokens <= 128
    assert mirrors.find("a", 64) is None, "it was unused for longest, so it went"
    for _ in range(row_mirror.IN_USE):
        mirrors.find("nothing to keep", 0)
    whole = mirrors.find("d", 128)
    assert whole is not None and mirrors.num_tokens == whole.num_tokens == 128


def test_few_keys_are_read_from_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_mirror, "LEAST_TOKENS", 100)
    world = World(0)
    world.come()
    world.step({"row 0": 1})
    assert world.num_kept == 0 and world.mirrors[0].num_tokens == 0


def test_a_step_that_another_has_overtaken_is_refused_and_makes_nothing_known() -> None:
    world = begun(5, 9)
    names = list(world.rows)
    world.come()
    late = world.layout(world.plan(dict.fromkeys(world.rows, 1)), 0, world.mirrors[0])
    world.step(dict.fromkeys(names, 1))
    with pytest.raises(AssertionError, match="another step"):
        attend(world.random(3, HEADS, DIM), world.store, 0, late)
    late.done()
    step = advance(world)
    assert step.blocks is not None and len(step.blocks[0]) == 2 * KV_HEADS


@pytest.mark.parametrize("shape", [(5, 8), (5, 6)])
def test_wide_rows_are_the_same_bytes(shape: tuple[int, int]) -> None:
    rows = torch.randn(shape).bfloat16()
    target = torch.zeros_like(rows)
    index = torch.tensor([3, 0, 4, 2, 1])
    wide(target).index_copy_(0, index, wide(rows))
    assert torch.equal(target[index], rows)


def test_the_target_gives_the_same_bits_with_and_without_mirrors() -> None:
    engines = [tiny_engine("cpu") for _ in range(2)]
    engines[1].mirrors = {}
    ids = [np.random.default_rng(row).integers(0, 50, 60 + 7 * row) for row in range(4)]
    runs = [TrialSequences(engine, ids) for engine in engines]
    steps: list[dict[int, int]] = [{0: 20}, {0: 2, 1: 30}, {0: 1, 1: 4, 2: 9}]
    steps += [
        {0: 3, 1: 1, 2: 2, 3: 8},
        {1: 2, 3: 1},
        {0: 1, 3: 2},
        {0: 4, 1: 4, 2: 4, 3: 4},
        {0: 1, 1: 2, 2: 1, 3: 1},
    ]
    for counts in steps:
        kept, read = (run.logits(counts) for run in runs)
        for a, b in zip(kept, read, strict=True):
            assert torch.equal(a, b)
    kept = [m.step for own in engines[0].mirrors.values() for m in own._mirrors.values()]
    assert kept and all(step is not None and step.blocks is None for step in kept), "known by now"
