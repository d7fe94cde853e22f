"""Logit rules, position by position: what a token costs after the tokens before it, drafted ones included."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.core.layout import DraftTokens, SpecialRow, StepPlan
from actors.core.logit_edits import drafts_of, first_decided_rows, logit_edits
from actors.core.logit_rules import LogitRules
from actors.core.messages import AdmittedRequest, TokenDeltas
from actors.core.sampling import SamplingBatch, SamplingParams
from tests.pure.rank_harness import Session, admitted, make_rank

V = 7
Row = tuple[LogitRules | None, list[int], list[int], list[int], tuple[int, ...]]
"""Rules, prompt, output, drafts, stop tokens."""


def plan_of(rows: list[Row]) -> StepPlan:
    """Rounds of one request each; the last output token (or of the prompt) is the anchor."""
    verify_len = np.array([len(drafts) for _, _, _, drafts, _ in rows], np.int32)
    tokens = [[(prompt + output)[-1], *drafts] for _, prompt, output, drafts, _ in rows]
    params = [SamplingParams(rules=rules) for rules, *_ in rows]
    cu = np.concatenate([[0], np.cumsum(verify_len + 1)]).astype(np.int32)
    special = tuple(
        SpecialRow(i, str(i), 0, params[i], np.array(prompt + output, np.int32), len(output), stops)
        for i, (_, prompt, output, _, stops) in enumerate(rows)
        if params[i].is_special
    )
    width = int(verify_len.max())
    return StepPlan(
        step=0,
        request_ids=tuple(str(i) for i in range(len(rows))),
        token_ids=np.concatenate(tokens).astype(np.int32),
        positions=np.zeros(cu[-1], np.int32),
        cu_query_len=cu,
        context_len=np.zeros(len(rows), np.int32),
        block_tables=np.zeros((len(rows), 1), np.int32),
        slot_mapping=np.zeros(cu[-1], np.int32),
        verify_len=verify_len,
        samples=np.ones(len(rows), np.bool_),
        sampling=SamplingBatch.of(params),
        draft=DraftTokens(
            np.zeros((len(rows), width, 1), np.int32), np.ones((len(rows), width, 1), np.float32)
        ),
        special=special,
    )


def expected(
    logits: npt.NDArray[np.float64],
    rules: LogitRules,
    prompt: list[int],
    output: list[int],
    stops: tuple[int, ...],
) -> npt.NDArray[np.float64]:
    """The rules, word by word, for one position: the oracle."""
    changed = logits.copy()
    for token in range(V):
        if token in prompt or token in output:
            over = changed[token] > 0
            changed[token] *= 1 / rules.repetition_penalty if over else rules.repetition_penalty
        changed[token] -= rules.frequency_penalty * output.count(token)
        changed[token] -= rules.presence_penalty * (token in output)
        changed[token] += dict(rules.logit_bias).get(token, 0.0)
        if token in stops and len(output) < rules.min_tokens:
            changed[token] = -np.inf
    return changed


def applied(logits: npt.NDArray[np.float64], plan: StepPlan) -> npt.NDArray[np.float64]:
    changed, edits = logits.copy(), logit_edits(plan)
    if edits is not None:
        at = (edits.rows, edits.token_ids)
        assert len(set(zip(*(a.tolist() for a in at), strict=True))) == len(edits.rows)
        old = changed[at]
        changed[at] = np.where(old > 0, old / edits.factors, old * edits.factors) + edits.addends
    return changed


tokens = st.lists(st.integers(0, V - 1), max_size=6)
rules = st.builds(
    LogitRules,
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -1.0]),
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    logit_bias=st.dictionaries(st.integers(0, V - 1), st.sampled_from([-100.0, 0.5, 3.0])).map(
        lambda bias: tuple(bias.items())
    ),
    min_tokens=st.integers(0, 8),
)
row = st.tuples(
    rules,
    tokens.filter(bool),
    tokens,
    tokens,
    st.sets(st.integers(0, V - 1), max_size=2).map(tuple),
)


@settings(deadline=None)
@given(rows=st.lists(row, min_size=1, max_size=3), seed=st.integers(0, 9))
def test_every_position_is_judged_as_if_the_drafts_before_it_were_output(
    rows: list[Row], seed: int
) -> None:
    plan = plan_of(rows)
    logits = np.random.default_rng(seed).normal(size=(plan.batch_tokens, V))
    wanted = [
        expected(logits[first + k], rule, prompt, output + drafts[:k], stops)
        for first, (rule, prompt, output, drafts, stops) in zip(
            first_decided_rows(plan).tolist(), rows, strict=True
        )
        for k in range(len(drafts) + 1)
        if rule is not None
    ]
    np.testing.assert_allclose(applied(logits, plan), wanted, rtol=1e-6)


@settings(deadline=None)
@given(row=row, seed=st.integers(0, 9))
def test_a_position_is_changed_alike_as_a_draft_and_as_a_committed_token(
    row: Row, seed: int
) -> None:
    rule, prompt, output, drafts, stops = row
    together = logit_edits(plan_of([row]))
    for k in range(len(drafts) + 1):
        alone = logit_edits(plan_of([(rule, prompt, output + drafts[:k], [], stops)]))
        here = None if together is None else together.rows == k
        if alone is None or together is None or here is None:
            assert alone is None and (here is None or not here.any())
            continue
        for name in ("token_ids", "factors", "addends"):
            assert getattr(alone, name).tobytes() == getattr(together, name)[here].tobytes()


def test_a_step_without_rules_has_no_edits() -> None:
    assert logit_edits(plan_of([(None, [1], [2], [3], ())])) is None
    assert logit_edits(plan_of([(LogitRules(), [1], [2], [3], (4,))])) is None
    assert logit_edits(plan_of([(LogitRules(grammar="x"), [1], [2], [3], (4,))])) is None


def test_rows_that_only_prefill_take_no_part_in_the_rows_that_decide() -> None:
    plan = plan_of([(None, [1], [], [2, 3], ()), (LogitRules(min_tokens=1), [1], [], [], (4,))])
    assert first_decided_rows(plan).tolist() == [0, 3]
    assert drafts_of(plan, 0).tolist() == [2, 3] and drafts_of(plan, 1).tolist() == []
    silent = replace(plan, samples=np.array([True, False]), special=())
    assert first_decided_rows(silent).tolist() == [0, 3]


@pytest.mark.parametrize("gamma", [0, 3])
def test_a_rank_hands_the_engine_what_special_rows_need(gamma: int) -> None:
    session = Session(make_rank(gamma=gamma, max_batch_tokens=8), error=0.3)
    asks = SamplingParams(temperature=0.0, rules=LogitRules(min_tokens=5))
    messages: list[AdmittedRequest] = [
        admitted("plain", [5, 6], 9),
        replace(admitted("asks", [1, 2, 3] * 4, 9, stops=(45,), num_prior=2), sampling=asks),
    ]
    for message in messages:
        session.submit(message)
    session.run()
    seen = []
    for plan in session.target.plans:
        for special in plan.special:
            assert plan.request_ids[special.row] == special.request_id == "asks"
            assert plan.samples[special.row] and special.stop_token_ids == (45,)
            anchor = plan.token_ids[
                plan.cu_query_len[special.row + 1] - plan.verify_len[special.row] - 1
            ]
            seen.append((special.num_output, len(special.token_ids)))
            assert special.token_ids.shape == (10 + special.num_output,) and anchor >= 0
    output = session.streams["asks"].tokens
    # 12 prompt ids in chunks: rows in the middle of a prompt are not special, the last one is.
    assert seen[0] == (2, 12) and len(seen) <= len(output) == 7
    assert not any(session.rank.book.table.is_special)
    assert any(isinstance(message, TokenDeltas) for _, message in session.sent)
