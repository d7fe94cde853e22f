"""Drafter weights in eight bits: a matrix as whole numbers from -127 to 127 and one scale a row.

`NAME` holds int8 [rows, columns] and `NAME.row_scale` float32 [rows]; a weight is their product. What is no matrix is
bf16. Half the size of bf16 throughout, for drafters that are kept to be compared; any drafter loads from either.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from actors.engine.weights import Checkpoint, CheckpointError

SCALE = ".row_scale"
LARGEST = 127


def compress(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights as they are stored: matrices in eight bits beside their scales, the others in bf16.

    A row is scaled so that its largest weight becomes 127: no weight moves by more than half a scale.
    """
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if (
            tensor.dim() != 2 or len(tensor) == 1
        ):  # one row, as a confidence head has, is not worth it
            stored[name] = tensor.to(torch.bfloat16)
            continue
        exact = tensor.float()
        scale = exact.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / LARGEST
        stored[name] = (exact / scale[:, None]).round().to(torch.int8)
        stored[name + SCALE] = scale
    return stored


def scales_in(checkpoint: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the scales that have a tensor of theirs beside them."""
    return {n for n in checkpoint if n.endswith(SCALE) and n.removesuffix(SCALE) in checkpoint}


def take(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the weight `name` in float32, from eight bits where it is stored so.

    Raises CheckpointError naming the tensor when its shape is not `shape`, when it holds whole numbers without scales
    or has scales without need, and when scales are misshapen, not finite or negative.
    """
    stored = checkpoint[name]
    if tuple(stored.shape) != shape:
        checkpoint.take(name, shape, stored.dtype)  # raises with the full message
    has_scale = name + SCALE in checkpoint
    if stored.is_floating_point():
        if has_scale:
            raise _refused(checkpoint, name + SCALE, f"scales {name!r}, which is {stored.dtype}")
        return stored.float()
    if stored.dtype != torch.int8 or len(shape) != 2 or not has_scale:
        lacks = "" if has_scale else f" without {name + SCALE!r}"
        raise _refused(
            checkpoint, name, f"is {stored.dtype}{lacks}; eight-bit matrices need scales"
        )
    scale = checkpoint[name + SCALE]
    if scale.dtype != torch.float32 or scale.shape != stored.shape[:1]:
        found = f"{scale.dtype} {list(scale.shape)}"
        raise _refused(checkpoint, name + SCALE, f"is {found}, not torch.float32 [{shape[0]}]")
    if not bool((scale.isfinite() & (scale >= 0)).all()):
        raise _refused(checkpoint, name + SCALE, "holds scales that are negative or not finite")
    return stored.float() * scale[:, None]


def _refused(checkpoint: Checkpoint, name: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"tensor {name!r} in {checkpoint.model_dir} {why}; export the drafter again"
    )
