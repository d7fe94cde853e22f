"""Training of every kind of drafter: its loss, its features, exact resume, and the stages of the command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.engine.drafters.checkpoint import load_drafter, read_drafter_config
from actors.engine.drafters.config import KINDS, Kind
from actors.engine.drafters.model import DraftModel
from actors.engine.training.__main__ import main
from actors.engine.training.dataset import Drawn, OnPolicyDataset
from actors.engine.training.evaluate import Replay, acceptance, draft_blocks
from actors.engine.training.loop import Trainer, TrainingOptions
from actors.engine.training.losses import LossWeights, weights_for
from actors.engine.weights import CheckpointError
from tests.torch_cpu.rank_engines import HIDDEN, write_tiny_llama
from tests.torch_cpu.rank_engines import VOCAB as TARGET_VOCAB
from tests.torch_cpu.tiny_drafters import every_config, random_model
from tests.torch_cpu.training_shards import VOCAB, WIDTH, shards

GAMMA = 4
NAMES = list(every_config())
FINAL_NORM = torch.linspace(0.5, 2, WIDTH)


def model(name: str) -> DraftModel:
    shape = {"hidden_size": WIDTH, "vocab_size": VOCAB, "draft_vocab_size": 30, "qk_norm": True}
    small = {"intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = every_config(target_layer_ids=(0, 1), block_size=GAMMA, **shape, **small)[name]
    return random_model(config, std=0.1).requires_grad_(True)


def dataset(root: Path, name: str) -> OnPolicyDataset:
    return OnPolicyDataset(root, final_norm=FINAL_NORM if name == "mtp" else None)


def trainer(name: str, data: OnPolicyDataset, steps: int, **changes: Any) -> Trainer:
    own = model(name)
    options = {"loss": weights_for(own.config.kind, "code", own.config.block_size), **changes}
    sizes = {"warmup_steps": 2, "num_sequences": 4, "num_anchors": 6}
    return Trainer(own, data, TrainingOptions(steps, bf16=False, **sizes, **options))


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, name: str) -> None:
    data = dataset(shards(tmp_path / "s"), name)
    whole = trainer(name, data, 6)
    for _ in range(6):
        whole.train_step()
    first = trainer(name, data, 6)
    for _ in range(4):
        first.train_step()
    first.save(tmp_path / "checkpoint.pt")
    second = trainer(name, dataset(tmp_path / "s", name), 6)
    second.load(torch.load(tmp_path / "checkpoint.pt"))
    for _ in range(2):
        second.train_step()
    start = dict(model(name).named_parameters())
    for key, one in whole.model.named_parameters():
        torch.testing.assert_close(
            one, dict(second.model.named_parameters())[key], atol=0, rtol=0, msg=key
        )
        assert not torch.equal(one, start[key]), f"{key} is not trained"


@pytest.mark.parametrize("name", NAMES)
def test_training_learns(tmp_path: Path, name: str) -> None:
    data = dataset(shards(tmp_path / "s"), name)
    # The text of these shards can be learned, their teacher is noise: hard labels only.
    loss = LossWeights(ce=1.0, tv=0.0, confidence=0.0)
    own = trainer(name, data, 100, learning_rate=1e-2, loss=loss)
    logs = [own.train_step() for _ in range(100)]
    first, last = (np.mean([entry.ce for entry in part]) for part in (logs[:5], logs[-5:]))
    assert last < 0.8 * first
    assert len(logs[-1].agree) == own.model.config.block_size
    assert (logs[-1].confidence != 0) == (name in ("vanilla", "gated", "rnn"))


def test_a_batch_holds_the_token_after_each_feature(tmp_path: Path) -> None:
    data = dataset(shards(tmp_path / "s"), "eagle3")
    record = data.records[8]
    parts = data.read(record)
    where = np.array([record.prompt_len, record.length - 2])
    batch = data.batch([Drawn(record, where, np.ones((2, GAMMA), bool))])
    span = batch.features.shape[1]
    assert torch.equal(batch.next_ids[0], parts["ids"][1 : span + 1])
    assert batch.anchor_ids[0, 1] == batch.next_ids[0, where[1] - 1]


def test_mtp_reads_the_direction_of_the_last_layers_output(tmp_path: Path) -> None:
    """final_norm(h) / final_norm weight has unit root mean square: it is h up to scale."""
    data = dataset(shards(tmp_path / "s"), "mtp")
    parts = data.read(data.records[0])
    raw = torch.randn(len(parts["hidden"]), WIDTH) * 5
    parts["hidden"] = torch.nn.functional.rms_norm(raw, (WIDTH,), FINAL_NORM, 1e-6)
    found = data.features(parts)
    torch.testing.assert_close(
        torch.nn.functional.cosine_similarity(found, raw), torch.ones(len(raw))
    )
    torch.testing.assert_close(found.square().mean(-1), torch.ones(len(raw)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_held_out_blocks_are_drafted_and_replayed(tmp_path: Path, name: str) -> None:
    data = dataset(shards(tmp_path / "s"), name)
    own = model(name).requires_grad_(False)
    gamma, record = own.config.block_size, data.records[3]
    head = torch.randn(VOCAB, WIDTH)
    for rule in ("greedy", "rejection", "coupled"):
        blocks = draft_blocks(own, data, record, Replay(rule, head, 8, bf16=False))  # type: ignore[arg-type]
        assert blocks.accept.shape == blocks.confidence_logits.shape == (record.num_anchors, gamma)
        assert np.isfinite(blocks.confidence_logits).all()
        tally = acceptance([blocks], gamma)[record.domain]
        assert tally.committed == record.num_anchors
        assert tally.rounds >= record.num_anchors / (gamma + 1)


def test_losses_are_the_documented_ones() -> None:
    gamma = 7
    paper, code = (weights_for("dspark", w, gamma) for w in ("paper", "code"))  # type: ignore[arg-type]
    assert (code.ce, code.tv, code.confidence, code.distill) == (0.1, 0.9, 1.0, 0.0)
    assert paper.slots(gamma).tolist() == pytest.approx([math.exp(-k / 7) for k in range(7)])
    assert code.slots(gamma).tolist() == pytest.approx([math.exp(-k / 4) for k in range(7)])
    dflash = weights_for("dflash", "code", gamma)
    assert (dflash.ce, dflash.tv, dflash.confidence, dflash.distill) == (1.0, 0.0, 0.0, 0.0)
    eagle = weights_for("eagle3", "paper", gamma)
    assert (eagle.ce, eagle.tv, eagle.confidence, eagle.distill) == (0.0, 0.0, 0.0, 1.0)
    assert eagle.slots(gamma).tolist() == pytest.approx([0.8**k for k in range(7)])
    mtp = weights_for("mtp", "code", 1)
    assert (mtp.ce, mtp.tv, mtp.confidence) == (0.1, 0.9, 0.0)
    assert weights_for("dspark", "blend", gamma) == LossWeights(0.3, 0.3, 0.3, 0.7, 4.0)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("work")
    (path / "target").mkdir()
    write_tiny_llama(path / "target")
    for split in ("train", "held_out"):
        shards(path / split, vocab=TARGET_VOCAB, width=HIDDEN)
    return path


def stage(work: Path, name: str, kind: str, *options: object) -> None:
    own = ["--work", work, "--target", work / "target", "--kind", kind, *options]
    main([name, *map(str, own)])


@pytest.mark.parametrize("kind", KINDS)
def test_the_stages_train_export_and_measure_every_kind(
    work: Path, kind: Kind, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    shape = ["--gamma", 3, "--rank", 4, "--taps", 0, 2, "--draft-vocab", 0, "--layers", 1]
    for steps in (2, 4):  # the second call continues the first
        stage(work, "train", kind, *shape, "--steps", steps)
        assert json.loads(capsys.readouterr().out)["step"] == steps
    log = (work / f"run-{kind}" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == [1, 2, 3, 4]
    out = work / f"drafter-{kind}"
    stage(work, "export", kind, "--out", out)
    exported = json.loads(capsys.readouterr().out)
    stage(work, "evaluate", kind, "--drafter", out)
    measured = json.loads(capsys.readouterr().out)
    assert (out / "calibration.json").is_file() == (kind == "dspark")
    assert exported["acceptance_length"] == measured["acceptance_length"]
    config = read_drafter_config(out)
    assert (config.kind, config.qk_norm) == (kind, True)
    assert config.target_layer_ids == ((2,) if kind == "mtp" else (0, 2))
    assert config.block_size == (1 if kind == "mtp" else 3)
    table = torch.zeros(TARGET_VOCAB, HIDDEN)
    assert load_drafter(out, table, table).config == config


def test_a_run_of_another_kind_is_not_continued(work: Path) -> None:
    shape = ["--gamma", 2, "--taps", 0, 2, "--draft-vocab", 0, "--steps", 1]
    stage(work, "train", "eagle3", "--run", "mixed", *shape)
    with pytest.raises(CheckpointError, match="another --run"):
        stage(work, "train", "mtp", "--run", "mixed", *shape)


def test_taps_that_the_text_was_not_generated_with_are_refused(work: Path) -> None:
    shape = ["--run", "taps", "--draft-vocab", 0, "--steps", 1]
    with pytest.raises(CheckpointError, match=r"--taps \(0, 1, 2\)"):
        stage(work, "train", "dflash", *shape, "--taps", 0, 1, 2)
