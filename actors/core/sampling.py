"""Sampling parameters, and random numbers keyed by position instead of by history.

A request is sampled by one of three laws (contract C1):

* greedy (temperature 0): the argmax of the processed logits;
* `rejection` (the default above temperature 0): speculative sampling with fresh, per-request randomness;
* `coupled` (chosen whenever the request has a `seed`): target and drafter share Gumbel noise keyed by
  (seed, absolute position), so that the output is a pure function of prompt, parameters and seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RULE_GREEDY, RULE_REJECTION, RULE_COUPLED = 0, 1, 2


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
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    noise_key: int = 0
    speculation: bool = True

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
