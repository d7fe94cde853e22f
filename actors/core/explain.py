"""Why each round of a request was verified as far as it was: kept for those who asked, a while longer than the request
lives (contract C11).

A log costs a row of floats and a few numbers a round. It never holds on to the arrays of a step.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.core.messages import AdmittedRequest
from actors.core.step_decision import CutRule, StepDecision

ASKED_ROUNDS = 256  # kept for a request that asks by itself, whatever the configuration keeps
KEPT_ENDED_ROUNDS = 65_536  # of all requests that are over, together
KEPT_ENDED_LOGS = 1024


@dataclass(frozen=True, slots=True)
class Round:
    """One round: what was believed, what was allowed, what came of it.

    `first_index` is the place of its first committed token in the output, earlier ranks counted. Where `cut_by` says
    that there was no block, `survivals` are zeros.
    """

    step: int
    first_index: int
    survivals: npt.NDArray[np.float32]  # [gamma]
    min_survival: float  # lambda
    max_draft_tokens: int  # K, of the whole step
    rule: str  # who decided both
    num_requests: int  # rounds that shared the step
    num_proposed: int
    num_scheduled: int
    num_accepted: int  # by the acceptance rule
    num_committed: int  # tokens that entered the stream; a stop condition may cut the accepted ones
    cut_by: CutRule
    explored: bool  # verified beyond the budget, to see what becomes of such slots

    def as_json(self) -> dict[str, Any]:
        """Plain numbers, the survivals rounded to four digits."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {**values, "survivals": [round(float(a), 4) for a in self.survivals]}


class RequestLog:
    """The newest rounds of one generation of a request on this rank.

    Attributes:
        first_index: output tokens that earlier ranks had committed.
        num_rounds: all of them, those no longer kept too.
    """

    def __init__(self, admitted: AdmittedRequest, max_rounds: int) -> None:
        self.request_id = admitted.request_id
        self.generation = admitted.generation
        self.first_index = admitted.num_prior_tokens
        self.num_rounds = 0
        self.has_ended = False
        self.rounds: deque[Round] = deque(maxlen=max_rounds)
        self._max_new_tokens = admitted.max_new_tokens
        self._speculates = admitted.sampling.speculation

    def add(
        self,
        decision: StepDecision,
        row: int,
        num_accepted: int,
        first_index: int,
        num_committed: int,
    ) -> None:
        """Note what a step decided for one of its rows, and what it committed there."""
        choice = decision.choice
        self.num_rounds += 1
        self.rounds.append(
            Round(
                step=decision.step,
                first_index=first_index,
                survivals=decision.survivals[row].copy(),
                min_survival=choice.min_survival,
                max_draft_tokens=choice.max_draft_tokens,
                rule=choice.rule,
                num_requests=len(decision.request_ids),
                num_proposed=int(decision.proposed_len[row]),
                num_scheduled=int(decision.verify_len[row]),
                num_accepted=num_accepted,
                num_committed=num_committed,
                cut_by=self._cut_by(decision, row, first_index),
                explored=decision.is_explored(row),
            )
        )

    def _cut_by(self, decision: StepDecision, row: int, first_index: int) -> CutRule:
        """A row without a block may have been better off without one, for a reason only the request knows."""
        if not decision.has_draft[row]:
            if not self._speculates or decision.choice.rule == "none":
                return "off"
            if self._max_new_tokens - first_index <= 1:
                return "length"
        return decision.cut_by(row)

    def as_json(self) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "generation": self.generation,
            "first_index": self.first_index,
            "num_rounds": self.num_rounds,
            "has_ended": self.has_ended,
            "rounds": [each.as_json() for each in self.rounds],
        }


class LogShelf:
    """Hands out the logs of a rank and finds them again.

    Args:
        rounds_per_request: kept for every request; 0: only for those that ask.
    """

    def __init__(self, rounds_per_request: int = 0) -> None:
        self._rounds_per_request = rounds_per_request
        self._live: dict[str, RequestLog] = {}
        self._ended: OrderedDict[tuple[str, int], RequestLog] = OrderedDict()
        self._num_ended_rounds = 0

    def open(self, admitted: AdmittedRequest) -> RequestLog | None:
        """The log of a request that begins here; None when nobody wants one."""
        max_rounds = self._rounds_per_request
        if admitted.explain:
            max_rounds = max(max_rounds, ASKED_ROUNDS)
        if not max_rounds:
            return None
        log = RequestLog(admitted, max_rounds)
        self._live[admitted.request_id] = log
        return log

    def end(self, log: RequestLog) -> None:
        """Its request is over: the log stays until newer ones need the room."""
        log.has_ended = True
        del self._live[log.request_id]  # a later generation opens its own after this one has ended
        self._ended[log.request_id, log.generation] = log
        self._num_ended_rounds += len(log.rounds)
        while len(self._ended) > KEPT_ENDED_LOGS or self._num_ended_rounds > KEPT_ENDED_ROUNDS:
            _, oldest = self._ended.popitem(last=False)
            self._num_ended_rounds -= len(oldest.rounds)

    def find(self, response_id: str) -> list[RequestLog]:
        """Logs of a response: of its only prompt, or of all of them; oldest generation first."""
        logs = [*self._ended.values(), *self._live.values()]
        return [log for log in logs if is_part_of(log.request_id, response_id)]


def is_part_of(request_id: str, response_id: str) -> bool:
    """Whether a request is the response's own, or (`id-0`, `id-1`, ...) one of its several prompts."""
    if request_id == response_id:
        return True
    own, _, index = request_id.rpartition("-")
    return own == response_id and index.isdecimal() and len(index) <= 3


def explanation(
    logs: Iterable[RequestLog], known_ids: Iterable[str], response_id: str
) -> dict[str, Any]:
    """What one rank can say of a response; JSON-able.

    Args:
        logs: of that response.
        known_ids: requests that run here or ran here lately, logged or not.
    """
    found = [log.as_json() for log in logs]
    is_known = bool(found) or any(is_part_of(each, response_id) for each in known_ids)
    return {"is_known": is_known, "logs": found}
