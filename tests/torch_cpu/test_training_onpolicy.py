"""On-policy text: the batched writer against plain recomputation, and its restart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actors.engine.training.dataset import OnPolicyDataset
from actors.engine.training.frozen_target import FrozenTarget
from actors.engine.training.onpolicy import (
    ChatText,
    GenerationPlan,
    OnPolicyWriter,
    Row,
    ShardWriter,
)
from actors.engine.training.prompts import Prompt
from tests.torch_cpu.family_checkpoints import EOS, VOCAB, WIDTH, write_checkpoint

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}z{% endif %}"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    root = write_checkpoint(tmp_path / "model", "LlamaForCausalLM")
    (root / "chat_template.jinja").write_text(TEMPLATE)
    return root


def target(model_dir: Path, max_len: int = 40) -> FrozenTarget:
    return FrozenTarget(model_dir, (0, 2), torch.float32, max_len)


def prompts() -> list[Prompt]:
    texts = ("hello", "abc", "drafting", "q", "longerprompt", "xyz", "speculate")
    return [Prompt(f"p{i}", "chat", t, 0.0) for i, t in enumerate(texts)]


def write(
    model_dir: Path, out: Path, max_tokens: int = 10_000, asked: Sequence[Prompt] = ()
) -> int:
    plan = GenerationPlan(num_rows=3, max_prompt_len=16, max_answer_len=12)
    shards = ShardWriter(out, 0)
    writer = OnPolicyWriter(target(model_dir, plan.max_len), ChatText(model_dir), plan, shards)
    return writer.run(list(asked or prompts()), max_tokens)


def test_decoding_token_by_token_equals_one_forward(model_dir: Path) -> None:
    frozen = target(model_dir)
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    whole = frozen.forward(ids, torch.zeros(2, dtype=torch.long), frozen.new_rows(2), 0)
    rows = frozen.new_rows(3)
    for row in range(2):  # prompts of different lengths, then one token a step for both
        frozen.forward(ids[row : row + 1, : 3 + row], torch.zeros(1, dtype=torch.long), rows, row)
    for step in range(5):
        at = torch.tensor([3 + step, 4 + step])
        out = frozen.forward(ids.gather(1, at[:, None]), at, rows, 0)
        for row in range(2):
            near = {"rtol": 1e-4, "atol": 1e-4}  # one row and nine take different paths
            torch.testing.assert_close(out.hidden[row, 0], whole.hidden[row, at[row]], **near)
            torch.testing.assert_close(out.taps[row, 0], whole.taps[row, at[row]], **near)


def test_written_answers_and_features_equal_plain_recomputation(
    model_dir: Path, tmp_path: Path
) -> None:
    write(model_dir, tmp_path / "shards")
    data = OnPolicyDataset(tmp_path / "shards")
    assert sorted(r.record_id for r in data.records) == [p.record_id for p in prompts()]
    frozen, text = target(model_dir), ChatText(model_dir)
    by_id = {p.record_id: p for p in prompts()}
    for record in data.records:
        parts = data.read(record)
        ids = parts["ids"]
        assert ids[: record.prompt_len].tolist() == text.encode(by_id[record.record_id].text)
        out = frozen.forward(
            ids[None, :-1], torch.zeros(1, dtype=torch.long), frozen.new_rows(1), 0
        )
        logits = frozen.head(out.hidden[0, record.prompt_len - 1 :])
        assert ids[record.prompt_len :].tolist() == logits.argmax(-1).tolist()
        for name, wanted in (("taps", out.taps[0]), ("hidden", out.hidden[0])):
            torch.testing.assert_close(parts[name].float(), wanted, atol=1e-3, rtol=1e-2, msg=name)
        torch.testing.assert_close(parts["lse"][record.prompt_len - 1 :], logits.logsumexp(-1))
        answer = ids[record.prompt_len :].tolist()
        assert EOS not in answer[:-1]
        assert answer[-1] == EOS or len(answer) == 12


def test_a_restart_skips_finished_records(model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "shards"
    write(model_dir, out, max_tokens=20)
    first = {r.record_id for r in OnPolicyDataset(out).records}
    assert 0 < len(first) < len(prompts())
    write(model_dir, out)
    records = [r.record_id for r in OnPolicyDataset(out).records]
    assert len(records) == len(set(records)) == len(prompts())


def test_a_text_depends_on_its_prompt_alone(model_dir: Path, tmp_path: Path) -> None:
    warm = [replace(p, temperature=0.9) for p in prompts()]
    texts = []
    for order, name in ((warm, "a"), (warm[::-1], "b")):
        write(model_dir, tmp_path / name, asked=order)
        data = OnPolicyDataset(tmp_path / name)
        texts.append({r.record_id: data.read(r)["ids"].tolist() for r in data.records})
    assert texts[0] == texts[1]


def test_workers_share_the_prompts_whatever_their_order(model_dir: Path, tmp_path: Path) -> None:
    text, out = ChatText(model_dir), tmp_path / "shards"
    for worker, asked in enumerate((prompts(), prompts()[::-1])):
        plan = GenerationPlan(3, 16, 12, worker=worker, num_workers=2)
        writer = OnPolicyWriter(target(model_dir, 28), text, plan, ShardWriter(out, worker))
        writer.run(asked, 10_000)
    ids = [r.record_id for r in OnPolicyDataset(out).records]
    assert sorted(ids) == [p.record_id for p in prompts()]


def test_sampling_follows_the_temperature(model_dir: Path, tmp_path: Path) -> None:
    plan = GenerationPlan(num_rows=1, max_prompt_len=16, max_answer_len=4)
    frozen = target(model_dir, plan.max_len)
    writer = OnPolicyWriter(frozen, ChatText(model_dir), plan, ShardWriter(tmp_path / "s", 0))
    hidden = torch.randn(1, WIDTH)
    wanted = (frozen.head(hidden).float() / 0.7).softmax(-1)[0]
    many = hidden.expand(20_000, WIDTH)
    row = Row(Prompt("p", "chat", "a", 0.7), [], 0, torch.Generator().manual_seed(1))
    drawn, _lse = writer._sample(many, [row] * len(many))
    seen = torch.bincount(drawn, minlength=VOCAB) / len(many)
    torch.testing.assert_close(seen, wanted, atol=0.015, rtol=0)
