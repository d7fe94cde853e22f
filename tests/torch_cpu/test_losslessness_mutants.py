"""The law check can fail: each rule is broken by hand, and the check notices. A mutant that survives is a hole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np
import pytest
import torch

from actors.core import logit_edits, prefix_scheduler
from actors.core.logit_rules import LogitRules
from actors.core.sampling import SamplingParams
from kernels import block_reference, reference
from tests.torch_cpu.exact_law import Code
from tests.torch_cpu.mutation import mutant
from tests.torch_cpu.test_losslessness import (
    APPENDIX_A,
    PLAIN,
    appendix_a,
    first_token_law,
    law_error,
    uniform_length,
)
from tests.torch_cpu.tiny_pair import TinyPair

TRUNCATED = SamplingParams(temperature=3.0, top_k=3, top_p=0.75)
RULED = SamplingParams(
    rules=LogitRules(repetition_penalty=1.5, frequency_penalty=1.0, min_tokens=1)
)
CAUGHT = 1e-3


@dataclass(frozen=True)
class Break:
    """One piece of source replaced in one module, and the request that shows it."""

    module: ModuleType
    old: str
    new: str
    params: SamplingParams = PLAIN
    verify_len: int = 2
    draft_top_k: int = 3

    @property
    def code(self) -> Code:
        broken = mutant(self.module, self.old, self.new)
        if self.module is reference:
            return replace(Code(), verify=broken.verify)
        if self.module is logit_edits:
            return replace(Code(), logit_edits=broken.logit_edits)
        return replace(Code(), sample_block=broken.sample_block)


BREAKS = {
    "residual without clamp": Break(reference, ".clamp_(min=0)\n", "\n"),
    "residual left out": Break(reference, "weights = _residual(weights, accepted, group)", "pass"),
    "residual without renormalisation": Break(
        reference,
        "torch.searchsorted(cumulated, (u * cumulated[:, -1])[:, None], right=True)[:, 0]",
        "torch.searchsorted(cumulated, u[:, None].contiguous(), right=True)[:, 0]"
        ".clamp(max=weights.shape[-1] - 1)",
    ),
    "residual of the first slot": Break(
        reference,
        "slot = accepted.clamp(max=group.draft_token_ids.shape[1] - 1)",
        "slot = (accepted * 0)",
    ),
    "residual beyond the verified length": Break(
        reference,
        "refused = (accepted < group.verify_len)",
        "refused = (accepted < group.draft_token_ids.shape[1])",
        verify_len=1,
    ),
    "bonus from the wrong row": Break(
        reference,
        "last = group.row_start + accepted\n",
        "last = group.row_start + (accepted - 1).clamp(min=0)\n",
    ),
    "acceptance without q": Break(reference, "(accept_u * q < p)", "(accept_u < p)"),
    "acceptance of everything": Break(reference, "(accept_u * q < p)", "(p > -1)"),
    "acceptance past a rejection": Break(
        reference, "accept.long().cumprod(-1).sum(-1)", "accept.long().sum(-1)"
    ),
    "target without temperature": Break(
        reference,
        "temperature.to(precise.dtype)",
        "(0 * temperature + 1).to(precise.dtype)",
        TRUNCATED,
    ),
    "target without truncation": Break(reference, "if not truncates:", "if True:", TRUNCATED),
    "top-p of the untruncated mass": Break(
        reference,
        "torch.where(whole, mass[:, -1], 1.0)",
        "1.0 + 0 * mass[:, -1]",
        TRUNCATED,
    ),
    "penalties blind to the drafts": Break(
        logit_edits,
        "steps[np.arange(1, num_positions), np.searchsorted(ids, counted)] = 1",
        "pass",
        RULED,
    ),
    "penalties that count a draft at its own position": Break(
        logit_edits,
        "steps[np.arange(1, num_positions), np.searchsorted(ids, counted)] = 1",
        "steps[np.arange(num_positions - 1), np.searchsorted(ids, counted)] = 1",
        RULED,
    ),
    "a least length that forgets the drafts": Break(
        logit_edits,
        "min(max(0, rules.min_tokens - special.num_output), num_positions)",
        "num_positions if rules.min_tokens > special.num_output else 0",
        RULED,
    ),
    "edits of another row": Break(
        logit_edits, "int(firsts[special.row]) +", "int(firsts[special.row] * 0) +", RULED
    ),
    "q before truncation": Break(
        block_reference,
        "q_probs[:, k, : ids.shape[1]] = probs",
        "q_probs[:, k, : ids.shape[1]] = _support_probs(values, sampling._replace(any_truncated=False))",
        TRUNCATED,
    ),
    "q at another temperature": Break(
        block_reference,
        "q_probs[:, k, : ids.shape[1]] = probs",
        "q_probs[:, k, : ids.shape[1]] = torch.softmax(values, -1)",
        SamplingParams(temperature=0.5),
    ),
    "q without the Markov bias": Break(
        block_reference,
        "q_probs[:, k, : ids.shape[1]] = probs",
        "q_probs[:, k, : ids.shape[1]] = torch.softmax(base_logits[:, k].gather(1, index), -1)",
    ),
    "q of a softmax, but a greedy draft": Break(
        block_reference, "slot = inverse_cdf(probs, draws)", "slot = (draws * 0).long()"
    ),
    "q not renormalised over its support": Break(
        block_reference,
        "q_probs[:, k, : ids.shape[1]] = probs",
        "q_probs[:, k, : ids.shape[1]] = torch.softmax(logits, -1).gather(1, index)",
        draft_top_k=2,
    ),
}


def error(name: str, code: Code | None = None) -> float:
    case = BREAKS[name]
    pair = TinyPair.random(11, gamma=2, vocab=4, dtype=torch.float64)
    return law_error(
        [pair], [case.params], uniform_length(case.verify_len), draft_top_k=3, code=code
    )


@pytest.mark.parametrize("name", BREAKS)
def test_broken_acceptance_or_drafting_is_caught(name: str) -> None:
    assert error(name) < 1e-9, "the unbroken code must pass the same check"
    assert error(name, BREAKS[name].code) > CAUGHT


# --- schedulers ------------------------------------------------------------------------------------------------------


def test_a_lagged_budget_searched_on_current_survivals_is_caught() -> None:
    broken = mutant(
        prefix_scheduler, "            facts.lagged_survivals,", "            facts.survivals,"
    )
    assert first_token_law(_lagged(prefix_scheduler)) == pytest.approx(0.7, abs=1e-9)
    assert first_token_law(_lagged(broken)) == pytest.approx(0.85, abs=1e-9)


def test_algorithm_1_without_its_stop_is_caught() -> None:
    broken = mutant(
        prefix_scheduler,
        "int(np.logical_and.accumulate(rises).sum())",
        "int(throughput.argmax())",
    )
    assert first_token_law(_early_stop(prefix_scheduler)) == pytest.approx(0.7, abs=1e-9)
    assert first_token_law(_early_stop(broken)) == pytest.approx(0.85, abs=1e-9)


def test_ties_broken_by_what_comes_later_are_caught() -> None:
    """Two requests tie at the first slot and there is room for one: choosing by a_2 reveals x_1."""
    broken = mutant(
        prefix_scheduler,
        "came = row if arrival is None else np.asarray(arrival)[row]",
        "came = -survivals[row, -1]",
    )
    for module, caught in ((prefix_scheduler, False), (broken, True)):
        allocate = module.allocate

        def one_token(survival, allocate=allocate):  # type: ignore[no-untyped-def]
            return allocate(survival, 1, 0.0, np.full(len(survival), 2))

        found = law_error([appendix_a(), appendix_a()], [PLAIN, PLAIN], one_token, draft_top_k=2)
        assert (found > CAUGHT) == caught


def test_a_price_held_against_the_next_slot_is_caught() -> None:
    """Slot k sent because slot k + 1 looks good: a_2 tells x_1."""
    broken = mutant(
        prefix_scheduler,
        "eligible = (survivals >= min_survival) & (position < np.asarray(caps)[:, None])",
        "eligible = (survivals[:, [1, 1]] >= min_survival) & (position < np.asarray(caps)[:, None])",
    )
    for module, share in ((prefix_scheduler, 0.7), (broken, 0.85)):
        allocate = module.allocate

        def priced(survival, allocate=allocate):  # type: ignore[no-untyped-def]
            return allocate(survival, 99, 0.5, np.full(len(survival), 2))

        assert first_token_law(priced) == pytest.approx(share, abs=1e-9)


def _facts(survival):  # type: ignore[no-untyped-def]
    caps = np.full(len(survival), 2, np.int32)
    stale = np.full(survival.shape, 0.1, np.float32)
    return prefix_scheduler.StepFacts(9, survival, caps, 7, stale, 0, 0)


def _lagged(module):  # type: ignore[no-untyped-def]
    times = prefix_scheduler.RankTimes()
    times.measured(APPENDIX_A)

    def schedule(survival):  # type: ignore[no-untyped-def]
        choice = module.Lagged(times).choose(_facts(survival))
        return module.allocate(
            survival, choice.max_draft_tokens, choice.min_survival, np.full(len(survival), 2)
        )

    return schedule


def _early_stop(module):  # type: ignore[no-untyped-def]
    return lambda survival: module.early_stop(survival, np.full(len(survival), 2), APPENDIX_A)
