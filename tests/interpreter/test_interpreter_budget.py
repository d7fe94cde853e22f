"""The kernels for survivals and verify lengths equal their twin, bit for bit, ties included."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import survival
from kernels.device import budget

CONFIDENCES = st.sampled_from([0.0, -0.5, 0.5, 0.8, 0.3, 1.0, 2.0, float("nan")])


@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 6),
    st.integers(0, 4),
    st.integers(-1, 14),
    st.sampled_from([0.0, 0.25, 0.5]),
    st.data(),
)
def test_kernel_equals_twin(
    rows: int, gamma: int, max_draft_tokens: int, price: float, data: st.DataObject
) -> None:
    def drawn(values: st.SearchStrategy[object], count: int) -> list[object]:
        return data.draw(st.lists(values, min_size=count, max_size=count))

    confidences = torch.tensor(drawn(CONFIDENCES, rows * gamma), dtype=torch.float32)
    confidences = confidences.reshape(rows, gamma)
    has_proposal = torch.tensor(drawn(st.booleans(), rows), dtype=torch.bool)
    caps = torch.tensor(drawn(st.integers(0, gamma), rows), dtype=torch.long)
    found = budget.survivals(confidences, has_proposal)
    wanted = survival.survivals(confidences, has_proposal)
    assert torch.equal(found, wanted)
    lengths = budget.allocate(found, max_draft_tokens, price, caps)
    assert torch.equal(lengths, survival.allocate(wanted, max_draft_tokens, price, caps))


def test_kernel_takes_its_budget_from_the_device() -> None:
    """So that a captured graph can be replayed under another (lambda, K)."""
    a = torch.tensor([[0.9, 0.5], [0.8, 0.7]])
    caps = torch.tensor([2, 2])
    limit, price = torch.tensor([3]), torch.tensor([0.6])
    assert budget.allocate(a, limit, price, caps).tolist() == [1, 2]
    limit[0] = 1
    assert budget.allocate(a, limit, price, caps).tolist() == [1, 0]


def test_kernel_gives_ties_to_the_earlier_slot_then_to_the_earlier_row() -> None:
    a = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.5, 0.25]])
    caps = torch.tensor([2, 2, 2])
    found = [budget.allocate(a, k, 0.1, caps).tolist() for k in range(7)]
    assert found == [
        [0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2],
    ]  # fmt: skip
    assert found == [survival.allocate(a, k, 0.1, caps).tolist() for k in range(7)]
