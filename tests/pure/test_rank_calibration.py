"""A real rank keeps its confidences true: by acceptance rule, through budgets that trim, across a change of traffic."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from actors.core.calibration import ece
from actors.core.local_policy import LocalPolicy
from actors.core.logit_rules import LogitRules
from actors.core.messages import AbortRequest, CommitBatch, ProposalBatch, StepReport
from actors.core.online_calibration import to_probability
from actors.core.rank_calibration import RULE_NAMES, Drafted, RankCalibration
from actors.core.sampling import RULE_COUPLED, RULE_GREEDY
from actors.core.service_class import ClassAllocation, ServiceClass
from configs.calibration import CalibrationConfig
from tests.pure.rank_harness import Session, admitted, make_rank
from tests.pure.scripted_drafter import (
    ALLOCATOR,
    DRAFTER,
    RANK,
    VOCAB,
    Context,
    ScriptedDrafter,
    endpoint,
    true_token,
)

GAMMA = 5
OFTEN = CalibrationConfig(explore_share=0.25)


class TruthfulDrafter(ScriptedDrafter):
    """Knows how likely each of its tokens is right, and says `bias` logits more."""

    def __init__(self, bias: float, seed: int = 0) -> None:
        super().__init__(DRAFTER, GAMMA, 0.0, random.Random(seed))
        self.bias, self.draws = bias, np.random.default_rng(seed)
        self._said: list[np.ndarray] = []

    def blocks(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Confidences [count, GAMMA], and whether each token is right."""
        truth = self.draws.normal(0.3, 1.2, (count, GAMMA))
        right = self.draws.random((count, GAMMA)) < to_probability(truth)
        return to_probability(truth + self.bias).astype(np.float32), right

    def advance(self, batch: CommitBatch) -> ProposalBatch | None:
        self._said = []
        proposal = super().advance(batch)
        return proposal and replace(proposal, confidences=np.concatenate(self._said))

    def _block(self, context: Context, anchor: int) -> list[int]:
        confidences, right = self.blocks(1)
        self._said.append(confidences)
        prefix, block = [*context.tokens, anchor], []
        for is_right in right[0]:
            block.append((true_token(prefix) + (0 if is_right else 1)) % VOCAB)
            prefix.append(block[-1])
        return block


def session(
    bias: float,
    config: CalibrationConfig | None = None,
    policy: str = "static_threshold",
    **limits: object,
) -> Session:
    config = config or CalibrationConfig()
    local = LocalPolicy(policy, static_length=1, static_threshold=0.1)  # type: ignore[arg-type]
    limits = {"max_batch_tokens": 64, "max_waiting": 64, **limits}
    calibration = RankCalibration(GAMMA, config, policy)
    rank = make_rank(local, gamma=GAMMA, calibration=calibration, **limits)
    return Session(rank, drafter=TruthfulDrafter(bias))


def serve(served: Session, num_rounds: int, **sampling: object) -> list[str]:
    """At least `num_rounds` more, eight streams at a time; the notes on the way."""
    acceptance, notes = served.rank.counters.acceptance, []
    until = acceptance.num_rounds + num_rounds
    while acceptance.num_rounds < until:
        while len(served.rank.book.live) < 8:
            served.submit(admitted(f"r{len(served.streams)}", [3, 1, 4], 60, **sampling))
        served.step()
        notes += served.rank.notes
    return notes


def errors(served: Session, rule: int = RULE_GREEDY) -> list[float]:
    """ECE by position of what the rank believes of fresh blocks of its drafter."""
    confidences, right = served.drafter.blocks(20_000)
    rules = np.full(len(right), rule, np.int8)
    streams, yes = np.zeros(len(right), np.uint64), np.ones(len(right), np.bool_)
    believed = served.rank.calibration.adjust(Drafted(confidences, rules, streams, yes))
    survival, happened = believed.astype(np.float64).cumprod(1), right.cumprod(1) > 0
    return [ece(survival[:, k], happened[:, k]) for k in range(GAMMA)]


@pytest.mark.parametrize("bias", [1.0, -1.0])
def test_after_a_switch_of_traffic_the_alarm_fires_and_the_error_is_back_within_300_rounds(
    bias: float,
) -> None:
    left = []
    for seed in range(3):  # 300 rounds are few labels: what is promised holds in the mean
        served = session(0.0)
        drafter = served.drafter = TruthfulDrafter(0.0, seed)
        assert serve(served, 600) == []
        drafter.bias = bias
        assert max(errors(served)) > 0.15
        before = served.rank.counters.acceptance.num_rounds
        notes = serve(served, 290)
        assert served.rank.counters.acceptance.num_rounds - before <= 300
        assert served.rank.calibration.num_alarms == len(notes) >= 1
        assert "greedy rounds have drifted" in notes[0]
        left.append(errors(served))
    assert np.mean(left) < 0.03
    assert np.max(left) < 0.08


def test_wrong_confidences_are_put_right_and_everybody_sees_what_is_believed() -> None:
    served = session(1.0)
    served.rank.allocator = ALLOCATOR
    serve(served, 800)
    assert max(errors(served)) < 0.03
    table = served.rank.book.table
    decision = served.decisions[-1]
    raw = served.drafter.blocks(2000)[0].mean()
    believed = [d.survivals[d.has_draft, 0] for d in served.decisions[-60:]]
    assert np.concatenate(believed).mean() < raw - 0.1
    reports = [m for _, m in served.sent if isinstance(m, StepReport)]
    assert (reports[-1].survivals == decision.survivals).all()
    assert table.confidences.shape == (table.num_slots, GAMMA)


def test_switched_off_confidences_are_taken_as_they_come() -> None:
    served = session(1.0, CalibrationConfig(online=False))
    serve(served, 400)
    view = served.rank.calibration.view()
    assert max(errors(served)) > 0.15
    assert view["num_explored"] == view["num_alarms"] == 0
    assert view["by_rule"]["greedy"]["ece"][0] > 0.1  # measured all the same


# --- what is learned from ---------------------------------------------------------------------------------------


def test_each_acceptance_rule_learns_from_its_own_rounds() -> None:
    calibration = RankCalibration(GAMMA, CalibrationConfig(), "lagged")
    rng = np.random.default_rng(0)
    none = np.full(64, GAMMA, np.int32)
    for _ in range(40):
        rules = rng.choice([RULE_GREEDY, RULE_COUPLED], 64).astype(np.int8)
        right = rng.random((64, GAMMA)) < np.where(rules == RULE_GREEDY, 0.8, 0.3)[:, None]
        drafted = Drafted(
            np.full((64, GAMMA), 0.5, np.float32),
            rules,
            np.arange(64, dtype=np.uint64),
            np.ones(64, np.bool_),
        )
        accepted = right.cumprod(1).sum(1).astype(np.int32)
        calibration.learn(drafted, none, none, accepted, accepted + 1)
    believed = calibration.adjust(drafted)
    assert believed[rules == RULE_GREEDY].mean() == pytest.approx(0.8, abs=0.05)
    assert believed[rules == RULE_COUPLED].mean() == pytest.approx(0.3, abs=0.05)
    assert set(calibration.view()["by_rule"]) == {"greedy", "coupled"}
    assert len(RULE_NAMES) == 3
    calibration.restart()
    assert (calibration.adjust(drafted) == 0.5).all()


def test_requests_that_change_their_logits_teach_nothing_and_are_not_explored() -> None:
    served = session(1.0, OFTEN)
    serve(served, 200, rules=LogitRules(frequency_penalty=0.5))
    assert served.rank.calibration.view()["by_rule"] == {}
    assert served.rank.calibration.num_explored == 0
    serve(served, 200, logprobs=None)
    assert served.rank.calibration.num_explored > 0


def test_behind_a_stop_token_and_in_aborted_rounds_nothing_is_learned() -> None:
    calibration = RankCalibration(GAMMA, OFTEN, "lagged")
    drafted = Drafted(
        np.full((3, GAMMA), 0.5, np.float32),
        np.zeros(3, np.int8),
        np.zeros(3, np.uint64),
        np.ones(3, np.bool_),
    )
    whole = np.full(3, GAMMA, np.int32)
    accepted = np.array([GAMMA, 4, 0], np.int32)
    num_new = np.array([2, 0, 1], np.int32)  # cut at a stop token; aborted; refused at once
    calibration.learn(drafted, whole - 3, whole, accepted, num_new)
    greedy = calibration.by_rule[RULE_GREEDY]
    assert greedy.num_rounds == 2
    weight = 1 / OFTEN.explore_share
    assert greedy.reliability.num.sum(axis=1) == pytest.approx([2, 2, weight, weight, weight])
    assert greedy.reliability.accepted.sum(axis=1).tolist() == [1, 1, 0, 0, 0]
    assert calibration.num_explored == 3


def test_another_drafter_starts_afresh_and_alarms_stay_counted() -> None:
    served = session(1.0)
    serve(served, 300)
    assert max(errors(served)) < 0.1
    served.rank.set_drafters([endpoint("drafter-0", "drafter", "2")])
    assert max(errors(served)) > 0.15
    assert served.rank.is_idle is False
    served.deliver(served.rank.on_message(AbortRequest("r0", 0), served.now))


# --- exploration --------------------------------------------------------------------------------------------------


def explored_share(served: Session) -> float:
    rows = [(d, row) for d in served.decisions for row in np.flatnonzero(d.caps > 0)]
    return sum(d.is_explored(row) or d.cut_by(row) == "none" for d, row in rows) / len(rows)


@pytest.mark.parametrize("policy", ["static_threshold", "lagged", "algorithm1"])
def test_a_share_of_rounds_is_verified_whole_whatever_the_policy_trims(policy: str) -> None:
    served = session(-2.0, OFTEN, policy)  # it trims much
    serve(served, 600)
    calibration, decisions = served.rank.calibration, served.decisions
    assert calibration.num_explored > 50
    for decision in decisions:
        assert (decision.verify_len <= decision.caps).all()
        for row in np.flatnonzero(decision.caps):
            if decision.is_explored(row):
                assert decision.verify_len[row] == decision.caps[row]
    extra = sum(int((d.verify_len - d.planned_len).sum()) for d in decisions if d.num_reserved)
    assert calibration.num_explored_tokens == extra


def test_the_share_is_what_was_asked_for() -> None:
    calibration = RankCalibration(GAMMA, CalibrationConfig(), "lagged")
    rows = 64_000
    drafted = Drafted(
        np.zeros((rows, GAMMA), np.float32),
        np.zeros(rows, np.int8),
        np.arange(rows, dtype=np.uint64) % np.uint64(64),
        np.ones(rows, np.bool_),
    )
    lengths = (np.arange(rows) // 64).astype(np.int32)
    chosen = calibration.explore(drafted, lengths, np.full(rows, GAMMA, np.int32), 10**9)
    assert chosen.mean() == pytest.approx(1 / 64, rel=0.1)
    by_stream = chosen.reshape(-1, 64).mean(axis=0)
    assert by_stream.max() < 0.05 and (by_stream > 0).mean() > 0.99


@pytest.mark.parametrize("policy", ["none", "static_length"])
def test_a_policy_that_does_not_trim_by_survival_is_left_alone(policy: str) -> None:
    served = session(0.0, OFTEN, policy)
    serve(served, 100)
    assert served.rank.calibration.num_explored == 0
    assert all(d.verify_len.max(initial=0) <= 1 for d in served.decisions)


def test_exploration_keeps_to_the_room_of_the_step() -> None:
    """The scripted target refuses a step of more than `max_batch_tokens`."""
    served = session(0.0, CalibrationConfig(explore_share=0.25), max_batch_tokens=16)
    serve(served, 400)
    reserved = [d for d in served.decisions if d.num_reserved]
    assert reserved
    for decision in reserved:
        assert decision.verify_len.sum() <= decision.most_draft_tokens
        assert decision.num_reserved + decision.room <= 16


def test_a_class_that_limits_its_rows_limits_exploration_too() -> None:
    served = session(-2.0, OFTEN)
    served.rank.decider._classes = ClassAllocation([ServiceClass("short", max_verify_len=2)])
    serve(served, 300)
    assert served.rank.calibration.num_explored > 0
    assert max(int(d.verify_len.max(initial=0)) for d in served.decisions) == 2


def test_who_is_explored_does_not_depend_on_what_was_drafted() -> None:
    """Two drafters that disagree about everything: the same rounds of the same requests are explored."""
    found = []
    for seed in (1, 2):
        served = session(-3.0, OFTEN)
        served.drafter = TruthfulDrafter(-3.0, seed)
        calibration = served.rank.calibration
        seen: dict[tuple[int, int], bool] = {}
        plain = calibration.explore

        def watched(drafted, committed_len, caps, room, plain=plain, seen=seen):  # type: ignore[no-untyped-def]
            chosen = plain(drafted, committed_len, caps, room)
            keys = zip(drafted.streams.tolist(), committed_len.tolist(), strict=True)
            for key, teaches, is_chosen in zip(keys, drafted.teaches, chosen, strict=True):
                if teaches:
                    seen[key] = bool(is_chosen)
            return chosen

        calibration.explore = watched  # type: ignore[method-assign]
        serve(served, 200)
        found.append(seen)
    common = found[0].keys() & found[1].keys()
    assert len(common) > 50
    assert all(found[0][key] == found[1][key] for key in common)
    assert any(found[0][key] for key in common)


def test_a_round_that_was_explored_says_so() -> None:
    served = session(-2.0, OFTEN, explain_rounds=64)
    serve(served, 200)
    told = [
        r for name in served.streams for log in served.rank.book.logs.find(name) for r in log.rounds
    ]
    explored = [r for r in told if r.explored]
    assert explored and len(explored) < len(told)
    assert all(r.num_scheduled > 0 and r.cut_by in ("none", "length") for r in explored)
    assert RANK.role == "target"


def test_exploration_follows_a_policy_that_changes_while_serving():
    calibration = RankCalibration(GAMMA, OFTEN, "none")
    streams = np.arange(64, dtype=np.uint64)
    drafted = Drafted(
        np.full((64, GAMMA), 0.5, np.float32),
        np.full(64, RULE_GREEDY, np.int8),
        streams,
        np.ones(64, bool),
    )
    asked = np.arange(64, dtype=np.int32), np.full(64, GAMMA, np.int32), 10_000
    assert not calibration.explore(drafted, *asked).any()
    calibration.follow("lagged")
    assert calibration.explore(drafted, *asked).any()
    calibration.follow("static_length")
    assert not calibration.explore(drafted, *asked).any()
