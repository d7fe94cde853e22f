"""Blocks that are drafted no further than they are worth: what is drafted is what the whole block would have."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from torch import Tensor

from actors.core.draft_stop import LEAST_DRAFTED
from actors.core.messages import ProposalBatch
from actors.core.sampling import SamplingParams
from actors.engine.drafters import stopped
from actors.engine.drafters.engine import DSparkEngine
from actors.engine.drafters.stopped import group_len
from tests.torch_cpu.tiny_drafters import (
    GREEDY,
    Stream,
    commit_batch,
    every_config,
    tiny_config,
    tiny_engine,
    tiny_model,
)

GAMMA = 12
RULES = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=0.9, top_p=0.9, noise_key=5),
    "seeded": SamplingParams(temperature=0.8, seed=4, noise_key=4),
}


def proposals(
    engine: DSparkEngine, params: SamplingParams, min_survival: float, num_requests: int = 9
) -> ProposalBatch:
    config = engine.model.config
    streams = [Stream(f"r{i}", 40, config, i) for i in range(num_requests)]
    entries = [s.commit(0, 5 + 3 * i) for i, s in enumerate(streams)]
    found = engine.advance(commit_batch(entries, params=params, min_survival=min_survival))
    assert found is not None
    return found


def lens_by_rule(whole: ProposalBatch, min_survival: float) -> npt.NDArray[np.int64]:
    goes_on = whole.confidences.cumprod(axis=1) >= min_survival
    goes_on[:, :LEAST_DRAFTED] = True
    return np.logical_and.accumulate(goes_on, axis=1).sum(axis=1)


@pytest.mark.parametrize("group_rows", [1, 9, 48, 1000])
@pytest.mark.parametrize("params", RULES.values(), ids=RULES)
@pytest.mark.parametrize(
    "changes", [{}, {"draft_vocab_size": 96}, {"confidence_head_with_markov": False}]
)
def test_what_is_drafted_is_what_the_whole_block_has_and_fillers_follow(
    changes: dict[str, Any],
    params: SamplingParams,
    group_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stopped, "GROUP_ROWS", group_rows)
    model = tiny_model(tiny_config(block_size=GAMMA, **changes))
    whole = proposals(tiny_engine(model), params, 0.0)
    assert whole.draft_lens is None
    for min_survival in (1e-12, 0.02, 0.2, 1.0):
        found = proposals(tiny_engine(model), params, min_survival)
        assert found.draft_lens is not None
        lens = lens_by_rule(whole, min_survival)
        np.testing.assert_array_equal(found.draft_lens, lens)
        is_drafted = np.arange(GAMMA) < lens[:, None]
        for name in ("draft_token_ids", "q_ids"):
            np.testing.assert_array_equal(
                getattr(found, name)[is_drafted], getattr(whole, name)[is_drafted]
            )
        for name in ("confidences", "q_probs"):
            np.testing.assert_allclose(
                getattr(found, name)[is_drafted], getattr(whole, name)[is_drafted], atol=2e-6
            )
        check_fillers(found, ~is_drafted)
    assert lens.min() == LEAST_DRAFTED


def check_fillers(found: ProposalBatch, is_filler: npt.NDArray[np.bool_]) -> None:
    assert not found.confidences[is_filler].any()
    assert (found.q_ids[..., 0] == found.draft_token_ids)[is_filler].all()
    assert (found.q_probs[..., 0] == 1.0)[is_filler].all()
    assert not found.q_probs[..., 1:][is_filler].any()
    assert (found.q_ids[..., 1:] == -1)[is_filler].all()


def test_fewer_slots_than_the_block_stop_alike() -> None:
    model = tiny_model(tiny_config(block_size=GAMMA))
    whole = proposals(tiny_engine(model), GREEDY, 0.0)
    found = proposals(tiny_engine(model, gamma=5), GREEDY, 0.05)
    assert found.draft_lens is not None
    np.testing.assert_array_equal(found.draft_lens, lens_by_rule(whole, 0.05).clip(max=5))
    is_drafted = np.arange(5) < found.draft_lens[:, None]
    np.testing.assert_array_equal(
        found.draft_token_ids[is_drafted], whole.draft_token_ids[:, :5][is_drafted]
    )


def test_the_output_head_sees_only_slots_of_rows_that_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stopped, "GROUP_ROWS", 9)
    engine = tiny_engine(tiny_model(tiny_config(block_size=GAMMA)))
    shapes: list[tuple[int, ...]] = []
    head = engine.model.head

    def counted(x: Tensor) -> Tensor:
        shapes.append(tuple(x.shape[:-1]))
        return head(x)

    monkeypatch.setattr(engine.model, "head", counted)
    whole = proposals(engine, GREEDY, 0.0)
    assert shapes == [(9, GAMMA)]  # one product, as ever
    engine.close(whole.request_ids)
    shapes.clear()
    lens = proposals(engine, GREEDY, 0.3).draft_lens
    assert lens is not None
    assert shapes[:2] == [(9, 1), (9, 1)]  # a slot at a time while there are nine of them
    starts = np.cumsum([0, *(width for _, width in shapes)])[:-1]
    assert [rows for rows, _ in shapes] == [int((lens >= start).sum()) for start in starts]
    assert lens.sum() <= sum(rows * width for rows, width in shapes) < 9 * GAMMA / 2


@pytest.mark.parametrize("name", ["gated", "rnn", "headless", "dflash"])
def test_drafters_whose_confidence_is_not_known_in_time_draft_whole_blocks(name: str) -> None:
    config = every_config(block_size=4)[name]
    model = tiny_model(config)  # type: ignore[arg-type]
    found = proposals(tiny_engine(model), GREEDY, 1.0)
    assert found.draft_lens is None
    np.testing.assert_array_equal(
        found.draft_token_ids, proposals(tiny_engine(model), GREEDY, 0.0).draft_token_ids
    )


def test_a_captured_draft_is_whole() -> None:
    engine = tiny_engine(tiny_model(tiny_config()))
    engine.use_paged(None)
    assert proposals(engine, GREEDY, 1.0).draft_lens is None


@pytest.mark.parametrize("num_rows", [1, 3, 16, 64, 300])
@pytest.mark.parametrize("num_left", [1, 5, 16])
def test_groups_cover_what_is_left_with_about_as_many_rows_each(
    num_rows: int, num_left: int
) -> None:
    width = group_len(num_rows, num_left)
    assert 1 <= width <= num_left
    if num_rows * num_left <= stopped.GROUP_ROWS:
        assert width == num_left
    if 1 < width < num_left:
        assert 0.6 < num_rows * width / stopped.GROUP_ROWS < 2
