"""Over many rounds: coupled streams are the same tokens whatever is drafted; rejection streams keep the joint law."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from actors.core.sampling import RULE_COUPLED, RULE_GREEDY, SamplingBatch, SamplingParams
from kernels import block_reference, reference, rejection
from kernels.block_reference import BlockSample, MarkovHead
from tests.torch_cpu.mutation import mutant
from tests.torch_cpu.streams import TinyModels, always, at_random, generate
from tests.torch_cpu.tiny_pair import processed

PARAMS = {
    "plain": SamplingParams(),
    "cool": SamplingParams(temperature=0.6),
    "top_p": SamplingParams(top_p=0.7),
    "top_k": SamplingParams(temperature=1.4, top_k=3),
}


def seeded(params: SamplingParams, num_rows: int) -> SamplingBatch:
    return SamplingBatch.of([replace(params, seed=key, noise_key=key) for key in range(num_rows)])


def unseeded(params: SamplingParams, num_rows: int) -> SamplingBatch:
    keys = np.random.default_rng(3).integers(0, 2**63, num_rows)
    return SamplingBatch.of([replace(params, noise_key=int(key)) for key in keys])


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("draft_top_k", [2, 6])
def test_a_seeded_stream_is_the_same_with_and_without_speculation(
    name: str, draft_top_k: int
) -> None:
    models = TinyModels.random(1, gamma=4, vocab=6, draft_top_k=draft_top_k)
    sampling = seeded(PARAMS[name], 2000)
    plain = generate(models, sampling, always(0), 12)
    for lengths in (always(4), always(1), at_random(2)):
        assert (generate(models, sampling, lengths, 12) == plain).all()
    assert (generate(models.without(2), sampling, at_random(4), 12) == plain).all()


def test_a_seeded_stream_is_the_same_alone_and_in_any_batch() -> None:
    models = TinyModels.random(5, gamma=3, vocab=6, draft_top_k=6)
    sampling = seeded(PARAMS["top_p"], 8)
    together = generate(models, sampling, always(3), 12)
    for row in range(8):
        assert (generate(models, sampling.rows([row]), at_random(row), 12) == together[row]).all()


def test_a_seeded_stream_goes_on_with_the_same_tokens_after_a_failover() -> None:
    models = TinyModels.random(6, gamma=3, vocab=6, draft_top_k=6)
    sampling = seeded(PARAMS["plain"], 500)
    whole = generate(models, sampling, always(3), 12)
    rest = generate(models, sampling, at_random(1), 7, anchors=whole[:, 4], start=3 + 5)
    assert (rest == whole[:, 5:]).all()


@pytest.mark.parametrize("name", PARAMS)
def test_seeds_have_the_law_of_the_target(name: str) -> None:
    models = TinyModels.random(7, gamma=2, vocab=4, draft_top_k=4)
    assert_law(generate(models, seeded(PARAMS[name], 60_000), always(2), 3), models, PARAMS[name])


@pytest.mark.parametrize("name", PARAMS)
def test_unseeded_streams_keep_the_joint_law_with_keyed_draws(name: str) -> None:
    models = TinyModels.random(8, gamma=3, vocab=4, draft_top_k=3)
    assert_law(
        generate(models, unseeded(PARAMS[name], 60_000), at_random(9), 3), models, PARAMS[name]
    )


def test_greedy_streams_are_the_same_with_and_without_speculation() -> None:
    models = TinyModels.random(10, gamma=4, vocab=6, draft_top_k=6)
    sampling = SamplingBatch.of([SamplingParams(temperature=0.0)] * 6)
    anchors = np.arange(6)
    plain = generate(models, sampling, always(0), 12, anchors)
    assert (sampling.rule == RULE_GREEDY).all()
    assert (generate(models, sampling, at_random(1), 12, anchors) == plain).all()


def test_streams_of_different_rules_share_a_batch_without_touching_each_other() -> None:
    models = TinyModels.random(11, gamma=3, vocab=6, draft_top_k=4)
    params = [
        SamplingParams(temperature=0.0),
        PARAMS["top_p"],
        replace(PARAMS["cool"], seed=4, noise_key=4),
    ]
    sampling = SamplingBatch.of(
        [replace(one, noise_key=77 + i) for i, one in enumerate(params * 5)]
    )
    together = generate(models, sampling, always(3), 10)
    for row in range(len(params)):
        assert (generate(models, sampling.rows([row]), always(3), 10) == together[row]).all()


def test_coupled_acceptance_of_a_wrong_token_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = mutant(
        reference,
        "(emitted[rows] == group.draft_token_ids) & scheduled",
        "((emitted[rows] - group.draft_token_ids).abs() < 2) & scheduled",
    )
    models, sampling = (
        TinyModels.random(1, gamma=4, vocab=6, draft_top_k=6),
        seeded(PARAMS["plain"], 200),
    )
    plain = generate(models, sampling, always(0), 12)
    assert (sampling.rule == RULE_COUPLED).all()
    monkeypatch.setattr(rejection.dispatch, "chosen", lambda *_: broken.verify)
    assert (generate(models, sampling, always(4), 12) != plain).any()


def test_coupled_noise_of_the_round_instead_of_the_position_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    same = "coupled_argmax(*args[:-1], args[-1] * 0)"
    broken = mutant(reference, "return coupled_argmax(", f"return (lambda *args: {same})(")
    models = TinyModels.random(12, gamma=2, vocab=4, draft_top_k=4)
    monkeypatch.setattr(rejection.dispatch, "chosen", lambda *_: broken.verify)
    tokens = generate(models, seeded(PARAMS["plain"], 20_000), always(2), 3)
    with pytest.raises(AssertionError, match="law"):
        assert_law(tokens, models, PARAMS["plain"])


# --- a budget that is two steps old, and a position that is drafted twice --------------------------------------------


def share_of_a_after_revealing_budget(sample_block) -> float:  # type: ignore[no-untyped-def]
    """P(y = A) at the third token when the budget of round 2 depends on what round 0 drafted for that position.

    Rounds 0 and 1 verify nothing, so the third token, drafted in slot 3 of round 0, is drafted again in slot 1 of
    round 2. The budget of round 2 is lawful: it uses the survivals of round 0 only.
    """
    law = torch.tensor([0.7, 0.3]).log()
    flat = MarkovHead(torch.zeros(2, 1), torch.zeros(2, 1))
    models = TinyModels(law.expand(2, 2), torch.zeros(4, 2), flat, 2)
    seen: list[npt.NDArray[np.bool_]] = []

    def lengths(round_index: int, block: BlockSample) -> npt.NDArray[np.int64]:
        seen.append(block.draft_token_ids[:, 2].numpy() == 0)  # what c_4 of that round reveals
        return seen[0].astype(np.int64) if round_index == 2 else np.zeros(len(seen[0]), np.int64)

    tokens = generate(
        models, unseeded(SamplingParams(), 40_000), lengths, 3, sample_block=sample_block
    )
    return float((tokens[:, 2] == 0).mean())


def test_a_position_drafted_again_gets_a_fresh_draw_so_that_lagged_budgets_stay_lawful() -> None:
    assert share_of_a_after_revealing_budget(block_reference.sample_block) == pytest.approx(
        0.7, abs=0.012
    )


def test_draft_draws_keyed_by_position_alone_are_caught() -> None:
    broken = mutant(block_reference, "PURPOSE_DRAFT + slots", "PURPOSE_DRAFT + 0 * slots")
    assert share_of_a_after_revealing_budget(broken.sample_block) > 0.82


# --- oracle ----------------------------------------------------------------------------------------------------------


def assert_law(tokens: npt.NDArray[np.int64], models: TinyModels, params: SamplingParams) -> None:
    """Compare the joint law of the first three tokens with the target's, five standard deviations wide."""
    vocab = len(models.target)
    rows = np.stack([processed(models.target[v].double().numpy(), params) for v in range(vocab)])
    expected = rows[0][:, None, None] * rows[:, :, None] * rows[None]
    counts = np.zeros((vocab,) * 3)
    np.add.at(counts, tuple(tokens.T), 1)
    share = counts / len(tokens)
    deviation = np.sqrt(expected * (1 - expected) / len(tokens))
    worst = np.abs(share - expected) - 5 * deviation
    assert (worst <= 1e-6).all(), f"law: {share[worst > 1e-6]} want {expected[worst > 1e-6]}"
