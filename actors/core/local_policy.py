"""The policy a rank runs by itself while it has no fresh budget from the allocator."""

from __future__ import annotations

from typing import Literal

from actors.core.draft_pause import DraftPause, NeverDraft
from actors.core.prefix_scheduler import (
    Algorithm1,
    Lagged,
    NoSpeculation,
    StaticLength,
    StaticThreshold,
)
from actors.core.sps import RankTimes
from actors.core.step_decision import VerifyChoice
from actors.core.verify_decision import DraftPolicy, StepFacts, VerifyPolicy

PolicyName = Literal["none", "static_length", "static_threshold", "algorithm1", "lagged", "joint"]


class LocalPolicy:
    """What a rank without a fresh budget decides by: the configured policy over its own curve and survivals.

    A `verify_decision.VerifyPolicy`. Under `joint` it is `lagged`: the rank plans for itself. The shell hands it the
    measured curve (`times.measured`) and every served step (`times.fold`); until then it is cold and verifies what is
    more likely accepted than not.

    Args:
        times: of the policy before this one; None: nothing is measured yet.

    Attributes:
        drafting: for the `VerifyDecider`; None for a policy that always drafts.
    """

    def __init__(
        self,
        name: PolicyName,
        static_length: int = 0,
        static_threshold: float = 0.0,
        min_predicted_gain: float = 0.0,
        times: RankTimes | None = None,
    ) -> None:
        self.name = name
        self.times = RankTimes() if times is None else times
        policies: dict[str, VerifyPolicy] = {
            "none": NoSpeculation(),
            "static_length": StaticLength(static_length),
            "static_threshold": StaticThreshold(static_threshold),
            "algorithm1": Algorithm1(self.times),
            "lagged": Lagged(self.times, min_predicted_gain),
        }
        alone = "lagged" if name == "joint" else name
        self._policy = policies[alone]
        drafting: dict[str, DraftPolicy] = {
            "none": NeverDraft(),
            "lagged": DraftPause(self.times, min_predicted_gain),
        }
        self.drafting = drafting.get(alone)

    def choose(self, facts: StepFacts) -> VerifyChoice:
        return self._policy.choose(facts)
