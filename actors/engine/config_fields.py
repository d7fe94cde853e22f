"""Typed reads from a model's `config.json`: what does not fit is refused with the field's name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors.engine.weights import CheckpointError


class UnsupportedModelError(CheckpointError):
    """The model is of a kind this engine does not compute; the message names the setting."""


class ConfigFields:
    """Typed reads from `config.json`."""

    def __init__(self, raw: Mapping[str, Any], model_dir: Path) -> None:
        self._raw, self._model_dir = raw, model_dir
        self._where = model_dir / "config.json"

    def within(self, raw: Mapping[str, Any]) -> ConfigFields:
        """The same reads from a part of the file."""
        return ConfigFields(raw, self._model_dir)

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            wanted = "a positive integer" if least == 1 else f"an integer from {least} on"
            raise CheckpointError(f"{self._where}: {name}={value!r} must be {wanted}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._raw.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(f"{self._where}: {name}={value!r} must be a positive number")
        return float(value)

    def refuse(self, name: str, value: object, remedy: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._where}: {name}={value!r} is not supported; {remedy}")

    def is_sliding(self, kind: object) -> bool:
        """What an entry of `layer_types` says."""
        if kind not in ("full_attention", "sliding_attention"):
            raise self.refuse("layer_types", kind, "use full_attention or sliding_attention")
        return kind == "sliding_attention"
