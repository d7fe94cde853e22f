"""Experts spread over ranks compute what one rank computes, bit for bit, whoever has tokens and wherever they go."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actors.core.expert_placement import ExpertPlacement, slices_of
from actors.engine.expert_group import ExpertGroup
from actors.engine.experts import (
    AlwaysOn,
    ExpertBank,
    ExpertList,
    ExpertStacks,
    MoeLayer,
    TopKRouter,
)
from actors.engine.packed_linear import GatedMlp, Linear
from actors.engine.sharded_experts import (
    DISPATCH_MODES,
    CopyRouting,
    DispatchMode,
    ExpertSharding,
    ShardedMoeLayer,
)
from tests.torch_cpu.thread_ranks import Board, ThreadCollective, on_ranks

HIDDEN, INNER, EXPERTS = 32, 24, 6
CPU = torch.device("cpu")
REPLICATED = ((0, 1), (0,), (1,), (0, 1), (1,), (0,))


class CountingBank:
    """Experts that count the rows they are given."""

    rows = 0

    def __init__(self, bank: ExpertBank) -> None:
        self._bank, self.num_experts = bank, bank.num_experts

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        CountingBank.rows += len(rows)
        return self._bank(rows, counts)


class Weights:
    """Of one layer; `hot`: the router sends every token to that expert first."""

    def __init__(self, dtype: torch.dtype = torch.float32, hot: int | None = None) -> None:
        rng = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=rng) * 0.3).to(dtype)

        self.router = normal(EXPERTS, HIDDEN)
        if hot is not None:
            self.router.zero_()
            self.router[hot] = 4.0
        self.gate, self.up = normal(EXPERTS, INNER, HIDDEN), normal(EXPERTS, INNER, HIDDEN)
        self.down = normal(EXPERTS, HIDDEN, INNER)

    def bank(self, experts: tuple[int, ...], stacked: bool) -> ExpertBank:
        own = list(experts)
        if stacked:
            return ExpertStacks(self.gate[own], self.up[own], self.down[own])
        return ExpertList([GatedMlp(self.gate[e], self.up[e], self.down[e]) for e in own], 2)

    def whole(self, top_k: int, stacked: bool = False) -> MoeLayer:
        return MoeLayer(self.routed(top_k), self.bank(tuple(range(EXPERTS)), stacked))

    def routed(self, top_k: int) -> TopKRouter:
        return TopKRouter(Linear(self.router), top_k, True)


def sharded(
    weights: Weights,
    tokens: list[Tensor],
    mode: DispatchMode,
    top_k: int = 2,
    placement: ExpertPlacement | None = None,
    stacked: bool = False,
    padding: int = 0,
) -> tuple[list[Tensor], Board]:
    """What each rank's layer makes of its own tokens; `padding` rows are added to each that has some."""
    size = len(tokens)
    placed = placement or ExpertPlacement.even(EXPERTS, size)

    def rank(collective: ThreadCollective) -> Tensor:
        own = tokens[collective.rank]
        group = ExpertGroup(collective.rank, size)
        group.attach(collective)
        sharding = ExpertSharding(group, placed, mode)
        layer = ShardedMoeLayer(
            weights.routed(top_k),
            CountingBank(weights.bank(sharding.held, stacked)),
            sharding,
            CopyRouting(placed, CPU),
        )
        layout = sharding.group.agree(len(own))
        assert layout.num_tokens == tuple(map(len, tokens))
        if not len(own):
            layer.join(own)
            return own
        # Padding must not matter: it is not routed, so it may hold anything.
        filler = torch.full((padding, HIDDEN), float("nan"), dtype=own.dtype)
        return layer(torch.cat([own, filler]))

    return on_ranks(size, rank)


def some_tokens(count: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("mode", DISPATCH_MODES)
@settings(deadline=None, max_examples=25)
@given(
    counts=st.sampled_from([1, 2, 4]).flatmap(
        lambda size: st.lists(st.sampled_from([0, 2, 3, 9, 17]), min_size=size, max_size=size)
    ),
    top_k=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    hot=st.sampled_from([None, None, 0, EXPERTS - 1]),
)
def test_sharded_experts_equal_the_whole_layer_bit_for_bit(
    mode: DispatchMode, counts: list[int], top_k: int, dtype: torch.dtype, hot: int | None
) -> None:
    torch.set_num_threads(1)
    weights = Weights(dtype, hot)
    tokens = [some_tokens(n, seed, dtype) for seed, n in enumerate(counts)]
    found, _ = sharded(weights, tokens, mode, top_k)
    whole = weights.whole(top_k)
    for own, got in zip(tokens, found, strict=True):
        assert torch.equal(got, whole(own) if len(own) else own)


@pytest.mark.parametrize("mode", DISPATCH_MODES)
def test_terms_of_many_experts_are_added_in_one_order(mode: DispatchMode) -> None:
    """Of three ranks and more than two experts a token: a sum by rank rounds differently for some tokens."""
    weights = Weights()
    tokens = [some_tokens(100, 1), some_tokens(100, 2), some_tokens(0, 3)]
    found, _ = sharded(weights, tokens, mode, top_k=5)
    for own, got in zip(tokens[:2], found, strict=False):
        assert torch.equal(got, weights.whole(5)(own))


@pytest.mark.parametrize("mode", DISPATCH_MODES)
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_replicated_experts_give_the_same_bits(mode: DispatchMode, top_k: int) -> None:
    weights = Weights()
    tokens = [some_tokens(7, 1), some_tokens(11, 2)]
    found, _ = sharded(weights, tokens, mode, top_k, ExpertPlacement(2, REPLICATED))
    for own, got in zip(tokens, found, strict=True):
        assert torch.equal(got, weights.whole(top_k)(own))


@pytest.mark.parametrize("mode", DISPATCH_MODES)
def test_rows_that_pad_a_step_are_never_routed_to_experts(mode: DispatchMode) -> None:
    weights = Weights()
    tokens = [some_tokens(2, 1), some_tokens(5, 2)]
    CountingBank.rows = 0
    found, _ = sharded(weights, tokens, mode, padding=3)
    for own, got in zip(tokens, found, strict=True):
        assert torch.equal(got[: len(own)], weights.whole(2)(own))
        assert torch.equal(got[len(own) :], got[len(own) - 1 :][:1].expand(3, -1))
    assert CountingBank.rows == 2 * (2 + 5)  # two copies of every token, none of padding


@pytest.mark.parametrize("mode", DISPATCH_MODES)
def test_no_expert_drops_a_token_when_all_go_to_one(mode: DispatchMode) -> None:
    weights = Weights(hot=2)
    tokens = [some_tokens(40, seed).abs() for seed in range(4)]
    found, _ = sharded(weights, tokens, mode, top_k=1)
    expert = weights.bank((2,), stacked=False)
    for own, got in zip(tokens, found, strict=True):
        assert torch.equal(got, expert(own, torch.tensor([len(own)])))


@pytest.mark.parametrize("mode", DISPATCH_MODES)
def test_stacked_experts_of_a_gpu_may_be_sharded_too(mode: DispatchMode) -> None:
    weights = Weights()
    tokens = [some_tokens(4, 1), some_tokens(0, 2), some_tokens(6, 3)]
    found, _ = sharded(weights, tokens, mode, stacked=True)
    whole = weights.whole(2, stacked=True)
    for own, got in zip(tokens, found, strict=True):
        torch.testing.assert_close(got, whole(own) if len(own) else own, atol=1e-6, rtol=1e-5)


def test_every_expert_group_rank_makes_the_same_collectives() -> None:
    """Ranks without tokens, with one and with many: as many calls, of fitting splits, for each of them."""
    tokens = [some_tokens(0, 0), some_tokens(2, 1), some_tokens(30, 2), some_tokens(0, 3)]
    for mode, calls in (("all_gather", 3), ("all_to_all", 4)):
        _, board = sharded(Weights(), tokens, cast(DispatchMode, mode))
        assert len(board.calls) == calls  # the vote, then the layer's


@pytest.mark.parametrize("mode", DISPATCH_MODES)
@settings(deadline=None, max_examples=15)
@given(
    counts=st.sampled_from([1, 2, 3, 4]).flatmap(
        lambda size: st.lists(st.sampled_from([0, 1, 2, 9, 17]), min_size=size, max_size=size)
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_slices_of_a_dense_layer_are_experts_that_are_always_on(
    mode: DispatchMode, counts: list[int], dtype: torch.dtype
) -> None:
    """Whoever holds them, their sum has the bits of one rank's; in fp32 it is the uncut layer up to rounding."""
    torch.set_num_threads(1)
    weights = Weights(dtype)
    gate, up, down = weights.gate[0], weights.up[0], weights.down[0]
    tokens = [some_tokens(n, seed, dtype) for seed, n in enumerate(counts)]
    bounds = slices_of(INNER, len(counts))

    def slices(held: tuple[int, ...]) -> ExpertList:
        parts = [slice(*bounds[index]) for index in held]
        return ExpertList([GatedMlp(gate[p], up[p], down[:, p]) for p in parts], 2)

    router = AlwaysOn(len(bounds), HIDDEN)
    alone = MoeLayer(router, slices(tuple(range(len(bounds)))))
    placed = ExpertPlacement.even(len(bounds), len(counts))

    def rank(collective: ThreadCollective) -> Tensor:
        own = tokens[collective.rank]
        group = ExpertGroup(collective.rank, len(counts))
        group.attach(collective)
        sharding = ExpertSharding(group, placed, mode)
        routing = CopyRouting(placed, CPU)
        layer = ShardedMoeLayer(router, slices(sharding.held), sharding, routing)
        group.agree(len(own))
        return layer(own)

    found, _ = on_ranks(len(counts), rank)
    uncut = GatedMlp(gate, up, down)
    for own, got in zip(tokens, found, strict=True):
        if len(own):
            assert torch.equal(got, alone(own))
            tolerance = 2e-5 if dtype == torch.float32 else 0.1
            torch.testing.assert_close(got, uncut(own), atol=tolerance, rtol=tolerance)
