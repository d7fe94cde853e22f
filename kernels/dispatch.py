"""Which implementation of an operation runs: a Triton kernel where one is registered for the device, else the twin.

Chosen once per (operation, device type). There is no switch: a kernel that is registered is tested against its twin,
and `implementation` says which one runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

from kernels import block_reference, reference

Op = Literal["verify", "sample_block", "process_logits"]

_REFERENCE: dict[Op, Callable[..., Any]] = {
    "verify": reference.verify,
    "sample_block": block_reference.sample_block,
    "process_logits": reference.process_logits,
}
_TRITON: dict[
    tuple[Op, str], Callable[[], Callable[..., Any]]
] = {}  # loaders, so that triton is imported late


def implementation(op: Op, device_type: str) -> Literal["triton", "reference"]:
    """What runs `op` on this type of device."""
    return "triton" if (op, device_type) in _TRITON else "reference"


@cache
def chosen(op: Op, device_type: str) -> Callable[..., Any]:
    """The function that runs `op` on this type of device."""
    loader = _TRITON.get((op, device_type))
    return loader() if loader else _REFERENCE[op]
