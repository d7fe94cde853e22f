"""K/V of the rows that decode, contiguous, kept from step to step: what batched products on a CPU want to read.

Gathering every block of every row in every layer of every step costs more than the products it is for (a CPU has no
kernel that follows a block table). But from one step to the next of the same rows almost nothing of it changes. So a
mirror keeps what was gathered, and a step brings it up to date: with the tokens it has just stored, and with the blocks
a row has got otherwise (a row that comes, a shared prefix, a row in the place of another one).

A mirror has places; a row keeps its place from step to step, and one that leaves is replaced by the last. What lies in
a place is known by the block each part was copied from and when: `KvStore` notes when a block was last written, so a
block that was freed, given to somebody else and written there is copied again. Nothing here is trusted across a step
that did not reach its end: what a step overwrites is forgotten when it begins and known again when it is `done`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.kv_store import KvStore, wide

Int = npt.NDArray[np.int64]

SPARE = 1.25  # room of a mirror over what it is first needed for
IN_USE = 32  # groups of rows since a mirror was used last, after which its room may be taken
LEAST_TOKENS = 512  # fewer keys, over all rows, are gathered as fast as they are kept


@dataclass(frozen=True)
class MirrorStep:
    """How one step brings a mirror up to date and reads it.

    Attributes:
        order: [G] which of the step's rows lies in each place.
    """

    mirror: RowMirror
    order: Int
    wanted: Int  # [G, num_blocks] block of each place; -1: nobody looks at it
    blocks: tuple[Tensor, Tensor] | None  # rows of blocks in the pool, and where they go
    tokens: tuple[Tensor, Tensor]  # rows of tokens in the pool, and where they go

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values, each [G * kv_heads, num_blocks * block_size, head_dim], contiguous.

        The step's own tokens must be in the store.
        """
        mirror, store = self.mirror, self.mirror.store
        assert mirror.step is self, "another step has changed this mirror since"
        kept, block = mirror.layer(layer), store.block_size * store.head_dim
        if self.blocks is not None:
            found = store.block_rows(layer).index_select(0, self.blocks[0])
            wide(kept.view(-1, block)).index_copy_(0, self.blocks[1], wide(found))
        found = store.token_rows(layer).index_select(0, self.tokens[0])
        wide(kept.view(-1, store.head_dim)).index_copy_(0, self.tokens[1], wide(found))
        shape = (len(self.order) * store.num_kv_heads, -1, store.head_dim)
        used, half = self.wanted.size * store.num_kv_heads * block, len(kept) // 2
        return kept[:used].view(shape), kept[half : half + used].view(shape)

    def done(self) -> None:
        """All layers were read: what was copied is known from now on."""
        if self.mirror.step is self:
            self.mirror.know(self.wanted)


@dataclass
class RowMirror:
    """The K/V of up to `num_tokens` keys, all rows of one width; see the module.

    Attributes:
        num_tokens: its size, a multiple of the block size.
        step: the one that used it last.
        last_used: its number.
    """

    store: KvStore
    num_tokens: int
    step: MirrorStep | None = None
    last_used: int = 0
    _layers: dict[int, Tensor] = field(default_factory=dict)
    _names: list[str] = field(default_factory=list)  # by place
    _blocks: Int = field(default_factory=lambda: np.zeros((0, 0), np.int64))  # by place; -1: none
    _copied_at: Int = field(default_factory=lambda: np.zeros((0, 0), np.int64))

    def begin(
        self, names: Sequence[str], tables: Int, num_used: Int, token_row: Int, token_at: Int
    ) -> MirrorStep:
        """Find a place for every row and what has to be copied.

        Args:
            names: [G] of the rows.
            tables: [G, num_blocks] their blocks.
            num_used: [G] blocks of each that hold anything its queries see.
            token_row, token_at: [B'] row, and place within its keys, of each token that the step stores.
        """
        store, (num_rows, num_blocks) = self.store, tables.shape
        if num_blocks != self._blocks.shape[1]:
            self._forget(num_blocks)
        order = self._arrange(names)
        place = np.empty(num_rows, np.int64)
        place[order] = np.arange(num_rows)
        wanted = np.where(np.arange(num_blocks) < num_used[:, None], tables, -1)[order]
        known = self._blocks[:num_rows]
        is_fresh = (known == wanted) & (store.written_at[wanted] <= self._copied_at[:num_rows])
        at, index = np.nonzero(~is_fresh & (wanted >= 0))
        blocks = None
        if len(at):
            known[at, index] = -1
            blocks = (
                store.rows_of(torch.from_numpy(wanted[at, index])),
                self._targets(at, index, store.block_size),
            )
        size = store.block_size
        slots = tables[token_row, token_at // size] * size + token_at % size
        tokens = (
            store.token_rows_of(torch.from_numpy(slots)),
            self._targets(place[token_row], token_at, 1),
        )
        self.step = MirrorStep(self, order, wanted, blocks, tokens)
        return self.step

    def know(self, wanted: Int) -> None:
        """The parts `wanted` [G, num_blocks] of the first places are as the store has them now."""
        is_there = wanted >= 0
        self._blocks[: len(wanted)][is_there] = wanted[is_there]
        self._copied_at[: len(wanted)][is_there] = self.store.clock

    def layer(self, index: int) -> Tensor:
        """[2 * num_tokens * kv_heads * head_dim] of a layer, keys before values; place after place, in each head after
        head."""
        kept = self._layers.get(index)
        if kept is None:
            # Zeroed, as the store is: a masked key is multiplied by zero, so it must be a number.
            size = 2 * self.num_tokens * self.store.num_kv_heads * self.store.head_dim
            kept = self._layers[index] = self.store.pool(index).new_zeros(size)
        return kept

    def _forget(self, num_blocks: int) -> None:
        """Nothing is known any more; places are `num_blocks` wide from now on."""
        num_places = self.num_tokens // (num_blocks * self.store.block_size)
        self._names = []
        self._blocks = np.full((num_places, num_blocks), -1, np.int64)
        self._copied_at = np.zeros((num_places, num_blocks), np.int64)

    def _arrange(self, names: Sequence[str]) -> Int:
        """Which row lies in each of the first len(names) places; rows that have one of these keep it."""
        row_of = {name: row for row, name in enumerate(names)}
        assert len(row_of) == len(names), "two rows of one name"
        order = [row_of.pop(name, -1) for name in self._names[: len(names)]]
        order += [-1] * (len(names) - len(order))
        others = iter(row_of.values())
        order = [next(others) if row < 0 else row for row in order]
        self._names = [names[row] for row in order]
        return np.array(order, np.int64)

    def _targets(self, place: Int, index: Int, part: int) -> Tensor:
        """Where parts of `part` tokens go, keys and values of every head, [2 * kv_heads * n]: the `index`-th of each
        `place`."""
        store = self.store
        width = self._blocks.shape[1] * store.block_size // part
        heads = np.arange(store.num_kv_heads)[:, None]
        keys = (place * store.num_kv_heads + heads) * width + index
        values = keys + self.num_tokens // part * store.num_kv_heads
        return torch.from_numpy(np.concatenate([keys, values]).reshape(-1))


class RowMirrors:
    """The mirrors of the layers of one store that attend alike, one for each kind of rows; together they take at most
    as much as these layers do in the store."""

    def __init__(self, store: KvStore) -> None:
        self._store = store
        self._most_tokens = store.num_blocks * store.block_size
        self._mirrors: dict[Hashable, RowMirror] = {}
        self._num_asked = 0

    @property
    def block_size(self) -> int:
        return self._store.block_size

    @property
    def num_tokens(self) -> int:
        """Keys all of them have room for: what they take beside the store."""
        return sum(mirror.num_tokens for mirror in self._mirrors.values())

    def find(self, kind: Hashable, num_tokens: int) -> RowMirror | None:
        """A mirror for rows of this kind, with room for `num_tokens` keys.

        None where keeping so few does not pay, and where there is no room: padded rows would take more than the store,
        or others that are in use take it.
        """
        self._num_asked += 1
        if not LEAST_TOKENS <= num_tokens <= self._most_tokens:
            return None
        mirror = self._mirrors.get(kind)
        if mirror is None or mirror.num_tokens < num_tokens:
            self._mirrors.pop(kind, None)
            left = self._make_room(num_tokens)
            if left < num_tokens:
                return None
            size = self.block_size
            room = max(num_tokens, min(int(num_tokens * SPARE) // size * size, left))
            mirror = self._mirrors[kind] = RowMirror(self._store, room)
        mirror.last_used = self._num_asked
        return mirror

    def _make_room(self, num_tokens: int) -> int:
        """Keys there is room for, having dropped as many mirrors out of use as needed, the longest unused first."""
        unused = [k for k, m in self._mirrors.items() if m.last_used < self._num_asked - IN_USE]
        unused.sort(key=lambda kind: self._mirrors[kind].last_used)
        for kind in unused:
            if self._most_tokens - self.num_tokens >= num_tokens:
                break
            del self._mirrors[kind]
        return self._most_tokens - self.num_tokens
