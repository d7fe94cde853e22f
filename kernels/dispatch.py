"""Which implementation of an operation runs: the Triton kernel on CUDA where Triton is installed, else the twin.

Decided once per operation and type of device. There is no switch: every kernel is tested against its twin, and
`describe` says which runs. Both sides are imported late, so that a machine without Triton never misses it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, get_args

Op = Literal[
    "verify",
    "process_logits",
    "sample_block",
    "survivals",
    "allocate",
    "attend_paged",
    "rope_store",
    "permutation",
    "permute",
    "combine",
    "grouped_linear",
]

# op: (module of the twin, module of the kernel); the function is named like the operation in both
_MODULES: dict[Op, tuple[str, str]] = {
    "verify": ("kernels.reference", "kernels.device.acceptance"),
    "process_logits": ("kernels.reference", "kernels.device.acceptance"),
    "sample_block": ("kernels.block_reference", "kernels.device.block_sample"),
    "survivals": ("kernels.survival", "kernels.device.budget"),
    "allocate": ("kernels.survival", "kernels.device.budget"),
    "attend_paged": ("kernels.paged_attention", "kernels.device.attention"),
    "rope_store": ("kernels.rope_store", "kernels.device.rope_store"),
    "permutation": ("kernels.token_permute", "kernels.device.experts"),
    "permute": ("kernels.token_permute", "kernels.device.experts"),
    "combine": ("kernels.token_permute", "kernels.device.experts"),
    "grouped_linear": ("kernels.grouped_gemm", "kernels.device.experts"),
}
OPS: tuple[Op, ...] = get_args(Op)


@cache
def triton_version() -> str | None:
    """The Triton that is installed, or None."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def implementation(op: Op, device_type: str) -> Literal["triton", "reference"]:
    """What runs `op` on this type of device."""
    assert op in _MODULES
    return "triton" if device_type == "cuda" and triton_version() else "reference"


@cache
def chosen(op: Op, device_type: str) -> Callable[..., Any]:
    """The function that runs `op` on this type of device."""
    twin, kernel = _MODULES[op]
    module = kernel if implementation(op, device_type) == "triton" else twin
    function: Callable[..., Any] = getattr(import_module(module), op)
    return function


def describe(device_type: str) -> str:
    """One line for the log at start: what computes on this type of device, and how to change that."""
    if device_type != "cuda":
        return f"kernels on {device_type}: torch"
    found = triton_version()
    if found is None:
        return "kernels on cuda: torch, several times slower; install Triton: pip install 'dspark-cluster[gpu]'"
    return f"kernels on cuda: Triton {found}"
