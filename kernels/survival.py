"""Survivals and verify lengths on the device: the torch twin of `actors.core.survival` and `prefix_scheduler.allocate`.

For a rank whose confidences never leave the device. K and lambda come from the host and are lagged (C3).
"""

from __future__ import annotations

import torch
from torch import Tensor


def survivals(confidences: Tensor, has_proposal: Tensor) -> Tensor:
    """Prefix survivals [R, gamma] of calibrated confidences [R, gamma]; zeros where has_proposal [R] is False."""
    clean = torch.nan_to_num(confidences.float(), nan=0.0).clamp(0.0, 1.0)
    return clean.cumprod(-1) * has_proposal[:, None]


def allocate(survival: Tensor, max_draft_tokens: int, min_survival: float, caps: Tensor) -> Tensor:
    """verify_len [R] int64: the `max_draft_tokens` largest survivals of at least `min_survival` within caps [R].

    Ties go to the earlier position, then to the earlier row: two stable sorts, the flat order being position-major.
    """
    num_requests, gamma = survival.shape
    slots = torch.arange(gamma, device=survival.device)
    eligible = ((survival >= min_survival) & (slots < caps[:, None])).long().cumprod(-1).bool()
    by_position = torch.where(eligible, survival, -1.0).T.reshape(-1)
    order = torch.sort(by_position, descending=True, stable=True).indices[
        : max(max_draft_tokens, 0)
    ]
    chosen = torch.zeros(gamma * num_requests, dtype=torch.bool, device=survival.device)
    chosen[order] = True
    return (chosen.view(gamma, num_requests).T & eligible).sum(-1)
