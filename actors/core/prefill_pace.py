"""How many prompt tokens ride in a step with rounds, so that running streams never stutter.

A step with prefill may take at most `stretch` times as long as its rounds alone, without drafts: the gap between two
tokens of a stream stays within that factor of its usual step, however many and however long the prompts that wait. At
least one prompt token runs in every step, so that prompts always advance.

Times are those of the rank's cost curve, corrected by what steps with prefill have really taken: prompt tokens cost
otherwise than rounds of the same size.
"""

from __future__ import annotations

import numpy as np

from actors.core.sps import RankTimes, ServedTimes


class PrefillPace:
    """The bound of one rank; without a curve there is none but the size of a step."""

    def __init__(self, stretch: float, times: RankTimes | None) -> None:
        assert stretch > 1, f"stretch={stretch}"
        self._stretch = stretch
        self._times = times
        self._mixed = ServedTimes()

    def most_tokens(self, num_rounds: int, num_drafts: int, wanted: int) -> int:
        """Of `wanted` prompt tokens, those that may ride beside `num_rounds` rounds with `num_drafts` draft tokens.

        Call it with what prompts can use and the step has room for: every size up to it is looked at.
        """
        if not num_rounds or wanted <= 1 or self._times is None or self._times.curve is None:
            return wanted
        sizes = num_rounds + num_drafts + np.arange(1, wanted + 1)
        step_s = self._times.round_time_s_at(sizes, 0) * self._mixed.ratio(sizes)
        limit_s = self._stretch * float(self._times.round_time_s_at(num_rounds, 0))
        too_long = np.flatnonzero(step_s > limit_s)
        return max(1, int(too_long[0])) if len(too_long) else wanted

    def fold(self, batch_tokens: int, num_prefill: int, served_s: float) -> None:
        """Learn from a served step of rounds and `num_prefill` prompt tokens."""
        if 0 < num_prefill < batch_tokens and self._times is not None and self._times.curve:
            foretold_s = float(self._times.round_time_s_at(batch_tokens, 0))
            self._mixed.fold(batch_tokens, foretold_s, served_s)
