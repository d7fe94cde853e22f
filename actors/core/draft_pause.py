"""Whether to ask for blocks at all: drafting costs time that a large batch may never earn back.

A rank with hundreds of streams verifies next to nothing, because every token of its step is dear; it would still stand
still for the blocks of every round. So the best throughput with drafting is compared with plain decoding. While plain
decoding wins, no blocks are asked for. Survivals are then unknown, so a few rows are probed now and again: a pause
never outlives its reason by more than a bounded number of steps. A probe costs what a round of drafting costs, so while
the load stays as it is and the gain does not go on rising, each one doubles the time to the next, up to a bound.

Contract C3: asking for the blocks of a step uses survivals at least two steps older, never the blocks themselves.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from actors.core.prefix_scheduler import LAG_STEPS, MIN_SURVIVAL
from actors.core.sps import RankTimes
from actors.core.verify_decision import DraftChoice, DraftFacts

Float32 = npt.NDArray[np.float32]

MARGIN = 0.03  # relative gain or loss below which nothing is changed, in either direction
KEPT_ROWS = 64  # survivals a judgement rests on: one request drafts well and badly in turns
MIN_ROWS = 8  # below that nothing is judged; also the rows of one probe
CHECK_EVERY = 4  # steps between judgements while drafting and the load stays as it is
PROBE_EVERY = 32  # steps without blocks after which some are asked for again, at first
LONGEST_PAUSE = 256  # and at the latest
RISE = 0.02  # relative rise of the gain from probe to probe; twice in a row it is no chance: a drafter recovers
MIN_PAUSE = 8  # steps after which a load that has changed by a quarter is reason enough


def drafting_gain(
    survivals: Float32, facts: DraftFacts, times: RankTimes, min_predicted_gain: float = 0.0
) -> float:
    """Best tokens a second with drafting over those of plain decoding; above one, drafting pays.

    Args:
        survivals: [N, gamma] of any N blocks; the step is taken to be full of their like.
        min_predicted_gain: the policy verifies nothing below that gain, and then drafting only costs.
    """
    weight = facts.num_askable / len(survivals)
    ranked = np.sort(survivals[survivals >= MIN_SURVIVAL].astype(np.float64))[::-1]
    counts = weight * np.arange(len(ranked) + 1)
    fits = counts <= facts.room
    tokens = facts.num_rounds + weight * np.concatenate([[0.0], np.cumsum(ranked)])
    batch_tokens = facts.num_rounds + facts.num_other_tokens
    seconds = times.round_time_s_at(batch_tokens + counts, facts.num_askable)
    rates = (tokens / seconds)[fits]
    best = float(rates.max())
    if best < (1.0 + min_predicted_gain) * rates[0]:
        best = float(rates[0])
    return best * float(times.round_time_s_at(batch_tokens, 0)) / facts.num_rounds


@dataclass
class NeverDraft:
    """For a policy that verifies nothing."""

    rule: str = "none"

    def note(self, step: int, survivals: Float32) -> None:
        """Survivals change nothing."""

    def restart(self) -> None:
        """Nor does another drafter."""

    def choose(self, facts: DraftFacts) -> DraftChoice:
        return DraftChoice(np.zeros(facts.num_askable, np.bool_))


@dataclass
class DraftPause:
    """Drafts while it pays: a state machine with the states drafting, paused, and paused with a probe under way."""

    times: RankTimes
    min_predicted_gain: float = 0.0
    rule: str = "drafting_paused"
    is_paused: bool = False
    _seen: deque[tuple[int, Float32]] = field(default_factory=deque)  # step, rows with a block
    _next_check: int = 0
    _at_rounds: int = 0  # rounds the last judgement was given for
    # --- while paused ---
    _patience: int = PROBE_EVERY  # steps from the last verdict to the next probe
    _paused_at: int = 0  # the step of the last verdict
    _last_gain: float = 0.0  # that it rests on
    _num_rises: int = 0  # of verdicts in a row
    _left: int = 0  # rows the probe under way still asks for
    _verdict_at: int | None = None  # when its survivals are old enough; None: no probe
    _turn: int = 0  # whose turn it is to be probed

    def note(self, step: int, survivals: Float32) -> None:
        """Survivals [N, gamma] of the rows of `step` that had a block."""
        stride = -(-len(survivals) // KEPT_ROWS)
        self._seen.append((step, survivals[::stride]))
        # The last steps are too fresh to count.
        old = sum(len(rows) for _, rows in self._seen) - sum(
            len(self._seen[-age][1]) for age in range(1, min(LAG_STEPS, len(self._seen)) + 1)
        )
        while old - len(self._seen[0][1]) >= KEPT_ROWS:
            old -= len(self._seen.popleft()[1])

    def restart(self) -> None:
        """Another drafter is there: what is known of the old one says nothing."""
        self.is_paused = False
        self._verdict_at = None
        self._seen.clear()

    def choose(self, facts: DraftFacts) -> DraftChoice:
        """Whose blocks to ask for, for step `facts.step`."""
        everyone = DraftChoice(np.ones(facts.num_askable, np.bool_))
        if self.times.doubt:
            self.is_paused = False
            return everyone
        if self.is_paused:
            return self._while_paused(facts)
        if facts.step < self._next_check and not self._has_moved(facts):
            return everyone
        self._next_check, self._at_rounds = facts.step + CHECK_EVERY, facts.num_rounds
        gain = self._gain(facts, MIN_ROWS)
        if gain is None or gain >= 1.0 - MARGIN:
            return everyone
        self._patience, self._last_gain, self._num_rises = PROBE_EVERY, gain, 0
        self._pause(facts)
        return self._nobody(facts, "pause")

    def _pause(self, facts: DraftFacts) -> None:
        self.is_paused, self._verdict_at = True, None
        self._paused_at, self._at_rounds = facts.step, facts.num_rounds

    def _while_paused(self, facts: DraftFacts) -> DraftChoice:
        event = ""
        if self._verdict_at is None:
            age, has_moved = facts.step - self._paused_at, self._has_moved(facts)
            if age < self._patience and not (has_moved and age >= MIN_PAUSE):
                return self._nobody(facts)
            self._patience = PROBE_EVERY if has_moved else min(2 * self._patience, LONGEST_PAUSE)
            event, self._left = "probe", MIN_ROWS
            self._seen.clear()
        if self._left:
            self._verdict_at = facts.step + LAG_STEPS
            return DraftChoice(self._some(facts), event)
        assert self._verdict_at is not None
        if facts.step < self._verdict_at:
            return self._nobody(facts)
        # Rows may have ended or come late. Without any there is no verdict, and the next probe comes in its time.
        gain = self._gain(facts, 1)
        if gain is None or gain <= 1.0 + MARGIN:
            if gain is not None:
                self._look_for_rise(gain)
            self._pause(facts)
            return self._nobody(facts)
        self.is_paused, self._verdict_at = False, None
        self._next_check = facts.step + CHECK_EVERY
        return DraftChoice(np.ones(facts.num_askable, np.bool_), "resume")

    def _look_for_rise(self, gain: float) -> None:
        rose = gain > (1.0 + RISE) * self._last_gain
        self._num_rises = self._num_rises + 1 if rose else 0
        if self._num_rises > 1:
            self._patience = PROBE_EVERY
        self._last_gain = gain

    def _has_moved(self, facts: DraftFacts) -> bool:
        """Whether the load has changed by a quarter since the last judgement."""
        return 4 * abs(facts.num_rounds - self._at_rounds) >= self._at_rounds

    def _some(self, facts: DraftFacts) -> npt.NDArray[np.bool_]:
        """The rows of a probe: few are cheaper to draft for, and all take their turns."""
        count = min(self._left, facts.num_askable)
        asks = np.zeros(facts.num_askable, np.bool_)
        asks[(self._turn + np.arange(count)) % facts.num_askable] = True
        self._turn += count
        self._left -= count
        return asks

    @staticmethod
    def _nobody(facts: DraftFacts, event: str = "") -> DraftChoice:
        return DraftChoice(np.zeros(facts.num_askable, np.bool_), event)

    def _gain(self, facts: DraftFacts, min_rows: int) -> float | None:
        """From what was current at least two steps before the step asked about (C3)."""
        rows = [rows for step, rows in self._seen if step <= facts.step - LAG_STEPS]
        if sum(map(len, rows)) < min_rows:
            return None
        return drafting_gain(np.concatenate(rows), facts, self.times, self.min_predicted_gain)
