"""Block sampling: the Markov chain, the support, and q as it was sampled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.core.sampling import SamplingBatch, SamplingParams
from kernels import noise
from kernels.markov_sample import BlockSample, DraftSampling, MarkovHead, sample_block

GAMMA, VOCAB, RANK, TOP_K = 4, 96, 5, 16
RNG = torch.Generator().manual_seed(0)
HEAD = MarkovHead(torch.randn(VOCAB, RANK, generator=RNG), torch.randn(VOCAB, RANK, generator=RNG))
GREEDY, PLAIN = SamplingParams(temperature=0.0), SamplingParams(noise_key=3)
SEEDED = SamplingParams(temperature=0.9, seed=4, noise_key=4)
ALL = [GREEDY, PLAIN, SEEDED, replace(PLAIN, temperature=0.5, top_k=3), replace(PLAIN, top_p=0.6)]


def block(
    params: list[SamplingParams], seed: int = 1, **changes: object
) -> tuple[torch.Tensor, BlockSample]:
    rng = torch.Generator().manual_seed(seed)
    rows = len(params)
    base = torch.randn(rows, GAMMA, VOCAB, generator=rng) * 2
    arguments: dict[str, object] = {
        "base_logits": base,
        "markov": HEAD,
        "anchors": torch.randint(0, VOCAB, (rows,), generator=rng),
        "anchor_positions": torch.arange(rows) + 10,
        "sampling": DraftSampling.of(SamplingBatch.of(params)),
        "draft_top_k": TOP_K,
    }
    return base, sample_block(**(arguments | changes))  # type: ignore[arg-type]


def anchors(seed: int, rows: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    torch.randn(rows, GAMMA, VOCAB, generator=rng)
    return torch.randint(0, VOCAB, (rows,), generator=rng)


def test_every_slot_is_biased_by_the_token_before_it_and_q_is_its_processed_support() -> None:
    base, out = block(ALL)
    previous = torch.cat([anchors(1, len(ALL))[:, None], out.draft_token_ids[:, :-1]], 1)
    assert torch.equal(out.markov_embeddings, HEAD.w1[previous])
    corrected = (base + HEAD.w1[previous] @ HEAD.w2.T).double()
    for row, params in enumerate(ALL):
        for k in range(GAMMA):
            values, ids = torch.topk(corrected[row, k], TOP_K)
            if params.temperature == 0:
                expected = torch.zeros(TOP_K).double()
                expected[0] = 1
                assert out.q_ids[row, k].tolist() == [int(ids[0])] + [-1] * (TOP_K - 1)
            else:
                expected = torch.softmax(values / params.temperature, -1)
                rank = torch.arange(TOP_K)
                expected[rank >= (params.top_k or TOP_K)] = 0
                expected /= expected.sum()
                expected[(expected.cumsum(0) - expected >= params.top_p) & (rank > 0)] = 0
                expected /= expected.sum()
                assert torch.equal(out.q_ids[row, k], ids)
            torch.testing.assert_close(out.q_probs[row, k].double(), expected, atol=1e-5, rtol=0)


def test_q_sums_to_one_and_gives_the_drafted_token_a_probability() -> None:
    _, out = block(ALL * 20)
    chosen = (out.q_probs * (out.q_ids == out.draft_token_ids[..., None])).sum(-1)
    assert (chosen > 0).all()
    torch.testing.assert_close(out.q_probs.sum(-1), torch.ones(100, GAMMA), atol=1e-6, rtol=0)


def test_greedy_rows_are_the_same_alone_and_among_sampled_ones() -> None:
    base, mixed = block([GREEDY, PLAIN, GREEDY])
    _, alone = block([GREEDY] * 3, base_logits=base)
    for row in (0, 2):
        assert torch.equal(mixed.draft_token_ids[row], alone.draft_token_ids[row])
        assert torch.equal(mixed.q_ids[row], alone.q_ids[row])
        assert torch.equal(mixed.q_probs[row], alone.q_probs[row])


def test_coupled_rows_race_with_the_noise_of_the_position_they_decide() -> None:
    _, out = block([SEEDED])
    for k in range(GAMMA):
        race = noise.exponential_noise(
            torch.tensor([4]), torch.tensor([10 + k + 1]), out.q_ids[:, k]
        )
        winner = int((out.q_probs[0, k] / race[0]).argmax())
        assert out.draft_token_ids[0, k] == out.q_ids[0, k, winner]


def test_a_coupled_drafter_that_equals_the_target_is_accepted_everywhere() -> None:
    """Shared noise, equal distributions: every draft token is the target's token."""
    rows = 300
    seeds = [replace(SEEDED, temperature=1.0, seed=i, noise_key=i) for i in range(rows)]
    base, out = block(seeds, draft_top_k=VOCAB, markov=None)
    for k in range(GAMMA):
        emitted = noise.coupled_argmax(
            torch.softmax(base[:, k], -1), torch.arange(rows), torch.arange(rows) + 11 + k
        )
        assert torch.equal(emitted, out.draft_token_ids[:, k])


def test_a_reduced_vocabulary_drafts_target_ids_and_feeds_them_back() -> None:
    reduced = 40
    d2t = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:reduced]
    head = MarkovHead(HEAD.w1, HEAD.w2[:reduced])
    base = torch.randn(3, GAMMA, reduced, generator=torch.Generator().manual_seed(6))
    _, out = block([GREEDY, PLAIN, SEEDED], base_logits=base, markov=head, d2t=d2t)
    assert torch.isin(out.draft_token_ids, d2t).all()
    assert torch.isin(out.q_ids[1:], d2t).all()
    assert torch.equal(out.markov_embeddings[:, 1:], HEAD.w1[out.draft_token_ids[:, :-1]])
    _, greedy = block([GREEDY], base_logits=base[:1], markov=head, d2t=d2t)
    assert torch.equal(greedy.draft_token_ids[0], out.draft_token_ids[0])


def test_without_a_markov_head_slots_are_independent() -> None:
    base, out = block([GREEDY], markov=None)
    assert out.markov_embeddings is None
    assert torch.equal(out.draft_token_ids[0], base[0].argmax(-1))


def test_a_row_drafts_the_same_alone_and_in_a_batch() -> None:
    base, together = block(ALL)
    start = anchors(1, len(ALL))
    for row, params in enumerate(ALL):
        _, alone = block(
            [params],
            base_logits=base[row : row + 1],
            anchors=start[row : row + 1],
            anchor_positions=torch.tensor([10 + row]),
        )
        assert torch.equal(alone.draft_token_ids[0], together.draft_token_ids[row])
        assert torch.equal(alone.q_ids[0], together.q_ids[row])
        torch.testing.assert_close(alone.q_probs[0], together.q_probs[row], atol=1e-6, rtol=0)


def test_a_support_wider_than_the_vocabulary_is_padded() -> None:
    _, out = block([PLAIN, GREEDY], draft_top_k=VOCAB + 8)
    assert out.q_ids.shape == (2, GAMMA, VOCAB + 8)
    assert (out.q_ids[:, :, VOCAB:] == -1).all() and (out.q_probs[:, :, VOCAB:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_q_is_float32_for_any_logits(dtype: torch.dtype) -> None:
    base = torch.randn(2, GAMMA, VOCAB, generator=torch.Generator().manual_seed(8)).to(dtype)
    head = MarkovHead(HEAD.w1.to(dtype), HEAD.w2.to(dtype))
    _, out = block([PLAIN, SEEDED], base_logits=base, markov=head)
    assert out.q_probs.dtype == torch.float32
    assert out.markov_embeddings is not None and out.markov_embeddings.dtype == dtype


def test_sampled_tokens_have_the_law_q() -> None:
    rows = 20_000
    keys = [replace(PLAIN, noise_key=key) for key in range(rows)]
    base = torch.randn(1, GAMMA, VOCAB, generator=torch.Generator().manual_seed(9)).expand(
        rows, -1, -1
    )
    _, out = block(keys, base_logits=base, anchors=torch.zeros(rows, dtype=torch.long))
    share = (
        np.bincount(out.draft_token_ids[:, 0].numpy(), minlength=VOCAB)[out.q_ids[0, 0].numpy()]
        / rows
    )
    np.testing.assert_allclose(share, out.q_probs[0, 0].numpy(), atol=5 * np.sqrt(0.25 / rows))
