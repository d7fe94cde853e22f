"""A sparse layer whose experts lie on several ranks: each routes its own tokens, whoever holds an expert computes it.

Two ways to the same bits. `all_gather`: every rank gets all tokens, computes the copies that are for its experts, and
weighted terms travel back as a sum in the order of ranks. `all_to_all`: only copies travel, with exact splits, and come
back to be weighted at home. Nothing is dropped, and rows that only pad a step are never routed.

The sum over a token's experts is the unsharded layer's to the last bit: terms come home one by one, or, where a token
has only two, as a sum of which all other addends are zero.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from actors.core.expert_placement import ExpertPlacement
from actors.engine.collective import all_gather, reduce_scatter
from actors.engine.expert_group import ExpertGroup
from actors.engine.experts import ExpertBank, MoeLayer, Router
from kernels import dispatch
from kernels.token_permute import in_order

DispatchMode = Literal["all_gather", "all_to_all"]
DISPATCH_MODES: tuple[DispatchMode, ...] = get_args(DispatchMode)


@dataclass(frozen=True)
class ExpertSharding:
    """What the sharded layers of a model have in common."""

    group: ExpertGroup
    placement: ExpertPlacement
    mode: DispatchMode

    @property
    def held(self) -> tuple[int, ...]:
        """Experts of this rank."""
        return self.placement.held_by(self.group.rank)


class CopyRouting:
    """The tables of a placement on a device."""

    def __init__(self, placement: ExpertPlacement, device: torch.device) -> None:
        ranks = range(placement.num_ranks)
        local = torch.stack([torch.from_numpy(placement.local_index(rank)) for rank in ranks])
        self._servers = torch.from_numpy(placement.server_table()).to(device)
        self._local = local.to(device)  # [ranks, experts]
        self.most_held = max(len(placement.held_by(rank)) for rank in ranks)

    def server(self, source: Tensor, token: Tensor, expert_ids: Tensor) -> Tensor:
        """Rank that serves each copy [n, top_k] of token `token` [n] of rank `source` [n]."""
        at = (token % self._servers.shape[2])[:, None]
        return self._servers[source[:, None], expert_ids, at]

    def local(self, rank: int | Tensor, expert_ids: Tensor) -> Tensor:
        """Place of each copy's expert among those of the rank that serves it."""
        return self._local[rank, expert_ids]


class ShardedMoeLayer(MoeLayer):
    """One layer on one rank of a group.

    Args:
        router: the same on all ranks.
        bank: the experts this rank holds, in the order of `sharding.held`.
        sharding: gives the layout of the step under way and its collectives.
        routing: tables of `sharding.placement`, shared by the layers.

    Attributes:
        load: copies that this rank's own tokens sent to each expert, [num_experts].
    """

    def __init__(
        self,
        router: Router,
        bank: ExpertBank,
        sharding: ExpertSharding,
        routing: CopyRouting,
    ) -> None:
        super().__init__(router, bank)
        assert bank.num_experts == len(sharding.held)
        self._group, self._routing = sharding.group, routing
        self.load = torch.zeros(self.num_experts, dtype=torch.int64)
        self._exchange = self._by_gathering if sharding.mode == "all_gather" else self._by_copies

    def __call__(self, x: Tensor) -> Tensor:
        """x [own tokens or more, hidden]: rows beyond this rank's tokens of the step pad it and repeat the last one."""
        started, num_own = time.perf_counter(), self._group.num_own
        weights, expert_ids = (t[:num_own] for t in self.route(x))
        self.load += torch.bincount(expert_ids.reshape(-1), minlength=self.num_experts).to("cpu")
        out = self._exchange(x[:num_own], weights, expert_ids)
        self._group.shared_s += time.perf_counter() - started
        if not 0 < num_own < len(x):
            return out
        return out.index_select(0, torch.arange(len(x), device=x.device).clamp_max(num_own - 1))

    def place(self, bank: ExpertBank, routing: CopyRouting) -> None:
        """From the next step on, this rank holds the experts of `bank`, and all ranks go by `routing`."""
        self.bank, self._routing = bank, routing

    def join(self, like: Tensor) -> None:
        """Serve the others' tokens in a step in which this rank has none; `like` gives dtype and device."""
        self(like.new_empty((0, self.router.hidden_size)))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `MoeLayer.route`; of no tokens nothing is computed."""
        if len(x):
            return super().route(x)
        shape = (0, self.router.top_k)
        return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int64)

    # --- all-gather, reduce-scatter ---------------------------------------------------------------------------------

    def _by_gathering(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        group, top_k = self._group, self.router.top_k
        most = group.layout.most_tokens
        size, hidden = group.size, x.shape[1]
        packed = _pack(x, weights, expert_ids, most)
        tokens, weights, expert_ids = _unpack(
            all_gather(group.collective, packed).flatten(0, 1), x.dtype, hidden, top_k
        )
        source = torch.arange(size, device=x.device).repeat_interleave(most)
        number = torch.arange(most, device=x.device).repeat(size)
        counts = torch.tensor(group.layout.num_tokens, device=x.device)
        is_own = self._routing.server(source, number, expert_ids) == group.rank
        is_own &= (number < counts[source])[:, None]
        copies = is_own.view(-1).nonzero()[:, 0]  # token * top_k + j
        local = self._routing.local(group.rank, expert_ids.view(-1)[copies])
        own = tokens.index_select(0, copies // top_k)
        self.trace("dispatch")
        done = self._apply(own, local)
        self.trace("experts")
        terms = torch.zeros((size * most * top_k, hidden), dtype=torch.float32, device=x.device)
        terms[copies] = done.float() * weights.reshape(-1, 1)[copies]
        terms = terms.view(size, most, top_k, hidden)
        # Two addends have the same sum in any order: they may be added here or at home.
        if top_k <= 2:
            terms = terms.sum(2, keepdim=True)
        home = reduce_scatter(group.collective, terms)[: group.num_own]
        return in_order(home).to(x.dtype)

    # --- all-to-all with exact splits -------------------------------------------------------------------------------

    def _by_copies(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        group, most_held = self._group, self._routing.most_held
        number = torch.arange(len(x), device=x.device)
        server = self._routing.server(torch.full_like(number, group.rank), number, expert_ids)
        bins = server * most_held + self._routing.local(server, expert_ids)
        order = dispatch.chosen("permutation", x.device.type)(bins, group.size * most_held)
        copies = dispatch.chosen("permute", x.device.type)(x, order)
        sent = order.counts.view(group.size, most_held)
        received = all_gather(group.collective, sent)[:, group.rank]  # [source, local expert]
        send, receive = sent.sum(1).tolist(), received.sum(1).tolist()
        arrived = group.collective.all_to_all(copies, send, receive)
        places = torch.arange(most_held, device=x.device).repeat(group.size)
        local = places.repeat_interleave(received.reshape(-1))
        self.trace("dispatch")
        done = self._apply(arrived, local)
        self.trace("experts")
        back = group.collective.all_to_all(done, receive, send)
        out: Tensor = dispatch.chosen("combine", x.device.type)(back, weights, order)
        return out

    def _apply(self, rows: Tensor, local: Tensor) -> Tensor:
        """Expert local[i] of this rank applied to row i, whatever their order."""
        order = dispatch.chosen("permutation", rows.device.type)(
            local[:, None], self.bank.num_experts
        )
        done = self.bank(rows.index_select(0, order.token_of_copy), order.counts)
        return done.index_select(0, order.place_of_copy)


def _pack(x: Tensor, weights: Tensor, expert_ids: Tensor, num_rows: int) -> Tensor:
    """A rank's tokens with their routing as bytes, padded to `num_rows`: one collective instead of three."""
    parts = (x, weights, expert_ids.to(torch.int32))
    row = torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)
    padding = row.new_zeros((num_rows - len(row), row.shape[1]))
    return torch.cat([row, padding])


def _unpack(
    rows: Tensor, dtype: torch.dtype, hidden: int, top_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, weights and expert ids of packed rows; padding reads as expert 0 of weight 0."""
    width = hidden * dtype.itemsize
    tokens = rows[:, :width].contiguous().view(dtype)
    weights = rows[:, width : width + 4 * top_k].contiguous().view(torch.float32)
    expert_ids = rows[:, width + 4 * top_k :].contiguous().view(torch.int32).long()
    return tokens, weights, expert_ids
