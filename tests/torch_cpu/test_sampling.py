"""The torch noise equals its numpy twin; processed distributions equal their definition and ignore their neighbours."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from actors.core import sampling
from actors.core.sampling import PURPOSE_ACCEPT, PURPOSE_DRAFT, SamplingParams
from kernels import noise
from kernels.reference import inverse_cdf, largest, process_logits, row_sum
from tests.torch_cpu.tiny_pair import processed

KEYS = np.random.default_rng(0).integers(0, 2**64 - 1, 6, dtype=np.uint64)
POSITIONS = np.array([0, 1, 2, 900, 2**20, 7])
TORCH_KEYS, TORCH_POSITIONS = torch.from_numpy(KEYS.view(np.int64)), torch.from_numpy(POSITIONS)


def test_scalar_draws_equal_the_numpy_twin_bit_for_bit() -> None:
    for purpose in (PURPOSE_ACCEPT, PURPOSE_DRAFT + 31):
        ours = noise.uniform(TORCH_KEYS, TORCH_POSITIONS, purpose).numpy()
        assert (ours == sampling.uniform(KEYS, POSITIONS, purpose)).all()


def test_token_uniforms_equal_the_numpy_twin_bit_for_bit() -> None:
    ours = noise.token_uniforms(TORCH_KEYS, TORCH_POSITIONS, 49_152).numpy()
    assert (
        ours == sampling.token_uniforms(KEYS, POSITIONS, np.arange(49_152, dtype=np.int32))
    ).all()


@pytest.mark.parametrize("width", [1, 2, 7, 63, 64])
def test_a_token_has_the_same_noise_in_a_support_as_in_the_vocabulary(width: int) -> None:
    """Bit for bit, logarithm included: a vectorised loop and its tail must agree."""
    support = torch.randint(
        0, 49_152, (len(KEYS), width), generator=torch.Generator().manual_seed(1)
    )
    everywhere = noise.exponential_noise(TORCH_KEYS, TORCH_POSITIONS, 49_152)
    assert torch.equal(
        noise.exponential_noise(TORCH_KEYS, TORCH_POSITIONS, support), everywhere.gather(1, support)
    )
    gumbel = noise.gumbel_noise(TORCH_KEYS, TORCH_POSITIONS, support)
    assert torch.equal(gumbel, -everywhere.gather(1, support).log())


@pytest.mark.parametrize("vocab", [3, 1000, 49_152, 151_936])
def test_the_chunked_race_equals_the_definition(vocab: int) -> None:
    probs = torch.softmax(
        torch.randn(len(KEYS), vocab, generator=torch.Generator().manual_seed(2)) * 3, -1
    )
    gumbel = noise.gumbel_noise(TORCH_KEYS, TORCH_POSITIONS, vocab)
    expected = (probs.double().log() + gumbel.double()).argmax(-1)
    assert torch.equal(noise.coupled_argmax(probs, TORCH_KEYS, TORCH_POSITIONS), expected)


@pytest.mark.parametrize("width", [1, 31, 128, 2048, 151_936, 49_152, 50_257])
def test_the_argmax_is_the_first_of_equals(width: int) -> None:
    x = torch.randint(0, 50, (6, width), generator=torch.Generator().manual_seed(width)).float()
    x[0] = -torch.inf
    x[1, width // 2] = torch.inf
    for dtype in (torch.float32, torch.bfloat16):
        first = (x == x.amax(-1, keepdim=True)).byte().argmax(-1)
        assert torch.equal(noise.first_argmax(x.to(dtype)), first)
    assert noise.first_argmax(x[:0]).shape == (0,)


def test_the_race_of_no_rows_is_empty() -> None:
    assert noise.coupled_argmax(torch.zeros(0, 5), TORCH_KEYS[:0], TORCH_POSITIONS[:0]).shape == (
        0,
    )


def test_the_race_never_picks_a_forbidden_token() -> None:
    probs = torch.zeros(20_000, 3)
    probs[:, 1] = 1e-30
    keys = torch.arange(20_000)
    assert (noise.coupled_argmax(probs, keys, torch.zeros(20_000, dtype=torch.long)) == 1).all()


@pytest.mark.parametrize("width", [5, 64, 2048, 49_152, 49_150])
@pytest.mark.parametrize("k", [1, 4, 64])
def test_largest_equals_topk(width: int, k: int) -> None:
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(k))
    k = min(k, width)
    values, index = largest(x, k)
    assert torch.equal(values, torch.topk(x, k).values)
    assert torch.equal(x.gather(1, index), values)


def test_largest_with_ties_returns_distinct_places() -> None:
    x = torch.zeros(2, 8192)
    x[0, 5000:5100] = 1.0
    values, index = largest(x, 50)
    assert (values[0] == 1).all() and all(len(set(row.tolist())) == 50 for row in index)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """torch splits a long row between threads, which is where sums may come to depend on the batch."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


CASES = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.99),
    SamplingParams(top_p=1e-6),
    SamplingParams(top_k=1),
    SamplingParams(top_k=40),
    SamplingParams(top_k=400),
    SamplingParams(top_k=10**6),
    SamplingParams(temperature=1.5, top_k=300, top_p=0.8),
    SamplingParams(temperature=3.0, top_k=300, top_p=0.3),  # few kept, but of a mass far below one
    SamplingParams(temperature=3.0, top_k=2000, top_p=0.5),
    SamplingParams(temperature=3.0, top_k=2000),
    SamplingParams(temperature=5.0, top_p=0.97),  # flat: most of the vocabulary is kept
]


def process(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    return process_logits(
        logits,
        torch.tensor([p.temperature for p in params]),
        torch.tensor([p.top_p for p in params]),
        torch.tensor([p.top_k for p in params]),
    )


def test_processed_rows_equal_the_definition_whatever_their_neighbours_want() -> None:
    logits = (
        torch.randn(
            len(CASES), 3000, generator=torch.Generator().manual_seed(3), dtype=torch.float64
        )
        * 3
    )
    ours = process(logits, CASES).numpy()
    for row, params in enumerate(CASES):
        np.testing.assert_allclose(ours[row], processed(logits[row].numpy(), params), atol=1e-12)


@pytest.mark.parametrize("vocab", [4096, 49_152])
def test_a_row_is_the_same_alone_and_in_a_batch_bit_for_bit(vocab: int, two_threads: None) -> None:
    logits = torch.randn(len(CASES), vocab, generator=torch.Generator().manual_seed(4)) * 3
    together = process(logits, CASES)
    for row, params in enumerate(CASES):
        assert torch.equal(process(logits[row : row + 1], [params])[0], together[row])


@pytest.mark.parametrize("width", [3, 512, 49_152, 50_257])
def test_a_row_sums_to_the_same_bits_alone_and_in_a_batch(width: int, two_threads: None) -> None:
    x = torch.rand(7, width, generator=torch.Generator().manual_seed(5))
    sums = row_sum(x)
    torch.testing.assert_close(sums.double(), x.double().sum(-1), rtol=1e-5, atol=0)
    for row in range(7):
        assert torch.equal(row_sum(x[row : row + 1])[0], sums[row])


def test_tokens_that_tie_with_the_last_one_kept_are_kept() -> None:
    probs = process(torch.tensor([[2.0, 1.0, 1.0, 0.0]]), [SamplingParams(top_k=2)])
    assert (probs[0] > 0).tolist() == [True, True, True, False]


def test_a_forbidden_token_has_no_probability() -> None:
    probs = process(torch.tensor([[0.0, -torch.inf, 1.0]]), [SamplingParams(top_p=0.999)])
    assert probs[0, 1] == 0 and probs.sum() == pytest.approx(1.0)


def test_a_tiny_temperature_is_an_argmax_and_finite() -> None:
    probs = process(torch.tensor([[30.0, 29.0, -40.0]]), [SamplingParams(temperature=1e-30)])
    assert probs.tolist() == [[1.0, 0.0, 0.0]]


def test_the_inverse_cdf_steps_at_the_cumulated_weights_and_skips_zeros() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 3.0, 0.0]]).repeat(6, 1)
    u = torch.tensor([1e-300, 0.2499999, 0.25, 0.2500001, 0.999, 1 - 2.0**-49], dtype=torch.float64)
    assert inverse_cdf(weights, u).tolist() == [1, 1, 3, 3, 3, 3]
