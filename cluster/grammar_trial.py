"""Whether a grammar has any word that this model's tokens can spell: asked before a rank is troubled with it.

A grammar may be well formed and still allow nothing: a class without characters, a schema that contains itself, a
special token of another model. A rank would find out at the first token of the answer, on every attempt.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import llguidance

from actors.engine.grammars import limits
from cluster.text import TextCodec

log = logging.getLogger(__name__)


class GrammarTrial:
    """Tries grammars over the tokens of `codec`. The first trial, or `prepare`, takes half a second."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._tokens: Any = None
        self._unusable = ""  # why the tokenizer cannot be used
        self._making = threading.Lock()

    def prepare(self) -> None:
        """Make what the first trial needs; from any thread, any number of times."""
        codec = self._codec
        with self._making:
            if self._tokens is not None or self._unusable:
                return
            try:
                self._tokens = llguidance.LLTokenizer(
                    codec.tokenizer.to_str(), codec.vocab_size, list(codec.eos_token_ids)
                )
            # The library has kinds of its own; without grammars all else is served.
            except Exception as error:
                self._unusable = f"the tokenizer of this model cannot follow grammars ({error})"
                log.warning("%s: requests for formats are refused", self._unusable)

    def problem(self, grammar: str) -> str:
        """Why nothing can be written by the grammar; empty where something can."""
        self.prepare()
        if self._unusable:
            return self._unusable
        matcher = llguidance.LLMatcher(self._tokens, grammar, log_level=0, limits=limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
            if not matcher.is_error():
                return ""
            return "no answer could follow it"
        return str(matcher.get_error()).partition("<state>")[0].strip()
