"""Tokens sorted by the expert they go to, and back. No token is ever dropped: there is no capacity."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Permutation(NamedTuple):
    """B tokens with k experts each, as B * k copies sorted by expert; equal experts keep the order of tokens."""

    token_of_copy: Tensor  # [B * k]
    place_of_copy: Tensor  # [B * k] where copy b * k + j went
    counts: Tensor  # [num_experts] copies of each expert


def permutation(expert_ids: Tensor, num_experts: int) -> Permutation:
    """Sort the copies of a routing decision expert_ids [B, k]."""
    flat = expert_ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    counts = torch.bincount(flat, minlength=num_experts)
    return Permutation(order // expert_ids.shape[1], places, counts)


def combine(copies: Tensor, weights: Tensor, permutation: Permutation) -> Tensor:
    """Sum of each token's copies [B * k, d], weighted by weights [B, k], always in the order of its k experts.

    Products and sums are in fp32, rounded once to the copies' dtype.
    """
    back = copies.index_select(0, permutation.place_of_copy).view(*weights.shape, copies.shape[1])
    return in_order(back.float() * weights.float()[:, :, None]).to(copies.dtype)


def in_order(terms: Tensor) -> Tensor:
    """The sum of terms [B, k, d] over k, term after term: the same bits however many tokens there are."""
    total = terms[:, 0].clone()
    for j in range(1, terms.shape[1]):
        total += terms[:, j]
    return total


def permute(tokens: Tensor, order: Permutation) -> Tensor:
    """Rows of tokens [B, d] as copies [B * k, d], sorted by expert."""
    return tokens.index_select(0, order.token_of_copy)
