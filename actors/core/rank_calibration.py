"""What a rank makes of its drafter's confidences: one online calibration for each acceptance rule, and who is explored.

The rules accept the same block with different probabilities (greedy: the drafter's token is the target's favourite;
rejection: the two laws overlap; coupled: both take the same token under shared noise), so each learns from its own
rounds. Rows whose logits are changed by rules of their request are drafted without them: they teach nothing about the
others, and are not explored.

Contract C3: what is believed of a round follows from rounds that are over. Whether it is explored follows from the id
of its request and the length committed so far, never from the draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.core.draft_stop import LEAST_DRAFTED
from actors.core.evidence import to_logits, to_probability
from actors.core.online_calibration import Keys, OnlineCalibration, Rounds
from actors.core.row_table import RowTable, Slots
from actors.core.sampling import PURPOSE_EXPLORE, RULE_COUPLED, RULE_GREEDY, RULE_REJECTION, uniform
from configs.calibration import CalibrationConfig

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Ints = npt.NDArray[np.integer]
Mask = npt.NDArray[np.bool_]

RULE_NAMES = {RULE_GREEDY: "greedy", RULE_REJECTION: "rejection", RULE_COUPLED: "coupled"}
TRIMMING = frozenset({"static_threshold", "algorithm1", "lagged", "joint"})  # policies
OFF = CalibrationConfig(online=False)


@dataclass(frozen=True)
class Drafted:
    """What the blocks of the R rounds of a step were believed to be worth by their drafter, and whose they are."""

    confidences: Float32  # [R, gamma] whatever the slot holds where there is no block
    rules: npt.NDArray[np.int8]  # [R] acceptance rule
    streams: Keys  # [R] a key of each request
    teaches: Mask  # [R] it has a block, judged by the laws it was drafted for


class RankCalibration:
    """Calibrations of one rank, by acceptance rule.

    Args:
        policy: its name; only one that trims by survival leaves anything to explore.
        stops: whether drafters may stop within a block.

    Attributes:
        by_rule: by acceptance rule.
        num_explored: rounds verified further than their budget asked.
        num_explored_tokens: draft tokens verified beyond it.
    """

    def __init__(
        self,
        gamma: int,
        config: CalibrationConfig = OFF,
        policy: str = "none",
        *,
        stops: bool = False,
    ) -> None:
        looks, learns = config.looks_per_alarm, config.online
        known = LEAST_DRAFTED if stops else None
        self.by_rule = {
            rule: OnlineCalibration(gamma, 1.0, looks, learns, known) for rule in RULE_NAMES
        }
        self.num_explored = self.num_explored_tokens = 0
        self._config = config
        self.follow(policy)
        self._shifts = np.zeros((len(RULE_NAMES), gamma))

    def follow(self, policy: str) -> None:
        """Explore as the policy of this name leaves room for."""
        explores = self._config.online and policy in TRIMMING
        self._share = self._config.explore_share if explores else 0.0
        for each in self.by_rule.values():
            each.expect(self._share)

    @property
    def num_alarms(self) -> int:
        return sum(each.num_alarms for each in self.by_rule.values())

    def restart(self) -> None:
        """Another drafter is there: what is known of the old one says nothing."""
        for each in self.by_rule.values():
            each.restart()
        self._shifts[:] = 0.0

    def adjust(self, drafted: Drafted) -> Float32:
        """Conditional confidences [R, gamma] as they are believed now."""
        if not self._config.online:  # nothing is ever learned
            return drafted.confidences
        shifts = self._shifts[drafted.rules]
        for rule, calibration in self.by_rule.items():
            mine = drafted.rules == rule
            if mine.any():
                shifts[mine] += calibration.beyond(drafted.streams[mine])[:, None]
        if not shifts.any():
            return drafted.confidences
        return to_probability(to_logits(drafted.confidences) + shifts).astype(np.float32)

    def foretell(self, table: RowTable, slots: Slots) -> Mask:
        """Which slots [n] `explore` will choose for their next round if there is room, known before it has a block."""
        drawn = self._drawn(table.stream_key[slots], table.committed_len[slots])
        return drawn & ~table.has_rules[slots]

    def explore(self, drafted: Drafted, committed_len: Int32, caps: Int32, room: int) -> Mask:
        """Rounds [R] to be verified whole, as many as there is room for.

        Args:
            committed_len: [R] when the round begins; tells the rounds of a request apart.
            caps: [R] draft tokens a row can use.
        """
        chosen = self._drawn(drafted.streams, committed_len) & drafted.teaches
        fits: Mask = chosen & (np.cumsum(np.where(chosen, caps, 0)) <= room)
        return fits

    def _drawn(self, streams: Keys, committed_len: Int32) -> Mask:
        if not self._share:
            return np.zeros(len(streams), np.bool_)
        drawn: Mask = uniform(streams, committed_len, PURPOSE_EXPLORE) < self._share
        return drawn

    def learn(
        self,
        drafted: Drafted,
        planned_len: Int32,
        verify_len: Int32,
        num_accepted: Int32,
        num_new: Int32,
    ) -> list[str]:
        """Take in finished rounds; what is worth a line in a log.

        Args:
            num_new: [R] tokens that entered the stream. 0: the round was aborted. Behind a stop token inside an
                accepted run nothing is known: no drafter is asked to go on there.
        """
        extra = verify_len - planned_len
        self.num_explored += int((extra > 0).sum())
        self.num_explored_tokens += int(extra.sum())
        is_cut = num_new <= num_accepted
        verify_len = np.where(is_cut, num_new, verify_len)
        num_accepted = np.minimum(num_accepted, verify_len)
        rounds = Rounds(drafted.confidences, verify_len, num_accepted, planned_len, drafted.streams)
        notes = []
        for rule, calibration in self.by_rule.items():
            mine = drafted.teaches & (num_new > 0) & (drafted.rules == rule)
            if not mine.any():
                continue
            if calibration.observe(rounds.rows(mine)):
                shifts = ", ".join(f"{shift:+.2f}" for shift in calibration.shifts)
                notes.append(
                    f"{RULE_NAMES[rule]} rounds have drifted from older ones, in confidences or in what is accepted "
                    f"(alarm {calibration.num_alarms}): these are forgotten, logits shifted by {shifts}"
                )
            self._shifts[rule] = calibration.shifts
        return notes

    def view(self) -> dict[str, Any]:
        """Plain numbers for people and dashboards. `ece`: by position, None where nothing was verified."""
        return {
            "num_explored": self.num_explored,
            "num_explored_tokens": self.num_explored_tokens,
            "num_alarms": self.num_alarms,
            "by_rule": {
                RULE_NAMES[rule]: {
                    "num_rounds": each.num_rounds,
                    "num_alarms": each.num_alarms,
                    "shifts": each.shifts.tolist(),
                    "ece": [None if np.isnan(e) else float(e) for e in each.reliability.ece],
                }
                for rule, each in self.by_rule.items()
                if each.num_rounds
            },
        }
