"""Counters: proposed = trimmed + rejected + accepted, at every position."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.core.acceptance import AcceptanceCounters

GAMMA = 5
ROUNDS = st.lists(
    st.tuples(st.sampled_from([0, GAMMA]), st.integers(0, GAMMA), st.integers(0, GAMMA)),
    max_size=20,
)


def step(rounds: list[tuple[int, int, int]]) -> AcceptanceCounters:
    lens = np.array(rounds, np.int32).reshape(-1, 3)
    proposal, verify, accepted = lens.T
    verify = np.minimum(verify, proposal)
    return of_step(GAMMA, proposal, verify, np.minimum(accepted, verify))


def of_step(gamma: int, proposal: Any, verify: Any, accepted: Any, **more: Any) -> Any:
    """Every slot forecast to survive with a half."""
    survivals = np.full((len(proposal), gamma), 0.5, np.float32)
    lengths = (np.array(each, np.int32) for each in (proposal, verify, accepted))
    return AcceptanceCounters.of_step(survivals, *lengths, **more)


@given(ROUNDS, ROUNDS)
def test_every_proposed_token_was_trimmed_rejected_or_accepted(first, second) -> None:  # type: ignore[no-untyped-def]
    total = step(first)
    total.add(step(second))
    assert (total.trimmed >= 0).all() and (total.rejected >= 0).all()
    assert (total.proposed == total.trimmed + total.rejected + total.accepted).all()
    assert total.num_rounds == len(first) + len(second)
    assert total.num_committed == total.num_rounds + total.accepted.sum()


def test_a_trimmed_token_is_not_counted_as_rejected() -> None:
    total = of_step(3, [3], [1], [1])
    assert total.trimmed.tolist() == [0, 1, 1]
    assert total.rejected.tolist() == [0, 0, 0]


def test_acceptance_length_counts_the_targets_own_token_and_stops_inside_a_run() -> None:
    total = of_step(3, [3, 3], [3, 3], [3, 0])
    assert total.acceptance_length == pytest.approx(2.5)
    cut = of_step(3, [3], [3], [3], num_committed=2)
    assert cut.acceptance_length == 2.0


def test_acceptance_length_of_nothing_is_no_number() -> None:
    assert math.isnan(AcceptanceCounters.zero(3).acceptance_length)


@pytest.mark.parametrize(("proposal", "verify", "accepted"), [(3, 2, 3), (2, 3, 1)])
def test_lengths_out_of_order_are_refused(proposal: int, verify: int, accepted: int) -> None:
    with pytest.raises(AssertionError, match="accepted <= scheduled <= proposed"):
        of_step(5, [proposal], [verify], [accepted])
