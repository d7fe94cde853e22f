"""Log probabilities as the two endpoints show them: one entry for every token that usage counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from actors.core.logit_rules import TokenLogprobs
from cluster.text import TextCodec

LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI shows this for what cannot come


class LogprobsWriter:
    """Of one choice, from its first token to its last.

    Args:
        hidden_ids: tokens without text: they are listed, and take no place in it.
    """

    def __init__(
        self, kind: Literal["chat", "completion"], codec: TextCodec, hidden_ids: frozenset[int]
    ) -> None:
        self._kind = kind
        self._codec = codec
        self._hidden_ids = hidden_ids
        self._detokenizer = codec.detokenizer()
        self._offset = 0  # characters of text before the next token

    def show(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The object of the tokens that come next."""
        pairs = list(zip(token_ids, logprobs, strict=True))
        if self._kind == "chat":
            return {"content": [self._entry(*pair) for pair in pairs], "refusal": None}
        return {
            "tokens": [self._name(token_id) for token_id, _ in pairs],
            "token_logprobs": [_finite(entry.logprob) for _, entry in pairs],
            "top_logprobs": [self._named(entry) for _, entry in pairs],
            "text_offset": [self._next_offset(token_id) for token_id, _ in pairs],
        }

    def _entry(self, token_id: int, entry: TokenLogprobs) -> dict[str, Any]:
        top = zip(entry.top_ids, entry.top_logprobs, strict=True)
        return {
            **self._token(token_id, entry.logprob),
            "top_logprobs": [self._token(*one) for one in top],
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._codec.token_bytes(token_id)
        text = raw.decode(errors="replace")
        return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}

    def _named(self, entry: TokenLogprobs) -> dict[str, float]:
        top = zip(entry.top_ids, entry.top_logprobs, strict=True)
        return {self._name(token_id): _finite(logprob) for token_id, logprob in top}

    def _name(self, token_id: int) -> str:
        """The text of a token; of a part of a character its bytes, so that two parts keep apart."""
        raw = self._codec.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _next_offset(self, token_id: int) -> int:
        offset = self._offset
        if token_id not in self._hidden_ids:
            self._offset += len(self._detokenizer.feed(token_id))
        return offset


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
