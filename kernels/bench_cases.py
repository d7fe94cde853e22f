"""What `kernels.bench` measures: an operation in a served shape, with the bytes and products it cannot do without.

Shapes are those of Qwen3-8B (heads 32 / 8 of 128, V = 151936) with a drafter of rank 256 and gamma 7, 64 requests over
contexts of 2048; experts are those of Qwen3-30B-A3B (128 of 2048 x 768, 8 a token).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.core.sampling import RULE_REJECTION, SamplingBatch, SamplingParams
from kernels import dispatch
from kernels.block_reference import DraftSampling, MarkovHead
from kernels.kv_store import KvStore
from kernels.paged_attention import PagedShape, paged_layout
from kernels.ragged_attention import Tiling, attend, attention_layout, ragged_rows
from kernels.reference import RuleGroup, VerifyBatch

ROWS, CONTEXT, HEADS, KV_HEADS, DIM, BLOCK = 64, 2048, 32, 8, 128, 16
VOCAB, RANK, GAMMA, TOP_K = 151936, 256, 7, 64
EXPERTS, HIDDEN, INNER, VISITED, TOKENS = 128, 2048, 768, 8, 512
Run = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One operation in one shape.

    Attributes:
        num_bytes: it must read or write at least.
        num_flops: multiplications and additions of its matrix products.
        build: device -> (kernel, twin), ready to be called again and again.
    """

    name: str
    op: dispatch.Op
    num_bytes: int
    num_flops: int
    build: Callable[[torch.device], tuple[Run, Run]]


def cases() -> list[Case]:
    """The cases, in the order of a step."""
    kv = ROWS * CONTEXT * KV_HEADS * DIM * 4
    made = [
        Case(
            f"attention, {queries} queries a row",
            "attend_paged",
            kv + 4 * ROWS * queries * HEADS * DIM,
            4 * ROWS * queries * CONTEXT * HEADS * DIM,
            partial(_attention, queries),
        )
        for queries in (1, 6)
    ]
    drafts = ROWS * GAMMA * VOCAB * 2 + GAMMA * VOCAB * RANK * 2
    logit_bytes = ROWS * (GAMMA + 1) * VOCAB * 2
    copies, weights = TOKENS * VISITED, EXPERTS * HIDDEN * INNER
    heads = HEADS + 2 * KV_HEADS
    return [
        Case("norm, rotation, K/V write", "rope_store", 4 * 384 * heads * DIM, 0, _rope_store),
        *made,
        Case("acceptance, rejection", "verify", logit_bytes, 0, lambda d: _verify(d, 1.0)),
        Case("acceptance, top-p 0.95", "verify", logit_bytes, 0, lambda d: _verify(d, 0.95)),
        Case("block sampling", "sample_block", drafts, 2 * ROWS * GAMMA * VOCAB * RANK, _draft),
        Case("verify lengths of 1024 rows", "allocate", 1024 * (GAMMA * 4 + 16), 0, _allocate),
        Case("expert sort", "permutation", 24 * copies, 0, _sort),
        Case("expert permute", "permute", 2 * (TOKENS + copies) * HIDDEN, 0, _permute),
        Case(
            "expert products, gated",
            "grouped_linear",
            4 * weights + 2 * copies * (HIDDEN + INNER),
            4 * copies * HIDDEN * INNER,
            _experts,
        ),
        Case("expert combine", "combine", 2 * (TOKENS + copies) * HIDDEN, 0, _combine),
    ]


def _pair(op: dispatch.Op, *arguments: object) -> tuple[Run, Run]:
    kernel, twin = dispatch.chosen(op, "cuda"), dispatch.chosen(op, "cpu")
    return lambda: kernel(*arguments), lambda: twin(*arguments)


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def _attention(queries: int, device: torch.device) -> tuple[Run, Run]:
    """The twin here is what a machine without Triton serves with: the padded torch products."""
    width = CONTEXT // BLOCK + 1
    store = KvStore(1, KV_HEADS, DIM, ROWS * width, BLOCK, torch.bfloat16, device)
    store.pool(0).normal_()
    tables = np.random.default_rng(0).permutation(ROWS * width).reshape(ROWS, width)
    context = np.full(ROWS, CONTEXT - queries)
    rows = ragged_rows(
        np.arange(0, ROWS * queries + 1, queries, dtype=np.int32),
        (context[:, None] + np.arange(queries)).reshape(-1).astype(np.int32),
        context.astype(np.int32),
        tables.astype(np.int32),
    )
    group = HEADS // KV_HEADS
    shape = PagedShape.fast(np.full(ROWS, queries), CONTEXT, group, KV_HEADS)
    layout = paged_layout(rows, shape, group, BLOCK, device)
    q = _random(device, ROWS * queries, HEADS, DIM) * DIM**-0.5
    kernel = dispatch.chosen("attend_paged", "cuda")
    padded = attention_layout(rows, store, group, Tiling(), q)
    keys, values = store.pool(0).chunk(2)
    return lambda: kernel(q, keys, values, layout), lambda: attend(q, store, 0, padded)


def _rope_store(device: torch.device) -> tuple[Run, Run]:
    tokens = 384
    angles = torch.rand(CONTEXT, DIM // 2, device=device)
    return _pair(
        "rope_store",
        _random(device, tokens, (HEADS + 2 * KV_HEADS) * DIM),
        torch.ones(HEADS + KV_HEADS, DIM, device=device),
        1e-6,
        torch.polar(torch.ones_like(angles), angles),
        torch.arange(tokens, device=device),
        torch.arange(tokens, device=device),
        _random(device, 2 * KV_HEADS, 4096, DIM),
        DIM**-0.5,
    )


def _draft(device: torch.device) -> tuple[Run, Run]:
    params = [SamplingParams(temperature=0.8, noise_key=row) for row in range(ROWS)]
    return _pair(
        "sample_block",
        _random(device, ROWS, GAMMA, VOCAB),
        MarkovHead(_random(device, VOCAB, RANK), _random(device, VOCAB, RANK)),
        torch.arange(ROWS, device=device),
        torch.arange(ROWS, device=device),
        DraftSampling.of(SamplingBatch.of(params), device),
        TOP_K,
    )


def _verify(device: torch.device, top_p: float) -> tuple[Run, Run]:
    width = GAMMA + 1
    index = torch.arange(ROWS, device=device)
    group = RuleGroup(
        rule=RULE_REJECTION,
        requests=index,
        logit_rows=None,
        row_start=index * width,
        request_of_row=index.repeat_interleave(width),
        decided_positions=torch.arange(ROWS * width, device=device),
        verify_len=torch.full((ROWS,), GAMMA, device=device),
        draft_token_ids=torch.randint(0, VOCAB, (ROWS, GAMMA), device=device),
        q_ids=torch.randint(0, VOCAB, (ROWS, GAMMA, TOP_K), device=device),
        q_probs=torch.rand(ROWS, GAMMA, TOP_K, device=device) / TOP_K,
        temperature=torch.ones(ROWS, device=device),
        top_p=torch.full((ROWS,), top_p, device=device),
        top_k=torch.zeros(ROWS, dtype=torch.long, device=device),
        noise_key=index,
        truncates=top_p < 1.0,
    )
    batch = VerifyBatch(ROWS, torch.arange(ROWS * width, device=device), (group,))
    return _pair("verify", _random(device, ROWS * width, VOCAB), batch)


def _allocate(device: torch.device) -> tuple[Run, Run]:
    a = torch.rand(1024, GAMMA, device=device).cumprod(-1)
    return _pair("allocate", a, 2048, 0.1, torch.full((1024,), GAMMA, device=device))


def _routing(device: torch.device) -> Tensor:
    return torch.rand(TOKENS, EXPERTS, device=device).topk(VISITED, -1).indices


def _sort(device: torch.device) -> tuple[Run, Run]:
    return _pair("permutation", _routing(device), EXPERTS)


def _permute(device: torch.device) -> tuple[Run, Run]:
    order = dispatch.chosen("permutation", "cpu")(_routing(device), EXPERTS)
    return _pair("permute", _random(device, TOKENS, HIDDEN), order)


def _combine(device: torch.device) -> tuple[Run, Run]:
    order = dispatch.chosen("permutation", "cpu")(_routing(device), EXPERTS)
    copies = _random(device, TOKENS * VISITED, HIDDEN)
    return _pair("combine", copies, _random(device, TOKENS, VISITED), order)


def _experts(device: torch.device) -> tuple[Run, Run]:
    order = dispatch.chosen("permutation", "cpu")(_routing(device), EXPERTS)
    gate, up = (_random(device, EXPERTS, INNER, HIDDEN) for _ in range(2))
    return _pair(
        "grouped_linear", _random(device, TOKENS * VISITED, HIDDEN), order.counts, gate, up
    )
