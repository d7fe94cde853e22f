"""Tokens reach exactly their experts: none dropped, none seen by another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from actors.engine.experts import ExpertList, MoeLayer, TopKRouter
from actors.engine.packed_linear import GatedMlp, Linear
from kernels.grouped_gemm import grouped_apply
from kernels.token_permute import combine, permutation

HIDDEN, INNER, EXPERTS, TOP_K = 32, 24, 5, 2


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 30), st.integers(1, 6), st.integers(1, 3))
def test_every_copy_visits_its_expert_once(
    data: st.DataObject, num_tokens: int, num_experts: int, top_k: int
) -> None:
    ids = data.draw(
        st.lists(
            st.lists(st.integers(0, num_experts - 1), min_size=top_k, max_size=top_k),
            min_size=num_tokens,
            max_size=num_tokens,
        )
    )
    expert_ids = torch.tensor(ids)
    tokens = torch.arange(num_tokens, dtype=torch.float64)[:, None]
    found = permutation(expert_ids, num_experts)
    # Expert e turns token t into 1000 e + t.
    experts = [lambda x, e=e: x + 1000 * e for e in range(num_experts)]
    done = grouped_apply(tokens[found.token_of_copy], found.counts.tolist(), experts)
    weights = torch.rand(num_tokens, top_k, dtype=torch.float64)
    wanted = ((1000 * expert_ids + tokens) * weights).sum(1, keepdim=True)
    assert torch.allclose(combine(done, weights, found), wanted)


def test_a_lone_row_is_computed_beside_a_copy_of_itself() -> None:
    seen = []

    def expert(x: Tensor) -> Tensor:
        seen.append(len(x))
        return x + 1

    rows = torch.arange(4.0)[:, None]
    out = grouped_apply(rows, [1, 0, 3], [expert] * 3, min_rows=2)
    assert seen == [2, 3] and torch.equal(out, rows + 1)


def layer(normalise: bool, dtype: torch.dtype = torch.float32) -> tuple[MoeLayer, list[Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def weight(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.3).to(dtype)

    router = weight(EXPERTS, HIDDEN)
    stacks = [weight(EXPERTS, INNER, HIDDEN), weight(EXPERTS, INNER, HIDDEN)]
    stacks.append(weight(EXPERTS, HIDDEN, INNER))
    experts = [GatedMlp(gate, up, down) for gate, up, down in zip(*stacks, strict=True)]
    made = MoeLayer(TopKRouter(Linear(router), TOP_K, normalise), ExpertList(experts, min_rows=2))
    return made, [router, *stacks]


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 2, 37])
def test_the_layer_is_the_weighted_sum_of_the_most_probable_experts(
    normalise: bool, num_tokens: int
) -> None:
    moe, (router, gate, up, down) = layer(normalise)
    x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(2))
    found = moe.plus(x, x)
    for token, row in zip(x, found, strict=True):
        probs = (router @ token).softmax(-1)
        best = probs.argsort(descending=True)[:TOP_K]
        scale = probs[best].sum() if normalise else 1.0
        wanted = token + sum(
            probs[e] / scale * (down[e] @ (F.silu(gate[e] @ token) * (up[e] @ token))) for e in best
        )
        assert torch.allclose(row, wanted, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_gets_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    moe, _ = layer(True, dtype)
    x = torch.randn(48, HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype)
    together = moe(x)
    for start, stop in ((0, 2), (3, 9), (10, 41)):
        assert torch.equal(moe(x[start:stop]), together[start:stop])
