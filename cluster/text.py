"""Text in and out of token ids: tokenizer, chat template, incremental detokenisation. Knows nothing of torch."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

# A character is at most four bytes, hence four byte tokens: a longer unfinished tail is not a half character.
MAX_HELD_TOKENS = 8
# What a template, which is a program, may do with the messages and arguments of a client.
_TEMPLATE_ERRORS: tuple[type[Exception], ...] = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError),
    *(ArithmeticError, AttributeError, RecursionError),
)


class ModelFilesError(ValueError):
    """The model directory lacks something that text needs."""


class ChatTemplateError(ValueError):
    """The messages do not fit the model's chat template."""


class Detokenizer(Protocol):
    """Turns a stream of token ids into text, never emitting half a character."""

    def feed(self, token_id: int) -> str:
        """Text that has become certain with this token."""
        ...

    def flush(self) -> str:
        """What is left at the end of the stream; an unfinished character becomes U+FFFD."""
        ...


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE: visible Latin-1 stands for itself, the rest follows from U+0100."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    table = {chr(byte): byte for byte in visible}
    table.update({chr(0x100 + offset): byte for offset, byte in enumerate(hidden)})
    return table


_BYTE_OF_CHAR = _byte_alphabet()


class ByteLevelDetokenizer:
    """Exact for byte-level tokenizers: every token is a fixed run of bytes, so UTF-8 decodes incrementally."""

    def __init__(self, tokenizer: Tokenizer, cache: dict[int, bytes]) -> None:
        self._tokenizer = tokenizer
        self._cache = cache
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        token_bytes = self._cache.get(token_id)
        if token_bytes is None:
            token_bytes = self._cache[token_id] = byte_level_bytes(self._tokenizer, token_id)
        return self._utf8.decode(token_bytes)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


def byte_level_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes behind a token of a byte-level tokenizer; none for an id that is no token."""
    token = tokenizer.id_to_token(token_id)
    if token is None:
        return b""
    # An added token is written as it is; one with a character outside the alphabet is its own UTF-8.
    known = [_BYTE_OF_CHAR.get(char) for char in token]
    if any(byte is None for byte in known):
        return str(token).encode()
    return bytes(byte for byte in known if byte is not None)


class WindowedDetokenizer:
    """For any tokenizer: decodes a short window twice and emits the difference (SentencePiece joins, byte fallback)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # emitted tokens that still give context, then the held ones
        self._num_emitted = 0

    def feed(self, token_id: int) -> str:
        self._ids.append(token_id)
        before, text = self._decode(self._ids[: self._num_emitted]), self._decode(self._ids)
        unfinished = (
            text.endswith("\ufffd") and len(self._ids) - self._num_emitted < MAX_HELD_TOKENS
        )
        if unfinished or len(text) <= len(before):
            return ""
        self._ids = self._ids[self._num_emitted :]
        self._num_emitted = len(self._ids)
        return text[len(before) :]

    def flush(self) -> str:
        return self._decode(self._ids)[len(self._decode(self._ids[: self._num_emitted])) :]

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))


class TextCodec:
    """Tokenizer, chat template and special tokens of one model directory.

    Attributes:
        vocab_size: ids below it are tokens.
        eos_token_ids: ids that end a stream.
        special_ids: ids that are never shown as text.
        default_sampling: temperature, top_p, top_k the model's generation config recommends; missing ones absent.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        eos_token_ids: Sequence[int],
        chat_template: str | None,
        template_tokens: dict[str, str] | None = None,
        default_sampling: dict[str, float] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = tuple(eos_token_ids)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.default_sampling = default_sampling or {}
        self._template_tokens = template_tokens or {}
        self._knows_tools = "tools" in (chat_template or "")
        self._template = _compile_template(chat_template) if chat_template else None
        self._byte_level = _is_byte_level(tokenizer)
        self._byte_cache: dict[int, bytes] = {}

    @classmethod
    def from_directory(cls, path: Path) -> TextCodec:
        """Read `tokenizer.json` and its companions.

        Raises:
            ModelFilesError: `tokenizer.json` is missing or unreadable.
        """
        tokenizer_file = path / "tokenizer.json"
        if not tokenizer_file.is_file():
            raise ModelFilesError(
                f"model.path={str(path)!r}: no tokenizer.json there; name a directory in Hugging Face layout"
            )
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        files = {
            name: _read_json(path / f"{name}.json")
            for name in ("config", "generation_config", "tokenizer_config")
        }
        template_tokens = _template_tokens(tokenizer, files)
        return cls(
            tokenizer,
            eos_token_ids=_eos_token_ids(tokenizer, files, template_tokens),
            chat_template=_read_template(path, files["tokenizer_config"]),
            template_tokens=template_tokens,
            default_sampling={
                name: files["generation_config"][name]
                for name in ("temperature", "top_p", "top_k")
                if files["generation_config"].get(name) is not None
            },
        )

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template itself tells the model of tools."""
        return self._knows_tools

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; a rendered chat already holds its special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        template_arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The prompt that the model's own chat template makes of `messages`; further arguments may have any name.

        Raises:
            ChatTemplateError: no template, or the template refuses these messages.
        """
        if self._template is None:
            raise ChatTemplateError(
                "this model has no chat template; use /v1/completions with a plain prompt"
            )
        try:
            return self._template.render(
                {
                    **self._template_tokens,
                    **template_arguments,
                    "messages": list(messages),
                    "add_generation_prompt": True,
                }
            )
        except _TEMPLATE_ERRORS as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {error}") from error

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for by itself."""
        if self._byte_level:
            return byte_level_bytes(self.tokenizer, token_id)
        return str(self.tokenizer.decode([token_id], skip_special_tokens=False)).encode()

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens included."""
        detokenizer = self.detokenizer()
        return "".join(map(detokenizer.feed, token_ids)) + detokenizer.flush()

    def detokenizer(self) -> Detokenizer:
        if self._byte_level:
            return ByteLevelDetokenizer(self.tokenizer, self._byte_cache)
        return WindowedDetokenizer(self.tokenizer)


def _compile_template(source: str) -> jinja2.Template:
    # Sandboxed: the template comes from whoever made the checkpoint.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    return environment.from_string(source)


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    return len(parts) == 1 and parts[0].get("type") == "ByteLevel"


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict), f"{path.name} holds no JSON object"
    return content


def _read_template(path: Path, tokenizer_config: dict[str, Any]) -> str | None:
    own_file = path / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    declared = tokenizer_config.get("chat_template")
    if isinstance(declared, list):  # several named ones
        named = {entry["name"]: entry["template"] for entry in declared}
        declared = named.get("default")
    return declared


def _template_tokens(tokenizer: Tokenizer, files: dict[str, dict[str, Any]]) -> dict[str, str]:
    """`bos_token` and its kind, as text, from tokenizer_config.json or by id from the other two files."""
    tokens: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        declared = files["tokenizer_config"].get(name)
        if isinstance(declared, dict):
            declared = declared.get("content")
        if declared is None:
            ids = files["generation_config"].get(f"{name}_id", files["config"].get(f"{name}_id"))
            first = ids[0] if isinstance(ids, list) and ids else ids
            declared = tokenizer.id_to_token(first) if isinstance(first, int) else None
        if declared is not None:
            tokens[name] = declared
    return tokens


def _eos_token_ids(
    tokenizer: Tokenizer, files: dict[str, dict[str, Any]], template_tokens: dict[str, str]
) -> tuple[int, ...]:
    declared = files["generation_config"].get("eos_token_id", files["config"].get("eos_token_id"))
    ids = declared if isinstance(declared, list) else [declared]
    named = tokenizer.token_to_id(template_tokens.get("eos_token", ""))
    return tuple(dict.fromkeys(i for i in (*ids, named) if isinstance(i, int)))
