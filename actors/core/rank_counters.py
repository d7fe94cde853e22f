"""What a rank has done since it started. Every number only ever grows."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.core.acceptance import AcceptanceCounters
from actors.core.step_commit import Commit, StepInFlight
from actors.core.verify_decision import DraftChoice


@dataclass
class RankCounters:
    """Totals of one rank.

    `acceptance` counts rounds and what the acceptance rule accepted in them; a stop token inside an accepted run then
    shortens the stream, so its streams may hold fewer drafted tokens. Rows aborted during their step count nowhere.
    """

    gamma: int
    acceptance: AcceptanceCounters = field(init=False)
    num_steps: int = 0
    num_committed: int = 0  # tokens that entered a stream, the first one of each prompt too
    num_prefill_tokens: int = 0
    num_late: int = 0  # rounds without a draft although one was asked for
    num_unasked: int = 0  # rounds for which none was asked, because drafting did not pay
    num_undrafted: int = 0  # slots of blocks that were not worth drafting
    num_draft_pauses: int = 0
    num_draft_probes: int = 0  # tries, during a pause, whether it would pay again
    num_finished: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    num_replaced: int = 0  # older generations ended by a newer one
    num_ignored: int = 0  # repeated or late messages about requests
    num_preempted: int = 0

    def __post_init__(self) -> None:
        self.acceptance = AcceptanceCounters.zero(self.gamma)

    def forget(self) -> None:
        """Count from 0 again: what came before the rank was ready was nobody's request."""
        for name, zero in vars(RankCounters(self.gamma)).items():
            setattr(self, name, zero)

    def count_drafting(self, choice: DraftChoice) -> None:
        self.num_draft_pauses += choice.event == "pause"
        self.num_draft_probes += choice.event == "probe"

    def count(self, flight: StepInFlight, commit: Commit) -> None:
        self.num_steps += 1
        self.num_committed += commit.num_committed
        self.num_prefill_tokens += flight.num_prefill_tokens
        self.num_finished += len(commit.ended) - commit.num_failed
        self.num_failed += commit.num_failed
        self.num_undrafted += commit.num_undrafted
        self.acceptance.add(commit.acceptance)
