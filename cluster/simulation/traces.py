"""Where confidences come from: recorded rounds, or synthetic ones with given means, spread and persistence.

A request walks along its tenant's trace from a place of its own, one row a round. Its walk is the same under every
policy, so policies are compared on equal drafts. Confidences are calibrated: a token of confidence c, given those
before it, is accepted with probability c.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cluster.console import CommandError
from cluster.simulation.scenario import Acceptance

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

TRACE_ROUNDS = 1 << 14
_STRIDE = 7919  # a prime: walks of neighbouring requests start far apart


@dataclass(frozen=True)
class Trace:
    confidences: Float32  # [rounds, gamma]
    survivals: Float32  # [rounds, gamma]
    luck: Float32  # [rounds, gamma] uniform: a token is accepted when luck < confidence

    @classmethod
    def of(cls, confidences: Float32, rng: np.random.Generator) -> Trace:
        survivals = np.cumprod(confidences, axis=1, dtype=np.float32)
        return cls(confidences, survivals, rng.random(confidences.shape, dtype=np.float32))

    def rows(self, request_ids: Int64, rounds: Int64) -> Int64:
        """The row of each request in its present round."""
        rows: Int64 = (request_ids * _STRIDE + rounds) % len(self.confidences)
        return rows


def build(acceptance: Acceptance, gamma: int, seed: int) -> Trace:
    """The trace of one tenant.

    Raises:
        CommandError: a trace file that cannot be used.
    """
    rng = np.random.default_rng(seed)
    if acceptance.trace:
        return Trace.of(_recorded(acceptance.trace, gamma), rng)
    return Trace.of(_synthetic(acceptance, gamma, rng), rng)


def _recorded(name: str, gamma: int) -> Float32:
    path = Path(name)
    if not path.is_file():
        raise CommandError(f"trace = {name!r}: no such file; give a .npy of [rounds, gamma]", 2)
    values = np.load(path)
    if values.ndim != 2 or values.shape[1] < gamma or not len(values):
        raise CommandError(
            f"trace = {name!r}: shape {values.shape}; it needs [rounds, {gamma}] or wider", 2
        )
    if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= 1):
        raise CommandError(f"trace = {name!r}: confidences must lie in 0..1", 2)
    confidences: Float32 = values[:, :gamma].astype(np.float32)
    return confidences


def _synthetic(acceptance: Acceptance, gamma: int, rng: np.random.Generator) -> Float32:
    """Beta confidences about the mean of their domain; persistence keeps a request's luck from round to round."""
    means = np.array(acceptance.means, np.float64)
    if means.ndim != 2 or not means.size or means.min() <= 0 or means.max() >= 1:
        raise CommandError("means: give rows of numbers between 0 and 1, one row a domain", 2)
    if means.shape[1] < gamma:  # the last position continues
        means = np.concatenate(
            [means, np.repeat(means[:, -1:], gamma - means.shape[1], axis=1)], axis=1
        )
    shares = np.array(acceptance.shares or [1.0] * len(means))
    counts = np.round(shares / shares.sum() * TRACE_ROUNDS).astype(int)
    parts = []
    for mean, count in zip(means[:, :gamma], counts, strict=True):
        concentration = acceptance.concentration
        drawn = rng.beta(mean * concentration, (1 - mean) * concentration, (count, gamma))
        parts.append(_persistent(drawn, acceptance.persistence, rng))
    rows = np.concatenate(parts)  # a domain is a stretch: a request mostly stays in its own
    confidences: Float32 = np.clip(rows, 0.0, 1.0).astype(np.float32)
    return confidences


def _persistent(drawn: Float64, persistence: float, rng: np.random.Generator) -> Float64:
    """The same values in an order in which each column follows a slowly moving rank (its law does not change)."""
    if not persistence or not len(drawn):
        return drawn
    noise = rng.normal(size=drawn.shape)
    level = np.empty_like(noise)
    level[0] = noise[0]
    for at in range(1, len(noise)):
        level[at] = persistence * level[at - 1] + np.sqrt(1 - persistence**2) * noise[at]
    order = level.argsort(axis=0).argsort(axis=0)
    result: Float64 = np.take_along_axis(np.sort(drawn, axis=0), order, axis=0)
    return result
