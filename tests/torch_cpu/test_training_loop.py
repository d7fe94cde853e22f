"""The training loop on a tiny drafter: batches, exact resume, learning, held-out replay."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.engine.drafters.config import DSparkConfig
from actors.engine.drafters.dspark import DSparkModel
from actors.engine.training.curves import plot_log
from actors.engine.training.dataset import Drawn, OnPolicyDataset
from actors.engine.training.evaluate import Replay, draft_blocks, evaluate
from actors.engine.training.loop import Trainer, TrainingOptions
from actors.engine.training.losses import LossWeights
from actors.engine.training.validation import HeldOut
from tests.torch_cpu.training_shards import VOCAB, WIDTH, shards

GAMMA = 4


def tiny_model() -> DSparkModel:
    config = DSparkConfig(
        hidden_size=WIDTH,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_hidden_layers=1,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        max_position_embeddings=128,
        vocab_size=VOCAB,
        draft_vocab_size=30,
        block_size=GAMMA,
        mask_token_id=0,
        target_layer_ids=(0, 1),
        markov_rank=4,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        qk_norm=False,
        tied_to_target=True,
    )
    torch.manual_seed(0)
    return DSparkModel(
        config, torch.randn(VOCAB, WIDTH), torch.randn(VOCAB, WIDTH), torch.arange(30)
    )


def options(steps: int, **changes: float) -> TrainingOptions:
    return TrainingOptions(
        max_steps=steps,
        warmup_steps=5,
        num_sequences=4,
        num_anchors=6,
        bf16=False,
        loss=LossWeights(ce=1, tv=0, confidence=0.1),
        **changes,
    )


def test_a_batch_holds_the_right_labels_and_rows(tmp_path: Path) -> None:
    data = OnPolicyDataset(shards(tmp_path / "s"))
    record = data.records[8]
    parts = data.read(record)
    where = np.array([record.prompt_len, record.length - 2])
    batch = data.batch([Drawn(record, where, np.ones((2, GAMMA), bool))])
    ids = parts["ids"]
    for i, anchor in enumerate(where):
        assert batch.anchor_ids[0, i] == ids[anchor]
        for k in range(GAMMA):
            valid = anchor + k + 1 < record.length
            if valid:
                assert batch.labels[0, i, k] == ids[anchor + k + 1]
                assert batch.previous[0, i, k] == ids[anchor + k]
                torch.testing.assert_close(
                    batch.teacher_hidden[0, i, k], parts["hidden"][anchor + k]
                )
    rows = parts["taps"].flatten(1)
    torch.testing.assert_close(batch.features[0], rows[: batch.features.shape[1]])


def test_anchors_are_drawn_from_answers_only(tmp_path: Path) -> None:
    data = OnPolicyDataset(shards(tmp_path / "s"))
    for step in range(20):
        for drawn in data.draw(np.random.default_rng(step), 4, 6, np.ones(GAMMA)):
            record, where = drawn.record, drawn.anchors
            assert where.min() >= record.prompt_len
            assert where.max() <= record.length - 2
            assert len(set(where.tolist())) == len(where)
            inside = where[:, None] + 1 + np.arange(GAMMA) < record.length
            assert np.array_equal(drawn.kept, inside)


def test_slots_are_kept_as_often_as_they_weigh(tmp_path: Path) -> None:
    data = OnPolicyDataset(shards(tmp_path / "s"))
    chances = LossWeights(decay=2.0).slots(GAMMA).double().numpy()
    rng = np.random.default_rng(0)
    drawn = [d for _ in range(200) for d in data.draw(rng, 4, 6, chances)]
    far = [d.anchors + GAMMA < d.record.length for d in drawn]  # whole blocks
    shares = np.concatenate([d.kept[whole] for d, whole in zip(drawn, far, strict=True)]).mean(0)
    assert shares[0] == 1
    assert shares.tolist() == pytest.approx(chances.tolist(), abs=0.03)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    data = OnPolicyDataset(shards(tmp_path / "s"))
    whole = Trainer(tiny_model(), data, options(8))
    for _ in range(8):
        whole.train_step()
    first = Trainer(tiny_model(), data, options(8))
    for _ in range(5):
        first.train_step()
    first.save(tmp_path / "checkpoint.pt")
    state = torch.load(tmp_path / "checkpoint.pt")
    second = Trainer(tiny_model(), OnPolicyDataset(tmp_path / "s", state["shards"]), options(8))
    second.load(state)
    for _ in range(3):
        second.train_step()
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)


def test_training_learns_and_logs(tmp_path: Path) -> None:
    data = OnPolicyDataset(shards(tmp_path / "s"))
    trainer = Trainer(tiny_model(), data, options(60, learning_rate=2e-2))
    trainer.run(tmp_path / "run")
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [e["step"] for e in log] == list(range(1, 61))
    assert log[-1]["ce"] < log[0]["ce"] / 2
    assert (tmp_path / "run" / "checkpoint.pt").exists()


def test_held_out_answers_are_measured_while_training(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    data = OnPolicyDataset(shards(tmp_path / "s"))
    watched = HeldOut(OnPolicyDataset(shards(tmp_path / "h")), 2, bf16=False)
    assert len(watched.records) == 4  # two of code, two of math
    own = options(60, learning_rate=2e-2, validate_every=30)
    trainer = Trainer(tiny_model(), data, own, watched)
    before = watched.measure(trainer.model)
    trainer.run(tmp_path / "run")
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    measured = {entry["step"]: entry["held_out"] for entry in log if entry["held_out"]}
    assert list(measured) == [30, 60]
    assert measured[60] == watched.measure(trainer.model)
    assert measured[60]["acceptance_length"] > before["acceptance_length"] + 0.3
    result, _ = evaluate(
        trainer.model, watched.data, (GAMMA,), per_domain=2, replay=Replay(bf16=False)
    )
    for domain, tally in result.items():
        assert measured[60]["by_domain"][domain] == pytest.approx(tally[GAMMA].length, abs=1e-4)


def test_the_log_forgets_steps_that_will_be_repeated(tmp_path: Path) -> None:
    data = OnPolicyDataset(shards(tmp_path / "s"))
    out = tmp_path / "run"
    trainer = Trainer(tiny_model(), data, options(4))
    trainer.run(out)
    state = torch.load(out / "checkpoint.pt")
    with (out / "log.jsonl").open("a") as log:
        log.write('{"step": 5}\n')
    again = Trainer(tiny_model(), data, options(6))
    again.load(state)
    again.run(out)
    steps = [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_the_learning_rate_warms_up_and_falls() -> None:
    schedule = options(100)
    rates = [schedule.rate(s) for s in range(101)]
    assert rates[0] < rates[4]
    assert rates[5] == max(rates[5:])
    assert rates[100] == pytest.approx(schedule.learning_rate * schedule.final_rate)


def test_evaluation_drafts_as_the_module_says(tmp_path: Path) -> None:
    data = OnPolicyDataset(shards(tmp_path / "s"))
    model = tiny_model()
    record = data.records[0]
    result = draft_blocks(model, data, record, Replay(bf16=False))
    parts = data.read(record)
    anchor = record.prompt_len + 3
    hidden = model.backbone(
        parts["taps"].flatten(1)[None, :anchor].float(),
        torch.tensor([[anchor]]),
        parts["ids"][None, [anchor]],
    )[0, 0]
    previous = parts["ids"][anchor : anchor + 1]
    for k in range(GAMMA):
        previous = model.draft_ids[model.logits(hidden[k : k + 1], previous).argmax(-1)]
        hit = int(previous) == int(parts["ids"][anchor + k + 1])
        if k == 0 or result.prefix[3, k - 1]:  # judged while the block's own tokens are the text's
            assert result.accept[3, k] == hit
    domains, every = evaluate(model, data, (2, 4), replay=Replay(bf16=False))
    assert set(domains) == {"code", "math"}
    assert len(every) == len(data.records)


def test_the_curve_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    entry = {"ce": 1.0, "tv": 1.0, "confidence": 0.5, "agree": [0.1] * GAMMA}
    lines = [json.dumps({**entry, "step": s}) for s in range(1, 80)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    plot_log(tmp_path / "log.jsonl", tmp_path / "curve.png")
    assert 0 < (tmp_path / "curve.png").stat().st_size < 200_000
