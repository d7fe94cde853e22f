"""The draft context of many requests: keys and values of target features, one padded row a request.

A context token never changes once written: it is the injected feature of a committed token (spec 1.2),
so committing is appending, and there is nothing to crop.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Append:
    """Where the feature rows of one commit go: flattened over requests, duplicates already left out."""

    feature_rows: Int64  # [T] into the features of the message
    rows: Int64  # [T] row of the context
    columns: Int64  # [T] column of the context
    positions: Int64  # [T] absolute


class ContextStore:
    """Rows of [layers, row, kv_heads, column, head_dim] keys and values, grown by doubling.

    Column 0 of a row is position `starts[row]`, normally 0; a request first seen in the middle (the
    drafter restarted) starts later. `lengths` counts positions from 0: the next one expected. One row more than
    `num_rows` belongs to nobody: entries that only pad a batch write there.
    """

    def __init__(
        self,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Start with room for 16 requests of 512 tokens."""
        self._shape = (num_layers, kv_heads, head_dim)
        self._row_of: dict[str, int] = {}
        self._free: list[int] = []
        self.keys = torch.empty(0, dtype=dtype, device=device)
        self.values = torch.empty(0, dtype=dtype, device=device)
        self.starts = np.zeros(0, np.int64)
        self.lengths = np.zeros(0, np.int64)
        self.committed = np.zeros(0, np.int64)
        self.generations = np.zeros(0, np.int64)
        self.num_moves = (
            0  # how often keys and values were reallocated: what was captured before is void
        )
        self._allocate(16, 512)

    @property
    def num_rows(self) -> int:
        """Rows there is room for."""
        return len(self.lengths)

    @property
    def num_columns(self) -> int:
        """Tokens a row has room for."""
        return int(self.keys.shape[3])

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Requests that hold a row."""
        return tuple(self._row_of)

    @property
    def spare_row(self) -> int:
        """The row that no request ever holds."""
        return self.num_rows

    def rows_of(self, request_ids: tuple[str, ...]) -> Int64:
        """Return the row of each request, opening those not seen before."""
        rows = []
        for request_id in request_ids:
            row = self._row_of.get(request_id)
            if row is None:
                row = self._open(request_id)
            rows.append(row)
        return np.array(rows, np.int64)

    def close(self, request_ids: tuple[str, ...]) -> None:
        """Free the rows of these requests; unknown ids are fine."""
        for request_id in request_ids:
            row = self._row_of.pop(request_id, None)
            if row is not None:
                self._free.append(row)
        self._free.sort(reverse=True)  # low rows first, so that a batch tends to be one slice

    def accept(self, rows: Int64, generations: Int64, committed: Int64) -> npt.NDArray[np.bool_]:
        """Return which entries are news [N] bool; a newer generation empties its row first."""
        newer = generations > self.generations[rows]
        reset = rows[newer]
        self.lengths[reset] = self.starts[reset] = self.committed[reset] = 0
        self.generations[reset] = generations[newer]
        fresh: npt.NDArray[np.bool_] = (generations == self.generations[rows]) & (
            committed > self.committed[rows]
        )
        self.committed[rows[fresh]] = committed[fresh]
        return fresh

    def plan_append(self, rows: Int64, first: Int64, cu_len: Int64, fresh: Int64) -> Append:
        """Place the features of the `fresh` entries (indices) and advance their rows.

        Entry i owns feature rows cu_len[i]:cu_len[i+1] for positions from first[i]. Positions the
        context already holds are skipped; after a gap the context starts anew at first[i].
        """
        counts = (cu_len[1:] - cu_len[:-1])[fresh]
        row, start = rows[fresh], first[fresh]
        gap = (start > self.lengths[row]) & (counts > 0)
        self.starts[row[gap]] = self.lengths[row[gap]] = start[gap]
        entry = np.repeat(np.arange(len(fresh)), counts)
        within = np.arange(len(entry)) - np.repeat(np.cumsum(counts) - counts, counts)
        positions = start[entry] + within
        new = positions >= self.lengths[row[entry]]
        entry, within, positions = entry[new], within[new], positions[new]
        self.lengths[row] = np.maximum(self.lengths[row], start + counts)
        columns = positions - self.starts[row[entry]]
        self.cover_columns(int(columns.max(initial=0)))
        return Append(cu_len[:-1][fresh][entry] + within, row[entry], columns, positions)

    def cover_columns(self, last: int) -> None:
        """Grow the rows to hold column `last`."""
        wide = self.num_columns
        while wide <= last:
            wide *= 2
        if wide > self.num_columns:
            self._allocate(self.num_rows, wide)

    def write(self, place: Append, keys: Tensor, values: Tensor) -> None:
        """Store keys, values [layers, T, kv_heads, head_dim] where `place` says."""
        row = torch.from_numpy(place.rows).to(self.keys.device)
        column = torch.from_numpy(place.columns).to(self.keys.device)
        for index in range(len(keys)):
            self.keys[index, row, :, column] = keys[index]
            self.values[index, row, :, column] = values[index]

    def view(self, rows: Int64, own: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values [layers, N, kv, S + own, hd] and bool [N, S + own], true beyond a row's end.

        The last `own` columns are the caller's to write, until the next commit overwrites them. Consecutive rows come
        as a slice, without a copy.
        """
        counts = torch.from_numpy(self.lengths[rows] - self.starts[rows]).to(self.keys.device)
        longest = int(counts.max())
        span = longest + own
        self.cover_columns(span - 1)
        columns = torch.arange(span, device=self.keys.device)
        beyond = (columns >= counts[:, None]) & (columns < longest)
        first = int(rows[0])
        if np.array_equal(rows, np.arange(first, first + len(rows))):
            index: slice | Tensor = slice(first, first + len(rows))
        else:
            index = torch.from_numpy(rows).to(self.keys.device)
        return self.keys[:, :, :, :span][:, index], self.values[:, :, :, :span][:, index], beyond

    def _open(self, request_id: str) -> int:
        if not self._free:
            self._allocate(self.num_rows * 2, self.num_columns)
        row = self._free.pop()
        self._row_of[request_id] = row
        self.starts[row] = self.lengths[row] = self.committed[row] = 0
        self.generations[row] = -1
        return row

    def _allocate(self, num_rows: int, num_columns: int) -> None:
        """Grow to these sizes, keeping what is held."""
        layers, kv, dim = self._shape
        old_rows = self.num_rows
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)
            # Zeros, not empty: columns beyond a row's end meet a weight of exactly 0 and must be finite.
            new = torch.zeros(
                (layers, num_rows + 1, kv, num_columns, dim), dtype=old.dtype, device=old.device
            )
            if old.numel():
                new[:, :old_rows, :, : old.shape[3]] = old[:, :old_rows]
            setattr(self, name, new)
        self.num_moves += 1
        for name in ("starts", "lengths", "committed", "generations"):
            old_array: Int64 = getattr(self, name)
            setattr(
                self, name, np.concatenate([old_array, np.zeros(num_rows - old_rows, np.int64)])
            )
        self._free = sorted([*self._free, *range(old_rows, num_rows)], reverse=True)
