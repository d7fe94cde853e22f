"""Hugging Face model directories: `config.json` and safetensors, read with named errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
HASHED_BYTES = 1 << 20  # of both ends of a weight file: a hub model would take minutes in full


class CheckpointError(ValueError):
    """A model directory cannot be used; the message names the file or tensor and the remedy."""


def read_config(model_dir: Path) -> dict[str, Any]:
    """Return the parsed `config.json` of `model_dir`.

    Raises CheckpointError when the file is absent, not JSON, or not a JSON object.
    """
    path = model_dir / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; point at a Hugging Face model directory")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(config).__name__}")
    return config


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a model directory by name, read lazily; sharded or single-file.

    Iterating yields names in file order. Reading a name loads that tensor only, in the dtype
    stored; nothing is kept, so two reads give two tensors.
    """

    def __init__(self, model_dir: Path) -> None:
        """Index `model_dir`; raise CheckpointError when its safetensors are absent or broken."""
        self.model_dir = model_dir
        self._handles: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        for path in _tensor_files(model_dir):
            try:
                handle = safe_open(path, framework="pt")
            except Exception as error:  # safetensors raises its own untyped errors
                raise CheckpointError(
                    f"{path} cannot be read ({error}); download it again"
                ) from error
            self._handles[path] = handle
            for name in handle.keys():  # noqa: SIM118 - safe_open is not a mapping
                self._file_of[name] = path

    def __getitem__(self, name: str) -> Tensor:
        """Return the tensor called `name`; raise CheckpointError when there is none."""
        if name not in self._file_of:
            raise CheckpointError(
                f"tensor {name!r} is missing from {self.model_dir}; "
                "the checkpoint does not fit its config.json"
            )
        tensor: Tensor = self._handles[self._file_of[name]].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def __contains__(self, name: object) -> bool:
        # Mapping's default looks a name up with [] and expects KeyError.
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of `name` without reading its data."""
        if name not in self._file_of:
            self[name]  # raises with the full message
        return tuple(self._handles[self._file_of[name]].get_slice(name).get_shape())

    def part(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Return entries start to stop of `name` along `dim` (0 or 1); the others are not read."""
        if name not in self._file_of:
            self[name]  # raises with the full message
        stored = self._handles[self._file_of[name]].get_slice(name)
        tensor: Tensor = stored[start:stop] if dim == 0 else stored[:, start:stop]
        return tensor

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return `name` as `dtype` after checking its shape; raise CheckpointError otherwise."""
        tensor = self[name]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"tensor {name!r} in {self.model_dir} has shape {list(tensor.shape)}, "
                f"config.json asks for {list(shape)}"
            )
        return tensor.to(dtype)


class ModelTensors:
    """Checkpoint tensors with their shape checked, in the dtype and on the device of the model."""

    def __init__(
        self, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._tensors, self._dtype, self._device = tensors, dtype, device

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor `name` of `shape`."""
        tensor = self._tensors[name]
        self._check(name, tuple(tensor.shape), shape)
        return tensor.to(device=self._device, dtype=self._dtype)

    def take_part(self, name: str, dim: int, start: int, stop: int, *shape: int) -> Tensor:
        """Entries start to stop along `dim` of the tensor `name`, which is of `shape`; of a file no more is read."""
        if stop - start == shape[dim] or not isinstance(self._tensors, Checkpoint):
            return self.take(name, *shape).narrow(dim, start, stop - start)
        self._check(name, self._tensors.shape(name), shape)
        part = self._tensors.part(name, dim, start, stop)
        return part.to(device=self._device, dtype=self._dtype)

    def _check(self, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if found != wanted:
            raise CheckpointError(
                f"tensor {name!r} has shape {list(found)}, config.json asks for {list(wanted)}; "
                "the two are of different models"
            )


def check_names(checkpoint: Mapping[str, Tensor], wanted: set[str], optional: set[str]) -> None:
    """Refuse a checkpoint that lacks a `wanted` tensor or has one in neither set.

    Raises CheckpointError naming every offender, missing ones first.
    """
    present = set(checkpoint)
    missing = sorted(wanted - present)
    extra = sorted(present - wanted - optional)
    problems = [f"missing {name!r}" for name in missing] + [
        f"unexpected {name!r}" for name in extra
    ]
    if problems:
        raise CheckpointError(
            "checkpoint and config.json disagree: "
            + ", ".join(problems[:8])
            + (f" and {len(problems) - 8} more" if len(problems) > 8 else "")
        )


def embedding_tables(model_dir: Path, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the target's (embed, output head), each [V, d]; the same tensor when tied."""
    weights = Checkpoint(model_dir)
    embed = weights["model.embed_tokens.weight"].to(dtype)
    head = weights["lm_head.weight"].to(dtype) if "lm_head.weight" in weights else embed
    return embed, head


def telling_bytes(folder: Path) -> Iterator[bytes]:
    """Yield what tells the weights of `folder` from others: each file's name and size, first and last megabyte."""
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        yield f"{path.name} {size}".encode()
        with path.open("rb") as stream:
            yield stream.read(HASHED_BYTES)
            stream.seek(max(0, size - HASHED_BYTES))
            yield stream.read()


def _tensor_files(model_dir: Path) -> list[Path]:
    """Return the safetensors files of `model_dir`, in the order of its index."""
    index = model_dir / INDEX_FILE
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8")).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index} has no 'weight_map' object; download it again")
        files = [model_dir / name for name in dict.fromkeys(weight_map.values())]
    else:
        files = [model_dir / SINGLE_FILE]
    for path in files:
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist; fetch the model's safetensors again")
    return files
