"""Survivals and verify lengths on the device equal the numpy decisions."""

from __future__ import annotations

import numpy as np
import torch

from actors.core import prefix_scheduler, survival
from kernels.survival import allocate, survivals


def test_survivals_equal_the_numpy_ones() -> None:
    confidences = np.random.default_rng(0).normal(0.7, 0.5, (40, 6)).astype(np.float32)
    confidences[3, 2] = np.nan
    has_proposal = np.arange(40) % 5 > 0
    ours = survivals(torch.from_numpy(confidences), torch.from_numpy(has_proposal)).numpy()
    np.testing.assert_allclose(ours, survival.survivals(confidences, has_proposal), rtol=1e-6)


def test_verify_lengths_equal_the_numpy_ones_ties_included() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        rows, gamma = int(rng.integers(1, 8)), int(rng.integers(1, 6))
        confidences = rng.choice(np.array([0.0, 0.5, 0.5, 1.0, 0.8], np.float32), (rows, gamma))
        a, caps = survival.survivals(confidences), rng.integers(0, gamma + 1, rows)
        budget, price = int(rng.integers(0, 12)), float(rng.choice([0.0, 0.3, 0.5]))
        ours = allocate(torch.from_numpy(a), budget, price, torch.from_numpy(caps))
        assert ours.tolist() == prefix_scheduler.allocate(a, budget, price, caps).tolist()
