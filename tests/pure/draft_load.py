"""A load on a pause of drafting: fake curves, and blocks that come when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from actors.core.draft_pause import DraftPause
from actors.core.messages import RankProfile
from actors.core.sps import CostCurve, RankTimes
from actors.core.verify_decision import DraftFacts
from tests.pure.scripted_drafter import RANK

GAMMA = 3


def measured(draft_s: float = 0.02, token_s: float = 0.125) -> RankTimes:
    """A step costs a second up to 8 tokens and `token_s` for each one more; drafting costs `draft_s` a request."""
    sizes = np.array([1, 8, 64, 128], np.int32)
    profile = RankProfile(
        RANK, "", sizes, sizes, 1.0 + token_s * np.array([0, 0, 56, 120]), draft_s * sizes, GAMMA
    )
    times = RankTimes()
    times.measured(CostCurve.of(profile))
    return times


def blocks(count: int, confidence: float = 0.8) -> np.ndarray:
    return np.cumprod(np.full((count, GAMMA), confidence, np.float32), axis=1)


def facts(
    num_rounds: int, step: int = 0, askable: int | None = None, room: int = 999
) -> DraftFacts:
    return DraftFacts(step, num_rounds if askable is None else askable, num_rounds, 0, room)


@dataclass
class Run:
    """A pause under a load: every block that is asked for comes, one step later."""

    pause: DraftPause
    confidence: float = 0.8
    step: int = 0
    asked: list[int] = field(default_factory=list)  # rows a step
    events: list[str] = field(default_factory=list)
    waits: Callable[[int], float] | None = None  # seconds the rank stands still for so many blocks

    def go(self, steps: int, num_rounds: int) -> None:
        for _ in range(steps):
            choice = self.pause.choose(facts(num_rounds, self.step))
            self.asked.append(int(choice.asks.sum()))
            self.events.append(choice.event)
            if choice.asks.any():
                self.pause.note(self.step, blocks(self.asked[-1], self.confidence))
            if self.waits is not None:
                count = self.asked[-1]
                self.pause.times.fold(
                    num_rounds, num_rounds, 0, self._step_s(num_rounds), self.waits(count), count
                )
            self.step += 1

    def _step_s(self, num_rounds: int) -> float:
        assert self.pause.times.curve is not None
        return float(self.pause.times.curve.verify_time_s(num_rounds))

    def until(self, happened: Callable[[], bool], num_rounds: int, most: int = 500) -> int:
        """Steps until then."""
        for steps in range(most):
            if happened():
                return steps
            self.go(1, num_rounds)
        raise AssertionError("it never happens")
