"""C1 and C3: whatever is drafted, scheduled and verified, the output keeps the target's law. Exact, by enumeration."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from actors.core.local_policy import LocalPolicy
from actors.core.logit_rules import LogitRules
from actors.core.messages import Endpoint, RankProfile, VerifyBudget
from actors.core.prefix_scheduler import allocate, search
from actors.core.sampling import SamplingParams
from actors.core.sps import CostCurve
from actors.core.verify_decision import VerifyDecider
from kernels.block_reference import MarkovHead
from tests.torch_cpu.exact_law import (
    Code,
    Scheduler,
    drafted,
    output_law,
    round_laws,
    total_variation,
)
from tests.torch_cpu.tiny_pair import TinyPair, target_law

GREEDY = SamplingParams(temperature=0.0)
PLAIN = SamplingParams()
PARAMS = {
    "greedy": GREEDY,
    "plain": PLAIN,
    "cool": SamplingParams(temperature=0.6),
    "hot": SamplingParams(temperature=1.7),
    "top_p": SamplingParams(top_p=0.8),
    "top_k": SamplingParams(top_k=2),
    "top_k and top_p": SamplingParams(temperature=1.3, top_k=3, top_p=0.7),
}


RULES = {
    "repetition": SamplingParams(rules=LogitRules(repetition_penalty=1.75)),
    "frequency": SamplingParams(rules=LogitRules(frequency_penalty=1.5)),
    "presence": SamplingParams(temperature=0.8, rules=LogitRules(presence_penalty=-1.0)),
    "bias": SamplingParams(top_k=2, rules=LogitRules(logit_bias=((1, 2.0), (2, -100.0)))),
    "min_tokens": SamplingParams(rules=LogitRules(min_tokens=2)),
    "every rule": SamplingParams(
        temperature=1.2,
        top_p=0.9,
        rules=LogitRules(1.25, 0.75, 0.5, logit_bias=((1, 0.5),), min_tokens=1),
    ),
    "every rule, greedy": SamplingParams(
        temperature=0.0, rules=LogitRules(1.25, 0.75, 0.5, logit_bias=((1, 0.5),), min_tokens=1)
    ),
}


def law_error(
    pairs: list[TinyPair],
    params: list[SamplingParams],
    schedule: Scheduler,
    draft_top_k: int = 4,
    code: Code | None = None,
) -> float:
    """Largest distance of a request's output law from the target's."""
    code = code or Code()
    anchors = [request % pair.vocab for request, pair in enumerate(pairs)]
    each = list(zip(pairs, anchors, params, strict=True))
    blocks = [drafted(code, *one, min(draft_top_k, len(one[0].base[0]))) for one in each]
    laws = [round_laws(code, *one, block) for one, block in zip(each, blocks, strict=True)]
    survival = [
        pair.survivals(anchor, block.tokens)
        for (pair, anchor, _), block in zip(each, blocks, strict=True)
    ]
    outputs = output_law(blocks, laws, survival, schedule)
    return max(
        total_variation(law, target_law(*one)) for law, one in zip(outputs, each, strict=True)
    )


def uniform_length(length: int) -> Scheduler:
    return lambda survival: np.full(len(survival), length, np.int32)


@pytest.mark.parametrize("verify_len", range(3))
@pytest.mark.parametrize("name", PARAMS)
def test_any_verify_len_keeps_the_law(name: str, verify_len: int) -> None:
    pair = TinyPair.random(1, gamma=2, vocab=4, dtype=torch.float64)
    assert law_error([pair], [PARAMS[name]], uniform_length(verify_len)) < 1e-9


@pytest.mark.parametrize("name", RULES)
def test_logit_rules_keep_the_law_that_they_give_without_drafts(name: str) -> None:
    pair = TinyPair.random(1, gamma=2, vocab=4, dtype=torch.float64)
    assert law_error([pair], [RULES[name]], uniform_length(2)) < 1e-9


@pytest.mark.parametrize("verify_len", range(2))
def test_logit_rules_keep_their_law_at_other_lengths(verify_len: int) -> None:
    pair = TinyPair.random(11, gamma=2, vocab=3, dtype=torch.float64)
    params = [RULES["every rule"]]
    assert law_error([pair], params, uniform_length(verify_len), draft_top_k=3) < 1e-9


@pytest.mark.parametrize("name", PARAMS)
def test_a_sparse_draft_distribution_keeps_the_law(name: str) -> None:
    pair = TinyPair.random(2, gamma=2, vocab=4, dtype=torch.float64)
    assert law_error([pair], [PARAMS[name]], uniform_length(2), draft_top_k=2) < 1e-9


@pytest.mark.parametrize("name", PARAMS)
def test_a_reduced_draft_vocabulary_keeps_the_law(name: str) -> None:
    pair = TinyPair.random(3, gamma=2, vocab=4, dtype=torch.float64, d2t=[3, 0, 2])
    assert law_error([pair], [PARAMS[name]], uniform_length(2), draft_top_k=3) < 1e-9


@pytest.mark.parametrize("name", PARAMS)
def test_float32_keeps_the_law_up_to_rounding(name: str) -> None:
    pair = TinyPair.random(4, gamma=3, vocab=3, dtype=torch.float32)
    assert law_error([pair], [PARAMS[name]], uniform_length(3), draft_top_k=3) < 1e-6


# --- schedulers ------------------------------------------------------------------------------------------------------


def curve(step_time_s: list[float], gamma: int = 3) -> CostCurve:
    points = np.arange(1, len(step_time_s) + 1, dtype=np.int32)
    rank = Endpoint("rank", "target", "", "", "1")
    times = np.array(step_time_s)
    return CostCurve.of(
        RankProfile(rank, "here", points, points, times, np.zeros(len(times)), gamma)
    )


JAGGED = curve([1.0, 1.02, 1.03, 1.5, 1.51, 1.52, 2.2, 2.21, 2.3])


def by_policy(
    policy: LocalPolicy, budget: VerifyBudget | None = None, measured: CostCurve = JAGGED
) -> Scheduler:
    """A rank's own decision in step 9, with older steps that saw fixed survivals."""
    policy.times.measured(measured)

    def schedule(survival: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
        decider = VerifyDecider("rank", "1", policy, allocate)
        if budget is not None:
            decider.budgets.offer(budget, 9)
        rows, gamma = survival.shape
        everyone = np.full(rows, gamma, np.int32)
        ids = tuple(str(row) for row in range(rows))
        stale = np.full(survival.shape, 0.4, np.float32)
        for step, seen in ((6, stale), (7, stale**2), (9, survival)):
            decision = decider.decide(step, ids, seen, everyone, everyone > 0, rows * gamma, 0, 0)
        return decision.verify_len

    return schedule


def budget(max_draft_tokens: int, min_survival: float) -> VerifyBudget:
    return VerifyBudget("rank", "1", 7, 9, 20, max_draft_tokens, min_survival)


SCHEDULERS: dict[str, Callable[[], Scheduler]] = {
    "none": lambda: by_policy(LocalPolicy("none")),
    "static_length": lambda: by_policy(LocalPolicy("static_length", static_length=1)),
    "static_threshold": lambda: by_policy(LocalPolicy("static_threshold", static_threshold=0.3)),
    "algorithm1": lambda: by_policy(LocalPolicy("algorithm1")),
    "lagged, decided locally": lambda: by_policy(LocalPolicy("lagged")),
    "lagged, budget of one": lambda: by_policy(LocalPolicy("lagged"), budget(1, 0.0)),
    "lagged, budget of three": lambda: by_policy(LocalPolicy("lagged"), budget(3, 0.05)),
    "lagged, price": lambda: by_policy(LocalPolicy("lagged"), budget(99, 0.25)),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_requests_that_compete_for_a_budget_keep_their_laws(name: str) -> None:
    pairs = [TinyPair.random(seed, gamma=2, vocab=3, dtype=torch.float64) for seed in (5, 6, 7)]
    params = [PLAIN, PARAMS["top_k"], PARAMS["hot"]]
    assert law_error(pairs, params, SCHEDULERS[name](), draft_top_k=3) < 1e-9


def test_survivals_that_tie_keep_the_law() -> None:
    tied = []
    for seed in (8, 9):
        pair = TinyPair.random(seed, gamma=2, vocab=3, dtype=torch.float64)
        confidence = np.where(np.arange(3) == 0, 1.0, 0.5).astype(
            np.float32
        )  # after token 0: a_2 = a_1
        confidence = np.stack([np.full(3, 0.5, np.float32), confidence])
        tied.append(TinyPair(pair.target, pair.base, pair.markov, confidence))
    for tokens in range(5):
        schedule = by_policy(LocalPolicy("lagged"), budget(tokens, 0.0))
        assert law_error(tied, [PLAIN, PLAIN], schedule, draft_top_k=3) < 1e-9


# --- the paper's counter-example (appendix A) -----------------------------------------------------------------------


def appendix_a() -> TinyPair:
    """p = (.7, .3), q = (.5, .5); a_1 = .8; c_2 = .9 after A and 0 after B."""
    target = torch.tensor([0.7, 0.3], dtype=torch.float64).log().expand(3, 2, 2)
    markov = MarkovHead(
        torch.zeros(2, 1, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)
    )
    confidence = np.array([[0.8, 0.8], [0.9, 0.0]], np.float32)
    return TinyPair(target, torch.zeros(2, 2, dtype=torch.float64), markov, confidence)


APPENDIX_A = curve([1.0, 1 / 0.5, 1 / 0.45], gamma=2)


def anticipating(survival: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
    """A budget searched on the survivals of the very step it steers."""
    found = search(survival, APPENDIX_A)
    return allocate(survival, found.max_draft_tokens, found.min_survival, np.full(len(survival), 2))


def first_token_law(schedule: Scheduler) -> float:
    pair, code = appendix_a(), Code()
    blocks = drafted(code, pair, 0, PLAIN, 2)
    law = output_law(
        [blocks],
        [round_laws(code, pair, 0, PLAIN, blocks)],
        [pair.survivals(0, blocks.tokens)],
        schedule,
    )[0]
    return float(law[0].sum())


@pytest.mark.parametrize("name", SCHEDULERS)
def test_appendix_a_lawful_schedulers_keep_seventy_percent(name: str) -> None:
    assert first_token_law(SCHEDULERS[name]()) == pytest.approx(0.7, abs=1e-9)


def test_appendix_a_algorithm_1_stops_before_it_looks_at_the_second_slot() -> None:
    schedule = by_policy(LocalPolicy("algorithm1"), measured=APPENDIX_A)
    assert first_token_law(schedule) == pytest.approx(0.7, abs=1e-9)


def test_appendix_a_an_anticipating_scheduler_is_caught() -> None:
    assert first_token_law(anticipating) == pytest.approx(0.85, abs=1e-9)
    assert law_error([appendix_a()], [PLAIN], anticipating, draft_top_k=2) > 0.1
