"""What a person reads is complete: settings say their unit, presets explain themselves, the map shows real rooms."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic.fields import FieldInfo

from configs.load import PRESETS_DIR, describe, preset_names
from configs.schema import ClusterConfig

SETTINGS = [(name, info) for name, _, info in describe(ClusterConfig())]
# What a number may count or measure. A new word belongs here only if a reader knows at once what one of it is.
UNITS = (
    "token", "second", "thread", "cpus", "gpus", "actors", "requests", "replicas", "steps", "port",
    "probability", "relative gain", "strings", "bytes", "ranks", "experts", "streams", "rounds", "attempts",
)  # fmt: skip


@pytest.mark.parametrize(("name", "info"), SETTINGS, ids=[name for name, _ in SETTINGS])
def test_every_setting_is_described_with_its_unit(name: str, info: FieldInfo) -> None:
    text = info.description or ""
    assert len(text) > 10, f"{name} has no description"
    assert text.endswith("."), f"{name}: a description is a sentence"
    kinds = get_args(info.annotation) or (info.annotation,)
    if int in kinds or float in kinds:
        assert any(unit in text.lower() for unit in UNITS), f"{name}: {text!r} names no unit"


def test_every_section_is_described() -> None:
    for name, info in ClusterConfig.model_fields.items():
        assert info.description, f"section {name} has no description"


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_says_what_it_is_for(name: str) -> None:
    text = (PRESETS_DIR / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# ")


def test_the_map_shows_only_what_exists(root: Path) -> None:
    text = (root / "docs" / "map.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w.\-]+/[\w./\-]*)`", text)
    assert len(named) > 10
    missing = [name for name in named if not (root / name).exists()]
    assert not missing, f"docs/map.md names {missing}"
