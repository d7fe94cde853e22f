"""`dspark evaluate --switches`: on a tiny target, and what the simulation makes of traffic whose truth is known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from actors.core.calibration import ece
from actors.core.evidence import to_probability
from actors.core.online_calibration import OnlineCalibration
from actors.engine.drafters.checkpoint import save_drafter
from actors.engine.training import switches
from actors.engine.training.replay import Blocks
from actors.engine.training.switches import Walk
from cluster.cli import main
from tests.torch_cpu.rank_engines import HIDDEN, VOCAB, write_tiny_llama
from tests.torch_cpu.tiny_drafters import every_config, random_model
from tests.torch_cpu.training_shards import shards

GAMMA = 3


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "STEADY_STEPS", 20)
    monkeypatch.setattr(switches, "STEPS_BEFORE", 20)
    monkeypatch.setattr(switches, "MEASURED_AT", (0, 2, 6))
    monkeypatch.setattr(switches, "NUM_SEEDS", 1)


def run(work: Path, *more: str) -> int:
    settings = [f"model.path={work / 'target'}", f"model.drafter={work / 'dspark'}"]
    chosen = [part for setting in settings for part in ("--set", setting)]
    return main(["evaluate", *chosen, "--work", str(work), *more])


def test_every_ordered_pair_of_domains_is_switched_under_each_rule(
    tmp_path: Path, quickly: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "target").mkdir()
    write_tiny_llama(tmp_path / "target")
    for split, at in (("held_out", 0.0), ("held_out_t1", 1.0)):
        shards(tmp_path / split, 4, VOCAB, HIDDEN, temperature=at)
    config = every_config(
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        draft_vocab_size=30,
        block_size=GAMMA,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HIDDEN // 4,
    )["vanilla"]
    save_drafter(random_model(config, std=0.1), tmp_path / "dspark")
    assert run(tmp_path, "--switches", "odd", "--json") == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["gamma"], report["answers"]) == (GAMMA, "odd")
    assert set(report["switches"]) == {"greedy", "rejection"}
    for found in report["switches"].values():
        assert [(each["from"], each["to"]) for each in found["each"]] == [
            ("code", "math"),
            ("math", "code"),
        ]
        assert np.shape(found["error"]) == (3, GAMMA)
        assert found["steady_steps"] == 40
    assert run(tmp_path, "--switches", "--temperature", "0") == 0
    assert "greedy, 2 switches" in capsys.readouterr().out
    assert run(tmp_path, "--switches", "--set", "model.drafter=ngram") == 2
    assert "has no weights" in capsys.readouterr().err


def walks(shift: float, seed: int, count: int = 40) -> list[Walk]:
    """Answers of 60 rounds of a drafter whose confidences are off by `shift`."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        truth = rng.normal(0, 1, (60, GAMMA))
        happened = rng.random((60, GAMMA)) < to_probability(truth)
        confidences = to_probability(truth - shift).astype(np.float32)
        found.append(Walk(confidences, happened.cumprod(axis=1).sum(axis=1)))
    return found


def test_a_switch_that_miscalibrates_shows_and_is_mended() -> None:
    pools = {"a": walks(0.0, 0), "b": walks(-0.9, 1)}
    found = switches.switch(pools, "a", "b", 0, OnlineCalibration)
    assert found.errors[0].max() > 0.1
    assert found.errors[-1].max() < 0.03
    assert found.first_alarm < 100
    assert (found.raw >= found.errors).all()
    assert found.num_rounds == 40 * 60
    calm = switches.switch(pools, "a", "a", 0, OnlineCalibration)
    assert calm.errors.max() < 0.03
    assert calm.first_alarm == float("inf")


def test_of_exact_forecasts_most_of_the_noise_is_taken_out_and_of_wrong_ones_little_else() -> None:
    rng = np.random.default_rng(0)
    survival = rng.random(3000)
    labels = [rng.random(3000) < survival for _ in range(20)]
    noise = np.mean([ece(survival, happened, switches.NUM_BINS) for happened in labels])
    left = np.mean([switches.denoised_error(survival, happened) for happened in labels])
    assert left < 0.55 * noise
    assert switches.denoised_error(survival, rng.random(3000) < survival * 0.8) > 0.08


def test_blocks_are_cut_to_gamma_and_those_beyond_the_text_left_out() -> None:
    prefix = np.array([[1, 1, 1], [0, 0, 0], [1, 0, 0], [0, 0, 0], [1, 1, 0], [0, 0, 0]], np.bool_)
    inside = np.arange(6)[:, None] + np.arange(3) < 6
    blocks = Blocks(prefix.astype(float), prefix, inside, np.zeros((6, 3), np.float32))
    rows, accepted = switches.visited(blocks, 2)
    assert rows == [0, 3, 4]
    assert accepted.tolist() == [2, 0, 2]
