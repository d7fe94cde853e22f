"""The block sampling kernels equal their torch twin: the same tokens, the same q, the same noise bits."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.core.sampling import SamplingBatch, SamplingParams
from kernels import block_reference, noise
from kernels.block_reference import BlockSample, DraftSampling, MarkovHead
from kernels.device import block_sample
from kernels.device import noise as device_noise

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.3]),
    top_p=st.sampled_from([1.0, 0.7]),
    top_k=st.sampled_from([0, 1, 5]),
    seed=st.sampled_from([None, 4]),
    noise_key=st.integers(0, 2**64 - 1),
)


@triton.jit
def noise_kernel(keys, positions, scalar, tokens, ROWS: tl.constexpr, VOCAB: tl.constexpr):
    row, token = tl.arange(0, ROWS), tl.arange(0, VOCAB)
    key, position = tl.load(keys + row), tl.load(positions + row)
    tl.store(scalar + row, device_noise.uniform(key, position, 17))
    bits = device_noise.row_hash(key, position, 0)
    where = row[:, None] * VOCAB + token[None, :]
    tl.store(tokens + where, device_noise.token_uniform(bits[:, None], token[None, :]))


def test_kernel_noise_has_the_bits_of_its_twin() -> None:
    keys = torch.randint(-(2**63), 2**63 - 1, (8,), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 1, 2, 99, 4096, 131071, 2**20, 2**31 - 1])
    scalar, tokens = torch.zeros(8, dtype=torch.float64), torch.zeros(8, 1024)
    noise_kernel[1,](keys, positions, scalar, tokens, ROWS=8, VOCAB=1024)
    assert torch.equal(scalar, noise.uniform(keys, positions, 17))
    assert torch.equal(tokens, noise.token_uniforms(keys, positions, 1024))


def both(
    params: list[SamplingParams],
    gamma: int,
    vocab: int,
    rank: int,
    draft_top_k: int,
    dtype: torch.dtype,
    draft_vocab: int | None = None,
) -> tuple[BlockSample, BlockSample]:
    rng = torch.Generator().manual_seed(len(params) + gamma)
    width = draft_vocab or vocab
    base = (torch.randn(len(params), gamma, width, generator=rng) * 3).to(dtype)
    markov = None
    if rank:
        w1 = torch.randn(vocab, rank, generator=rng).to(dtype)
        markov = MarkovHead(w1, torch.randn(width, rank, generator=rng).to(dtype))
    anchors = torch.randint(0, vocab, (len(params),), generator=rng)
    positions = torch.arange(len(params)) * 1000 + 3
    d2t = torch.randperm(vocab, generator=rng)[:width] if draft_vocab else None
    sampling = DraftSampling.of(SamplingBatch.of(params))
    arguments = (base, markov, anchors, positions, sampling, draft_top_k, d2t)
    return block_sample.sample_block(*arguments), block_reference.sample_block(*arguments)


def agree(found: BlockSample, wanted: BlockSample, atol: float) -> None:
    assert torch.equal(found.draft_token_ids, wanted.draft_token_ids)
    assert torch.equal(found.q_ids[..., 0], wanted.q_ids[..., 0])
    # Equals by rounding may change places, so probabilities are compared token by token.
    order = [x.q_ids.sort(-1) for x in (found, wanted)]
    kept = [x.q_probs.gather(-1, o.indices) for x, o in zip((found, wanted), order, strict=True)]
    torch.testing.assert_close(kept[0], kept[1], atol=atol, rtol=1e-4)
    if atol < 1e-4:
        assert torch.equal(order[0].values, order[1].values)
    if wanted.markov_embeddings is None:
        assert found.markov_embeddings is None
    else:
        assert found.markov_embeddings is not None
        assert torch.equal(found.markov_embeddings, wanted.markov_embeddings)


@settings(deadline=None, max_examples=6)
@given(
    st.lists(PARAMS, min_size=1, max_size=2),
    st.integers(1, 2),
    st.sampled_from([40, 500, 512]),
    st.sampled_from([0, 5, 16]),
    st.sampled_from([1, 3, 8]),
)
def test_kernel_equals_twin_over_shapes(
    params: list[SamplingParams], gamma: int, vocab: int, rank: int, draft_top_k: int
) -> None:
    agree(*both(params, gamma, vocab, rank, draft_top_k, torch.float32), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernel_equals_twin_in_half_precision(dtype: torch.dtype) -> None:
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.4, noise_key=5)]
    found, wanted = both(params, 1, 512, 16, 8, dtype)
    assert torch.equal(found.q_ids[0], wanted.q_ids[0])
    torch.testing.assert_close(found.q_probs, wanted.q_probs, atol=2e-2, rtol=0)


def test_kernel_names_target_ids_of_a_smaller_draft_vocabulary() -> None:
    params = [SamplingParams(noise_key=1), SamplingParams(seed=2, noise_key=2)]
    agree(*both(params, 2, 500, 8, 8, torch.float32, draft_vocab=300), atol=1e-5)


def test_kernel_serves_no_rows_and_no_slots() -> None:
    for rows, gamma in ((0, 2), (2, 0)):
        found, wanted = both(
            [SamplingParams(temperature=0.0)] * rows, gamma, 64, 4, 4, torch.float32
        )
        assert found.q_ids.shape == wanted.q_ids.shape
        assert found.draft_token_ids.shape == (rows, gamma)


def test_kernel_takes_the_first_of_equal_logits() -> None:
    base = torch.zeros(1, 1, 100)
    base[0, 0, [70, 41, 90]] = 5.0
    sampling = DraftSampling.of(SamplingBatch.of([SamplingParams(temperature=0.0)]))
    one = torch.zeros(1, dtype=torch.long)
    found = block_sample.sample_block(base, None, one, one, sampling, 4)
    assert found.draft_token_ids.tolist() == [[41]]
