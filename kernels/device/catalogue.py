"""Every kernel in the shapes it is launched with, for the sm_90 report: Qwen3-8B-like heads, V = 151936, bf16."""

from __future__ import annotations

from kernels.device import acceptance, attention, block_sample, budget, experts, rope_store
from kernels.paged_attention import KEY_BLOCK
from kernels.sm90 import Variant


def variants() -> list[Variant]:
    """The catalogue. A kernel that is missing here is caught by a test."""
    return [
        *_attention(),
        *_block_sample(),
        *_acceptance(),
        *_budget(),
        *_experts(),
        *_rope_store(),
    ]


def _attention() -> list[Variant]:
    made = []
    for name, rows, dtype, more in (
        ("prefill and rounds, bf16, wide tile", 64, "bf16", {}),
        ("rounds, bf16, splits", 64, "bf16", {"SPLIT": True}),
        ("decode, bf16, small tile, splits", 16, "bf16", {"SPLIT": True}),
        ("window, fp16", 64, "fp16", {"WINDOWED": True}),
        ("one token a block, bf16", 64, "bf16", {"BLOCK_SIZE": 1}),
        ("drafts, a row a block, bf16", 32, "bf16", {"BLOCK_SIZE": 4096, "SPLIT": True}),
        ("fp32, head 64", 16, "fp32", {"DIM": 64, "DIM_BLOCK": 64}),
    ):
        constants = {
            "GROUP": 4, "KV_HEADS": 8, "DIM": 128, "DIM_BLOCK": 128, "ROWS": rows, "KEYS": KEY_BLOCK,
            "BLOCK_SIZE": 16, "WINDOWED": False, "SPLIT": False, "WIDEN": False,
        }  # fmt: skip
        made.append(
            Variant(
                f"attention: {name}",
                attention.attend_kernel,
                f"*{dtype} *{dtype} *{dtype} *i32 *i32 *i32 *{dtype} *fp32 *fp32 i32 i32 i32 i32 i32",
                constants | more,
                max_registers=255,
                wants=("wgmma",) if rows >= 64 and dtype != "fp32" else (),
            )
        )
    joining = {"HEADS": 32, "DIM": 128, "DIM_BLOCK": 128, "WINDOWED": False}
    types = "*fp32 *fp32 *i32 *bf16 i32 i32 i32"
    made.append(
        Variant("attention: join splits", attention.join_splits_kernel, types, joining, num_warps=1)
    )
    return made


def _block_sample() -> list[Variant]:
    rank = {"RANK": 256, "HAS_BIAS": True}
    stream = {"RANK_TILE": 64, "ROWS": 16, "TOKENS": 128, "BLOCK": 32, "WIDEN": False}
    law = {"HAS_MAP": False, "HAS_DRAWS": False, "TRUNCATES": True, "COUPLED": True}
    sizes = {"GATHER_RANK": 16, "RANK_BLOCK": 256, "BLOCK": 32}
    types = "*bf16 i32 *i32 *bf16 *bf16 *i64 i32 *i64 *fp32 *fp32 *i64 *i64 *i64 *i64 *fp64"
    types += " *i64 *i64 *fp32 *bf16 i32 i32 i32 i32 i32"
    return [
        Variant(
            "block sample: choose 64 of 8192 blocks",
            block_sample.choose_blocks_kernel,
            "*fp32 *i32 i32",
            {"MAXIMA": 8192, "TOP": 64},
            num_warps=8,
        ),
        Variant(
            "block sample: maxima, rank 256",
            block_sample.block_maxima_kernel,
            "*bf16 i32 *bf16 *bf16 *i64 i32 *fp32 i32 i32 i32",
            stream | rank,
        ),
        *(
            Variant(
                f"block sample: draw, {name}",
                block_sample.draw_kernel,
                types,
                sizes | rank | law | {"TOP": top} | more,
                num_warps=8,
                max_registers=255,
            )
            for name, top, more in (
                ("top 64", 64, {}),
                ("greedy", 2, {"TRUNCATES": False, "COUPLED": False}),
            )
        ),
    ]


def _acceptance() -> list[Variant]:
    law = "*bf16 *i64 *i64 *fp32 *i64 *i64 *fp32 *i64 i32"
    reject = (
        "*bf16 *i64 *i64 *i64 *i64 *i64 *i64 *fp32 *i64 *i64 *fp32 *fp64 *fp64 i32 *fp32 *i64 *i64"
    )
    sizes = {"SLOTS": 8, "SUPPORT": 64, "HAS_DRAWS": False, "TILE": 1024}
    made = [
        Variant(
            "acceptance: row statistics, truncating",
            acceptance.row_stats_kernel,
            "*bf16 *i64 *i64 *fp32 *fp32 *i64 *fp32 i32",
            {"TRUNCATES": True, "TILE": acceptance.VOCAB_TILE},
            num_warps=8,
        ),
        Variant(
            "acceptance: distributions",
            acceptance.probs_kernel,
            "*bf16 *fp32 *fp32 *fp32 i32",
            {"TILE": acceptance.VOCAB_TILE},
            num_warps=8,
        ),
        Variant(
            "acceptance: equality",
            acceptance.accept_equal_kernel,
            "*i64 *i64 *i64 *i64 *i64 *i64 *i64 i32",
            {"SLOTS": 8},
            num_warps=1,
        ),
        Variant(
            "acceptance: rejection, recovered and bonus",
            acceptance.accept_reject_kernel,
            f"{reject} i32 i32 i32",
            sizes,
            num_warps=8,
            max_registers=255,
        ),
    ]
    for name, coupled in (("greedy", False), ("coupled", True)):
        constants = {"COUPLED": coupled, "TILE": acceptance.COUPLED_TILE}
        kernel = acceptance.emit_kernel
        made.append(Variant(f"acceptance: emit, {name}", kernel, law, constants, num_warps=8))
    return made


def _budget() -> list[Variant]:
    return [
        Variant(
            "budget: survivals",
            budget.survivals_kernel,
            "*fp32 *i1 *fp32 i32 i32",
            {"ROWS": budget.ROW_TILE},
        ),
        Variant(
            "budget: verify lengths of 1024 requests",
            budget.allocate_kernel,
            "*fp32 *i64 *i64 *fp32 *i64 i32 i32",
            {"ROWS": 1024, "SLOTS": 8},
            num_warps=8,
            max_registers=255,
        ),
    ]


def _experts() -> list[Variant]:
    grouped = {
        "EXPERTS": 128, "ROWS": experts.ROW_TILE, "OUT": experts.OUT_TILE, "IN": experts.IN_TILE,
        "WIDEN": False, "WIDTH_IN": 2048, "WIDTH_OUT": 768,
    }  # fmt: skip
    products = [
        Variant(
            f"experts: grouped product, {name}",
            experts.grouped_kernel,
            "*bf16 *bf16 *bf16 *i64 *bf16 i32",
            grouped | {"GATED": gated},
            num_stages=3,
            wants=("wgmma",),
        )
        for name, gated in (("gated", True), ("plain", False))
    ]
    return [
        *products,
        Variant(
            "experts: sort",
            experts.sort_kernel,
            "*i64 *i64 *i64 *i64 i32 i32",
            {"TILE": experts.COPY_TILE},
        ),
        Variant(
            "experts: permute",
            experts.gather_kernel,
            "*bf16 *i64 *bf16 i32",
            {"TILE": experts.WIDTH_TILE},
        ),
        Variant(
            "experts: combine",
            experts.combine_kernel,
            "*bf16 *bf16 *i64 *bf16 i32",
            {"TOP_K": 8, "TILE": experts.WIDTH_TILE},
        ),
    ]


def _rope_store() -> list[Variant]:
    sizes = {"HEADS": 32, "KV_HEADS": 8, "HALF": 64, "HALF_BLOCK": 64}
    return [
        Variant(
            f"norm, rotation and K/V write, {name}",
            rope_store.rope_store_kernel,
            "*bf16 *fp32 *fp32 *i64 *i64 *bf16 *bf16 i32 fp32 fp32",
            sizes | {"HAS_NORM": has_norm},
            num_warps=1,
        )
        for name, has_norm in (("q and k norms", True), ("no norms", False))
    ]
