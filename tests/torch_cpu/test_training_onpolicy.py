"""On-policy text: the batched writer against plain recomputation, and its restart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from actors.engine.training.dataset import OnPolicyDataset
from actors.engine.training.frozen_target import FrozenTarget
from actors.engine.training.onpolicy import ChatText, GenerationPlan, OnPolicyWriter, ShardWriter
from actors.engine.training.prompts import Prompt

VOCAB, WIDTH, LAYERS, EOS = 30, 16, 3, 2
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}z{% endif %}"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    root.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "num_hidden_layers": LAYERS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
        "eos_token_id": EOS,
    }
    (root / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, WIDTH),
        "lm_head.weight": torch.randn(VOCAB, WIDTH),
        "model.norm.weight": torch.rand(WIDTH) + 0.5,
    }
    shapes = {
        "input_layernorm": (WIDTH,),
        "post_attention_layernorm": (WIDTH,),
        "self_attn.q_proj": (16, WIDTH),
        "self_attn.k_proj": (8, WIDTH),
        "self_attn.v_proj": (8, WIDTH),
        "self_attn.o_proj": (WIDTH, 16),
        "mlp.gate_proj": (24, WIDTH),
        "mlp.up_proj": (24, WIDTH),
        "mlp.down_proj": (WIDTH, 24),
    }
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.randn(shape) * 0.4
    save_file(tensors, root / "model.safetensors")
    letters = {chr(ord("a") + i): i for i in range(26)} | {f"<{i}>": i for i in range(26, VOCAB)}
    Tokenizer(models.BPE(vocab=letters, merges=[])).save(str(root / "tokenizer.json"))
    (root / "chat_template.jinja").write_text(TEMPLATE)
    return root


def target(model_dir: Path, max_len: int = 40) -> FrozenTarget:
    return FrozenTarget(model_dir, (0, 2), torch.float32, max_len)


def prompts() -> list[Prompt]:
    texts = ("hello", "abc", "drafting", "q", "longerprompt", "xyz", "speculate")
    return [Prompt(f"p{i}", "chat", t, 0.0) for i, t in enumerate(texts)]


def write(model_dir: Path, out: Path, max_tokens: int = 10_000) -> int:
    plan = GenerationPlan(num_rows=3, max_prompt_len=16, max_answer_len=12)
    shards = ShardWriter(out, 0)
    writer = OnPolicyWriter(target(model_dir, plan.max_len), ChatText(model_dir), plan, EOS, shards)
    return writer.run(prompts(), max_tokens)


def test_decoding_token_by_token_equals_one_forward(model_dir: Path) -> None:
    frozen = target(model_dir)
    ids = torch.randint(3, VOCAB, (2, 9))
    whole = frozen.forward(ids, torch.zeros(2, dtype=torch.long), frozen.new_rows(2), 0)
    rows = frozen.new_rows(3)
    for row in range(2):  # prompts of different lengths, then one token a step for both
        frozen.forward(ids[row : row + 1, : 3 + row], torch.zeros(1, dtype=torch.long), rows, row)
    for step in range(5):
        at = torch.tensor([3 + step, 4 + step])
        out = frozen.forward(ids.gather(1, at[:, None]), at, rows, 0)
        for row in range(2):
            torch.testing.assert_close(out.hidden[row, 0], whole.hidden[row, at[row]])
            torch.testing.assert_close(out.taps[row, 0], whole.taps[row, at[row]])


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
        torch.testing.assert_close(parts["taps"], out.taps[0])
        torch.testing.assert_close(parts["hidden"], out.hidden[0])
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


def test_sampling_follows_the_temperature(model_dir: Path, tmp_path: Path) -> None:
    plan = GenerationPlan(num_rows=1, max_prompt_len=16, max_answer_len=4)
    frozen = target(model_dir, plan.max_len)
    writer = OnPolicyWriter(frozen, ChatText(model_dir), plan, EOS, ShardWriter(tmp_path / "s", 0))
    hidden = torch.randn(1, WIDTH)
    wanted = (frozen.head(hidden).float() / 0.7).softmax(-1)[0]
    many = hidden.expand(20_000, WIDTH)
    drawn, _lse = writer._sample(many, torch.full((len(many),), 0.7))
    seen = torch.bincount(drawn, minlength=VOCAB) / len(many)
    torch.testing.assert_close(seen, wanted, atol=0.015, rtol=0)
