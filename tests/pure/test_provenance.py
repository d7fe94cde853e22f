"""Where each token of a stream comes from."""

from __future__ import annotations

import pytest

from actors.core.messages import Endpoint, TokenDelta
from actors.core.sampling import SamplingParams
from cluster.streams import SpeculationCounts, StreamJournal, StreamOrder, origins_of

INGRESS = Endpoint("ingress-0", "ingress", "local://i", "", "e1")


@pytest.mark.parametrize(
    ("tokens", "rounds", "scheduled", "accepted", "origins"),
    [
        (1, 0, 0, 0, ["target"]),  # the first token of a prompt
        (1, 1, 0, 0, ["target"]),  # a round without a draft
        (3, 1, 2, 2, ["accepted", "accepted", "bonus"]),
        (2, 1, 3, 1, ["accepted", "recovered"]),
        (1, 1, 3, 0, ["recovered"]),
        (2, 1, 3, 2, ["accepted", "accepted"]),  # a stop token was among the accepted ones
    ],
)
def test_a_token_is_accepted_recovered_bonus_or_the_targets_own(
    tokens: int, rounds: int, scheduled: int, accepted: int, origins: list[str]
) -> None:
    before = SpeculationCounts(5, 25, 10, 4)
    delta = TokenDelta(
        "r",
        0,
        7,
        tuple(range(tokens)),
        None,
        num_rounds=5 + rounds,
        num_proposed=25 + 5 * rounds,
        num_scheduled=10 + scheduled,
        num_accepted=4 + accepted,
    )
    assert origins_of(before, delta) == origins


def test_the_journal_keeps_one_origin_a_token_through_overlaps_and_replays() -> None:
    order = StreamOrder("r", (1,), 20, SamplingParams(temperature=0.0), provenance=True)
    journal = StreamJournal(order)

    def delta(first: int, tokens: int, rounds: int, scheduled: int, accepted: int) -> TokenDelta:
        ids = tuple(range(first, first + tokens))
        counts = {"num_rounds": rounds, "num_proposed": 5 * rounds}
        return TokenDelta(
            "r",
            journal.generation,
            first,
            ids,
            None,
            **counts,
            num_scheduled=scheduled,
            num_accepted=accepted,
        )

    journal.place(INGRESS)
    journal.apply(delta(0, 1, 0, 0, 0))
    second = delta(1, 3, 1, 2, 2)
    journal.apply(second)
    journal.apply(second)  # came twice
    journal.place(INGRESS)  # its rank has died; the counts of the next one begin at zero
    journal.apply(delta(4, 2, 1, 3, 1))
    assert journal.origins == ["target", "accepted", "accepted", "bonus", "accepted", "recovered"]
    journal.close("stop", 3)
    assert len(journal.origins) == len(journal.token_ids) == 3


def test_a_journal_keeps_no_origins_unless_asked() -> None:
    journal = StreamJournal(StreamOrder("r", (1,), 20, SamplingParams(temperature=0.0)))
    journal.place(INGRESS)
    journal.apply(TokenDelta("r", 0, 0, (1, 2)))
    assert journal.origins == [] and journal.token_ids == [1, 2]
