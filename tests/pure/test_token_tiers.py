"""The size a step is padded to follows from rows and lagged budget, never from current drafts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.core.step_decision import StepDecision, VerifyChoice
from actors.core.token_tiers import context_tier, tier_for, token_tiers


def test_tiers_are_powers_of_two_and_their_middles() -> None:
    assert token_tiers(40) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40)
    assert token_tiers(1) == (1,)


@given(st.integers(0, 200_000))
def test_a_context_tier_holds_the_context_and_is_one_of_few(num_tokens: int) -> None:
    tier = context_tier(num_tokens)
    assert tier >= max(num_tokens, 512) and tier & (tier - 1) == 0
    assert tier == 512 or tier < 2 * num_tokens


def test_a_step_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens=0"):
        token_tiers(0)


@given(st.integers(1, 600), st.integers(1, 512))
def test_a_tier_is_the_smallest_that_fits_and_pads_at_most_half(bound: int, most: int) -> None:
    tiers = token_tiers(most)
    tier = tier_for(bound, tiers)
    if bound > most:
        assert tier is None
    else:
        assert tier is not None
        assert tier >= bound and not [t for t in tiers if bound <= t < tier]
        assert tier <= bound * 1.5 or tier == most


@given(st.integers(1, 64), st.integers(0, 64), st.integers(0, 64))
def test_a_tier_never_shrinks_as_the_budget_grows(rows: int, budget: int, more: int) -> None:
    tiers = token_tiers(256)
    small, large = tier_for(rows + budget, tiers), tier_for(rows + budget + more, tiers)
    assert small is not None and large is not None and small <= large


@given(
    st.lists(st.lists(st.floats(0, 1, width=32), min_size=3, max_size=3), min_size=1, max_size=4),
    st.integers(0, 20),
    st.integers(0, 20),
)
def test_the_bound_of_a_step_is_the_same_whatever_the_drafts(
    survivals: list[list[float]], budget: int, room: int
) -> None:
    rows = len(survivals)

    def bound(verify_len: int, current: npt.NDArray[np.float32]) -> int:
        lengths, caps = np.full(rows, verify_len, np.int32), np.full(rows, 3, np.int32)
        choice = VerifyChoice(budget, 0.1, "price")
        has_draft = np.ones(rows, np.bool_)
        ids = tuple(map(str, range(rows)))
        return StepDecision(
            1, ids, current, caps, has_draft, lengths, choice, room
        ).most_draft_tokens

    now = np.array(survivals, np.float32)
    assert bound(0, now) == bound(3, 1 - now) == min(budget, room, 3 * rows)
