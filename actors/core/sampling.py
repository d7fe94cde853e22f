"""Sampling parameters, and random numbers keyed by position instead of by history.

A request is sampled by one of three laws (contract C1):

* greedy (temperature 0): the argmax of the processed logits;
* `rejection` (the default above temperature 0): speculative sampling with fresh, per-request randomness;
* `coupled` (chosen whenever the request has a `seed`): target and drafter share Gumbel noise keyed by
  (seed, absolute position), so that the output is a pure function of prompt, parameters and seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from actors.core.logit_rules import LogitRules, LogprobsOrder

RULE_GREEDY, RULE_REJECTION, RULE_COUPLED = 0, 1, 2

PURPOSE_TOKEN = 0  # the Gumbel noise over tokens that target and drafter share (coupled)
PURPOSE_ACCEPT = 1  # whether the draft token at this position is accepted
PURPOSE_SAMPLE = 2  # the recovered or bonus token at this position
PURPOSE_EXPLORE = 3  # whether the round that starts here is verified whole
PURPOSE_DRAFT = 16  # + k: the draft token in slot k of a block (rejection)
PURPOSE_BITS = 8
UNIFORM_BITS = 48  # of a scalar draw: few enough that u * total < total in float64


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn. Values are validated by the ingress.

    Attributes:
        temperature: 0 means greedy.
        top_p: keep the smallest set of tokens whose probability reaches it; 1 keeps all.
        top_k: keep the k most probable tokens; 0 keeps all.
        seed: the user's seed, or None.
        noise_key: 64-bit key of the request's random numbers: the seed where there is one, else drawn at random by
            the ingress once per request (so a replayed stream keeps its key).
        speculation: False asks for plain decoding of this request (verify_len always 0).
        rules: what changes the logits first; None changes nothing.
        logprobs: the log probabilities wanted; None: none.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    noise_key: int = 0
    speculation: bool = True
    rules: LogitRules | None = None
    logprobs: LogprobsOrder | None = None

    @property
    def is_special(self) -> bool:
        """Whether arrays of numbers do not say all there is to know of it; see `StepPlan.special`."""
        return self.rules is not None or self.logprobs is not None

    @property
    def rule(self) -> int:
        if self.temperature == 0.0:
            return RULE_GREEDY
        return RULE_REJECTION if self.seed is None else RULE_COUPLED


@dataclass(frozen=True)
class SamplingBatch:
    """The same, for R requests of one step, as arrays."""

    temperature: npt.NDArray[np.float32]  # [R]
    top_p: npt.NDArray[np.float32]  # [R]
    top_k: npt.NDArray[np.int32]  # [R]
    noise_key: npt.NDArray[np.uint64]  # [R]
    rule: npt.NDArray[np.int8]  # [R]

    @classmethod
    def of(cls, params: list[SamplingParams]) -> SamplingBatch:
        return cls(
            np.array([p.temperature for p in params], np.float32),
            np.array([p.top_p for p in params], np.float32),
            np.array([p.top_k for p in params], np.int32),
            np.array([p.noise_key & (2**64 - 1) for p in params], np.uint64),
            np.array([p.rule for p in params], np.int8),
        )

    def rows(self, index: npt.NDArray[np.intp] | list[int]) -> SamplingBatch:
        return SamplingBatch(
            self.temperature[index],
            self.top_p[index],
            self.top_k[index],
            self.noise_key[index],
            self.rule[index],
        )


class _KeyMix(NamedTuple):
    """64-bit mixing of (key, counter). Signed, as torch wants them."""

    first_add: int
    rounds: tuple[tuple[int, int], ...]  # x = (x ^ x >>> shift) * multiplier
    last_shift: int


class _ElementMix(NamedTuple):
    """32-bit mixing of (row hash, token id); the row hash enters in two halves, before and inside the rounds."""

    spread: int
    rounds: tuple[tuple[int, int], ...]
    last_shift: int


KEY_MIX = _KeyMix(
    first_add=-3523213507765823157,
    rounds=((32, 5097467698724206865), (29, -5695733411279296339)),
    last_shift=31,
)
ELEMENT_MIX = _ElementMix(
    spread=-656511307, rounds=((16, 1660672833), (15, -388785857), (17, -1143555411)), last_shift=15
)

_MASK_32, _MASK_64 = 2**32 - 1, 2**64 - 1


def row_hash(
    keys: npt.NDArray[np.uint64], positions: npt.ArrayLike, purpose: npt.ArrayLike
) -> npt.NDArray[np.uint64]:
    """64 mixed bits for each (key, absolute position, purpose); shapes broadcast."""
    counter = (np.asarray(positions, np.uint64) << np.uint64(PURPOSE_BITS)) + np.asarray(
        purpose, np.uint64
    )
    x = np.asarray(keys, np.uint64)
    with np.errstate(over="ignore"):
        for add in (np.uint64(KEY_MIX.first_add & _MASK_64), counter):
            x = x + add
            for shift, multiplier in KEY_MIX.rounds:
                x = (x ^ (x >> np.uint64(shift))) * np.uint64(multiplier & _MASK_64)
            x = x ^ (x >> np.uint64(KEY_MIX.last_shift))
    return x


def uniform(
    keys: npt.NDArray[np.uint64], positions: npt.ArrayLike, purpose: npt.ArrayLike
) -> npt.NDArray[np.float64]:
    """One uniform in the open interval (0, 1) for each (key, absolute position, purpose); shapes broadcast."""
    bits = row_hash(keys, positions, purpose) >> np.uint64(64 - UNIFORM_BITS)
    return (bits.astype(np.float64) + 0.5) * 2.0**-UNIFORM_BITS


def token_uniforms(
    keys: npt.NDArray[np.uint64], positions: npt.ArrayLike, token_ids: npt.NDArray[np.int32]
) -> npt.NDArray[np.float32]:
    """The uniforms behind the noise that target and drafter share, [n, m] for rows [n] and token ids [m] or [n, m]."""
    row = row_hash(keys, positions, PURPOSE_TOKEN)[:, None]
    low, high = (
        (row & np.uint64(_MASK_32)).astype(np.uint32),
        (row >> np.uint64(32)).astype(np.uint32),
    )
    with np.errstate(over="ignore"):
        x = (
            np.atleast_2d(token_ids).astype(np.uint32) * np.uint32(ELEMENT_MIX.spread & _MASK_32)
        ) ^ low
        for step, (shift, multiplier) in enumerate(ELEMENT_MIX.rounds):
            x = (x ^ (x >> np.uint32(shift))) * np.uint32(multiplier & _MASK_32)
            if step == 0:
                x = x + high
    x = (x ^ (x >> np.uint32(ELEMENT_MIX.last_shift))) & np.uint32(0x7FFFFFFF)
    u = (x.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-31)
    capped: npt.NDArray[np.float32] = np.minimum(u, np.float32(1.0 - 2.0**-24))
    return capped


def gumbel_noise(
    keys: npt.NDArray[np.uint64], positions: npt.ArrayLike, token_ids: npt.NDArray[np.int32]
) -> npt.NDArray[np.float32]:
    """Gumbel noise of each (row, token), up to the rounding of the logarithm equal to the kernels' one."""
    noise: npt.NDArray[np.float32] = -np.log(-np.log1p(-token_uniforms(keys, positions, token_ids)))
    return noise
