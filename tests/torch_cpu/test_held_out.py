"""Held-out text that ships: ids only, features computed again, for its own target alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.engine.training.dataset import OnPolicyDataset
from actors.engine.training.frozen_target import FrozenTarget
from actors.engine.training.held_out import limited, read_text, with_features, write_text
from actors.engine.weights import CheckpointError
from configs.machine import multiplies_bfloat16
from tests.torch_cpu.rank_engines import HIDDEN, VOCAB, write_tiny_llama
from tests.torch_cpu.training_shards import shards

TAPS = (0, 2)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    write_tiny_llama(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def text(tmp_path: Path, target: Path) -> Path:
    roots = [shards(tmp_path / f"t{at}", 4, VOCAB, HIDDEN, temperature=at) for at in (0.0, 1.0)]
    assert write_text(roots, target, tmp_path / "text") == 16
    return tmp_path / "text"


def test_the_text_is_read_as_written_and_an_answer_is_there_once(
    text: Path, tmp_path: Path, target: Path
) -> None:
    answers = read_text(text)
    data = OnPolicyDataset(tmp_path / "t1.0")
    for record in data.records:
        own = next(a for a in answers if (a.record_id, a.temperature) == (record.record_id, 1.0))
        assert torch.equal(own.ids, data.read(record)["ids"])
        assert (own.domain, own.prompt_len) == (record.domain, record.prompt_len)
    twice = [tmp_path / "t1.0", tmp_path / "t1.0"]
    assert write_text(twice, target, tmp_path / "again") == 8
    assert {p.name for p in text.iterdir()} == {"text.json", "text.safetensors"}


def test_features_are_the_targets_own(text: Path, target: Path, tmp_path: Path) -> None:
    root = with_features(text, target, TAPS, cache=tmp_path / "cache")
    data = OnPolicyDataset(root)
    dtype = torch.bfloat16 if multiplies_bfloat16() else torch.float32
    frozen = FrozenTarget(target, TAPS, dtype, 64)
    for record in data.records[:3]:
        parts = data.read(record)
        ids = parts["ids"][None, :-1]
        seen = frozen.forward(ids, torch.zeros(1, dtype=torch.long), frozen.new_rows(1), 0)
        torch.testing.assert_close(parts["taps"], seen.taps[0].bfloat16())
        rows = slice(record.prompt_len - 1, None)
        lse = frozen.head(parts["hidden"][rows].to(dtype)).float().logsumexp(-1)
        torch.testing.assert_close(parts["lse"][rows], lse)


def test_features_are_computed_once_and_only_as_many_as_asked_for(
    text: Path, target: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    root = with_features(text, target, TAPS, per_domain=1, cache=cache)
    assert len(OnPolicyDataset(root).records) == 4  # two domains, two temperatures
    first = sorted(p.name for p in root.iterdir())
    assert with_features(text, target, TAPS, per_domain=1, cache=cache) == root
    assert sorted(p.name for p in root.iterdir()) == first
    with_features(text, target, TAPS, cache=cache)
    ids = [(r.record_id, r.temperature) for r in OnPolicyDataset(root).records]
    assert len(ids) == len(set(ids)) == 16
    assert with_features(text, target, (1,), per_domain=1, cache=cache) != root


def test_text_of_another_target_is_refused(text: Path, target: Path, tmp_path: Path) -> None:
    weights = load_file(target / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 0.5
    save_file(weights, target / "model.safetensors")
    with pytest.raises(CheckpointError, match="another target"):
        with_features(text, target, TAPS, cache=tmp_path / "cache")


def test_a_limit_counts_each_domain_and_temperature(text: Path) -> None:
    kept = limited(read_text(text), 2)
    counts: dict[tuple[str, float], int] = {}
    for answer in kept:
        key = (answer.domain, answer.temperature)
        counts[key] = counts.get(key, 0) + 1
    assert set(counts.values()) == {2}
    assert len(counts) == 4
