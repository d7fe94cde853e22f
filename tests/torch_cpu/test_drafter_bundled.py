"""The drafter in the repository: small, tied to the target, and accepted on text it never saw."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from actors.engine import gguf_import
from actors.engine.drafters.checkpoint import load_drafter
from actors.engine.drafters.protocol import DrafterOptions
from actors.engine.drafters.serve import load_engine
from actors.engine.training.dataset import OnPolicyDataset
from actors.engine.training.evaluate import evaluate, macro
from actors.engine.training.frozen_target import FrozenTarget
from actors.engine.training.onpolicy import ChatText, GenerationPlan, OnPolicyWriter, ShardWriter
from actors.engine.training.prompts import Prompt
from actors.engine.training.runs import compute_dtype, tables

DRAFTER = gguf_import.BUNDLED_DIR / "drafter"
QUESTIONS = {
    "code": (
        "Write a Python function that returns the sum of the squares of a list of numbers.",
        "Complete the following Python function.\n\n```python\ndef clamp(x, low, high):\n"
        '    """Return x, but not below low and not above high."""\n```',
    ),
    "math": (
        "A box holds 12 pencils. How many pencils are in 7 boxes? Explain your steps.",
        "Solve for x: 3x + 5 = 26.",
    ),
    "chat": (
        "Give me five tips for learning to paint with watercolors.",
        "Why do leaves change their color in autumn?",
    ),
}

pytestmark = [pytest.mark.weights, pytest.mark.timeout(600)]


def test_it_is_small_enough_for_a_repository() -> None:
    assert sum(p.stat().st_size for p in DRAFTER.iterdir()) < 60e6
    assert {"config.json", "model.safetensors", "calibration.json", "PROVENANCE.md"} <= {
        p.name for p in DRAFTER.iterdir()
    }


def test_it_serves_beside_its_target() -> None:
    engine = load_engine(DRAFTER, gguf_import.ensure_smollm2(), DrafterOptions("bundled", gamma=5))
    assert engine.spec.gamma == 5
    assert engine.spec.feature_dim == len(engine.spec.tap_layer_ids) * 576
    assert engine.spec.num_refused_calibrations == 0
    rules = {t["rule"] for t in json.loads((DRAFTER / "calibration.json").read_text())["tables"]}
    assert "greedy" in rules


def test_greedy_text_is_accepted(tmp_path: Path) -> None:
    """Six questions outside the training prompts; the full measurement is in PROVENANCE.md."""
    model_dir = gguf_import.ensure_smollm2()
    model = load_drafter(DRAFTER, *tables(model_dir))
    plan = GenerationPlan(num_rows=6, max_prompt_len=128, max_answer_len=64)
    taps = model.config.target_layer_ids
    target = FrozenTarget(model_dir, taps, compute_dtype(), plan.max_len)
    prompts = [
        Prompt(f"{domain}-{i}", domain, text, 0.0)  # type: ignore[arg-type]
        for domain, texts in QUESTIONS.items()
        for i, text in enumerate(texts)
    ]
    writer = OnPolicyWriter(target, ChatText(model_dir), plan, ShardWriter(tmp_path, 0))
    writer.run(prompts, 10_000)
    result, blocks = evaluate(model, OnPolicyDataset(tmp_path), (5,))
    assert set(result) == set(QUESTIONS)
    assert macro(result, 5) >= 1.6
    # A confident block is kept longer than a doubtful one.
    logits = np.concatenate([b.confidence_logits[:, 0] for b in blocks])
    hits = np.concatenate([b.prefix[:, 0] for b in blocks])
    assert logits[hits].mean() > logits[~hits].mean()
