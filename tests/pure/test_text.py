"""Tokens to text, piece by piece, equals the whole at once; the chat template is the model's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cluster.text import ChatTemplateError, ModelFilesError, TextCodec, WindowedDetokenizer

BUNDLED = Path(__file__).parents[2] / "configs" / "models" / "smollm2-135m"


@pytest.fixture(scope="module")
def bundled() -> TextCodec:
    return TextCodec.from_directory(BUNDLED)


def sentencepiece_like() -> Tokenizer:
    """Word pieces with a leading-space mark, and byte tokens for everything else, as Llama 2 has them."""
    words = ["<unk>", "▁", "▁the", "▁cat", "s", "é", "▁日本"]
    vocab = {word: i for i, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def streamed(codec: TextCodec, token_ids: list[int]) -> list[str]:
    detokenizer = codec.detokenizer()
    return [*(detokenizer.feed(i) for i in token_ids), detokenizer.flush()]


@given(token_ids=st.lists(st.integers(0, 49151), max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_ids_stream_to_what_the_tokenizer_decodes_at_once(bundled, token_ids):
    whole = bundled.tokenizer.decode(token_ids, skip_special_tokens=False)
    assert "".join(streamed(bundled, token_ids)) == whole


@given(text=st.text(max_size=80))
@settings(max_examples=200, deadline=None)
def test_any_text_streams_back_without_a_broken_character(bundled, text):
    token_ids = bundled.encode(text, add_special_tokens=False)
    whole = bundled.tokenizer.decode(
        token_ids, skip_special_tokens=False
    )  # rare bytes have no token
    pieces = streamed(bundled, token_ids)
    assert "".join(pieces) == whole
    assert "\ufffd" in whole or not any("\ufffd" in piece for piece in pieces)


def test_half_a_character_is_held_until_it_is_whole(bundled):
    byte_ids = [bundled.tokenizer.token_to_id(char) for char in ("ð", "Ł", "Ĵ", "Ģ")]  # four bytes
    assert None not in byte_ids
    assert streamed(bundled, byte_ids) == ["", "", "", "💀", ""]
    assert streamed(bundled, byte_ids[:2]) == ["", "", "\ufffd"]


@given(
    words=st.lists(
        st.sampled_from(["▁the", "▁cat", "s", "é", "▁日本", "▁"])
        | st.text("xyz€🚀", min_size=1, max_size=3),
        max_size=20,
    )
)
@settings(max_examples=200, deadline=None)
def test_sentencepiece_streams_to_what_it_decodes_at_once(words):
    tokenizer = sentencepiece_like()
    token_ids: list[int] = []
    for word in words:
        token_id = tokenizer.token_to_id(word)
        if token_id is not None:
            token_ids.append(token_id)
        else:
            token_ids += [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in word.encode()]
    detokenizer = WindowedDetokenizer(tokenizer)
    pieces = [*(detokenizer.feed(i) for i in token_ids), detokenizer.flush()]
    assert "".join(pieces) == tokenizer.decode(token_ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_windowed_detokenizer_does_not_wait_forever_for_a_broken_character():
    tokenizer = sentencepiece_like()
    detokenizer = WindowedDetokenizer(tokenizer)
    broken = tokenizer.token_to_id("<0xFF>")
    pieces = [detokenizer.feed(broken) for _ in range(40)]
    assert "".join(pieces) + detokenizer.flush() == "\ufffd" * 40
    assert any(pieces)


def test_bundled_chat_template_and_ends(bundled):
    prompt = bundled.render_chat([{"role": "user", "content": "Hi"}])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert bundled.eos_token_ids == (2,)
    assert bundled.encode(prompt, add_special_tokens=False)[0] == 1
    assert {0, 1, 2} <= bundled.special_ids


def written(folder: Path, **files: object) -> Path:
    tokenizer = Tokenizer(
        models.BPE({char: i for i, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}, [])
    )
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_template_from_tokenizer_config_sees_the_special_tokens(tmp_path):
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    folder = written(
        tmp_path,
        tokenizer_config={
            "bos_token": {"content": "<s>"},
            "eos_token": "</s>",
            "chat_template": [
                {"name": "tool_use", "template": "x"},
                {"name": "default", "template": template},
            ],
        },
        generation_config={"eos_token_id": [3, 257], "temperature": 0.6, "top_k": 20},
    )
    codec = TextCodec.from_directory(folder)
    assert codec.render_chat([{"role": "user", "content": "a"}]) == "<s>a</s>"
    assert codec.eos_token_ids == (3, 257)
    assert codec.default_sampling == {"temperature": 0.6, "top_k": 20}


def test_template_refusals_and_escapes_are_typed_errors(tmp_path):
    template = "{{ raise_exception('roles must alternate') }}"
    refusing = TextCodec.from_directory(
        written(tmp_path, tokenizer_config={"chat_template": template})
    )
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        refusing.render_chat([{"role": "user", "content": "a"}])
    escaping = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    (tmp_path / "chat_template.jinja").write_text(escaping)
    with pytest.raises(ChatTemplateError):
        TextCodec.from_directory(tmp_path).render_chat([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("template", "value"),
    [
        ("{{ 1 // x }}", 0),
        ("{% for i in range(x) %}{% endfor %}", 10**30),
        ("{{ raise_exception('no') }}", {"raise_exception": 3}),
        ("{{ x | tojson }}", {1: {2}}),
        ("{{ '%d' | format(x) }}", "a"),
        ("{{ x.y.z }}", 1),
    ],
)
def test_a_template_that_breaks_on_its_arguments_is_a_typed_error(tmp_path, template, value):
    codec = TextCodec.from_directory(
        written(tmp_path, tokenizer_config={"chat_template": template})
    )
    arguments = value if "raise_exception" in template else {"x": value}
    with pytest.raises(ChatTemplateError):
        codec.render_chat([{"role": "user", "content": "a"}], arguments)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ModelFilesError, match=r"no tokenizer\.json"):
        TextCodec.from_directory(tmp_path)
    without_template = TextCodec.from_directory(written(tmp_path))
    with pytest.raises(ChatTemplateError, match="v1/completions"):
        without_template.render_chat([{"role": "user", "content": "a"}])
