"""The size a step is padded to follows from rows and lagged budget, never from current drafts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.core.token_tiers import tier_for, token_tiers


def test_tiers_are_powers_of_two_and_their_middles() -> None:
    assert token_tiers(40) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40)
    assert token_tiers(1) == (1,)


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
