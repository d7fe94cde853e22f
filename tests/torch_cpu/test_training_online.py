"""Text whose features are computed when a step needs them: the same steps as with stored ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from actors.engine.training.dataset import OnPolicyDataset
from actors.engine.training.frozen_target import FrozenTarget
from actors.engine.training.online import LocalFeatures, OnlineDataset, longest
from actors.engine.training.onpolicy import GenerationPlan, OnPolicyWriter, ShardWriter
from actors.engine.training.prompts import Prompt
from actors.engine.weights import embedding_tables
from tests.torch_cpu.family_checkpoints import VOCAB, write_checkpoint

TAPS = (0, 2)


class Letters:
    """Tokens are letters."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]


def stored(target: Path, out: Path) -> OnPolicyDataset:
    plan = GenerationPlan(2, 16, 10)
    frozen = FrozenTarget(target, TAPS, torch.float32, plan.max_len)
    asked = [Prompt(text, "own", text, 0.0) for text in ("hello", "drafter", "abc")]
    OnPolicyWriter(frozen, Letters(), plan, ShardWriter(out, 0)).run(asked, 1000)
    return OnPolicyDataset(out)


def test_features_come_from_the_target_and_normalisers_from_the_head(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "m", "Qwen3MoeForCausalLM")
    data = stored(target, tmp_path / "s")
    lines = [
        {"ids": data.read(r)["ids"].tolist(), "prompt_len": r.prompt_len, "domain": r.domain}
        for r in data.records
    ]
    file = tmp_path / "ids.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    source = LocalFeatures(target, TAPS, torch.float32, longest(file))
    _embed, head = embedding_tables(target, torch.float32)
    online = OnlineDataset(file, source, head)
    assert online.num_answer_tokens == data.num_answer_tokens
    assert torch.equal(online.token_counts(VOCAB), data.token_counts(VOCAB))
    for mine, theirs in zip(online.records, data.records, strict=True):
        found, expected = online.read(mine), data.read(theirs)
        assert torch.equal(found["ids"], expected["ids"])
        for name in ("taps", "hidden", "lse"):
            assert found[name].shape == expected[name].shape
            torch.testing.assert_close(
                found[name].float(), expected[name].float(), atol=1e-3, rtol=1e-2, msg=name
            )


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({"ids": [1, 99]}, "below 30"),
        ({"ids": [1, 2], "prompt_len": 2}, "prompt_len=2"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: dict[str, object], named: str) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text(json.dumps(line), encoding="utf-8")
    with pytest.raises(ValueError, match=f"ids.jsonl:1: .*{named}"):
        OnlineDataset(file, None, torch.zeros(VOCAB, 4))  # type: ignore[arg-type]
