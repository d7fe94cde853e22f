"""Grammars under speculation: which tokens may come at each verified position of a request.

A matcher follows the committed output of its request. For a step it walks along the drafts, noting the mask before
each, and is taken back to where it was; what was accepted is walked again when it is committed. So the mask of a
position depends on the tokens before it alone, and a draft that does not fit has probability zero there.

Needs no torch, so that tests and the ingress may use it without.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from actors.core.layout import SpecialRow, StepPlan
from actors.core.logit_edits import drafts_of, first_decided_rows

log = logging.getLogger(__name__)

_BUNDLED_MODELS_DIR = Path(__file__).resolve().parents[2] / "configs" / "models"
_KEPT_MATCHERS = 512  # of requests; one that was dropped is built again from the output
_KEPT_GRAMMARS = 64


class GrammarError(ValueError):
    """A grammar cannot be followed: it is malformed, too complex, or the output has left it."""


def tokenizer_file(path: str, model_dir: Path) -> Path:
    """`tokenizer.json` of the model called `path`: the bundled one has it beside its description, not its weights."""
    bundled = _BUNDLED_MODELS_DIR / path / "tokenizer.json"
    return bundled if "/" not in path and bundled.is_file() else model_dir / "tokenizer.json"


@dataclass(frozen=True)
class TokenMasks:
    """Which tokens may come, for some of the rows of logits that a step decides with; see `kernels.mask_logits`."""

    rows: npt.NDArray[np.int64]  # [n]
    bits: npt.NDArray[np.int32]  # [n, ceil(V / 32)]
    errors: dict[int, str] = field(default_factory=dict)  # rows of the plan that cannot go on


@dataclass
class _Follower:
    matcher: Any
    consumed: list[int] = field(default_factory=list)


def limits() -> llguidance.LLParserLimits:
    """Bounds of one grammar. Its errors must not repeat the text of the client."""
    return llguidance.LLParserLimits(verbose_errors=False)


class GrammarDesk:
    """Follows the grammars of all requests of one target.

    Args:
        tokenizer_file: `tokenizer.json` of the model; read when the first grammar comes.
        vocab_size: V of the logits.
        eos_token_ids: may come only where the output is a whole word of the grammar.
    """

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: Any = None
        self._grammars: OrderedDict[str, Any] = OrderedDict()
        self._followers: OrderedDict[tuple[str, int], _Follower] = OrderedDict()

    def masks(self, plan: StepPlan) -> TokenMasks | None:
        """The masks of a step; None when no row has a grammar."""
        guided = [s for s in plan.special if s.sampling.rules and s.sampling.rules.grammar]
        if not guided:
            return None
        firsts = first_decided_rows(plan)
        rows: list[int] = []
        bits: list[npt.NDArray[np.int32]] = []
        errors: dict[int, str] = {}
        for special in guided:
            try:
                found = self._row_masks(special, drafts_of(plan, special.row).tolist())
            except GrammarError as error:
                self._followers.pop((special.request_id, special.generation), None)
                errors[special.row] = str(error)
                continue
            first = int(firsts[special.row])
            rows += range(first, first + len(found))
            bits.append(found)
        empty = allocate_token_bitmask(0, self._vocab_size)
        return TokenMasks(np.array(rows, np.int64), np.concatenate([empty, *bits]), errors)

    def _row_masks(self, special: SpecialRow, drafts: list[int]) -> npt.NDArray[np.int32]:
        """[k, ceil(V / 32)] for the leading positions of a row that can be reached; behind them nothing matters."""
        matcher = self._matcher(special)
        bits = allocate_token_bitmask(1 + len(drafts), self._vocab_size)
        num_walked = 0
        while True:
            fill_next_token_bitmask(matcher, bits, num_walked)
            if matcher.is_error():
                raise GrammarError(f"the grammar cannot be followed: {matcher.get_error()}")
            if num_walked == len(drafts) or drafts[num_walked] in self._eos_token_ids:
                break
            if matcher.try_consume_tokens([drafts[num_walked]]) == 0:
                break
            num_walked += 1
        matcher.rollback(num_walked)
        return bits[: num_walked + 1]

    def _matcher(self, special: SpecialRow) -> Any:
        """The matcher of a request, after all of its output."""
        output = special.token_ids[len(special.token_ids) - special.num_output :].tolist()
        key = (special.request_id, special.generation)
        follower = self._followers.get(key)
        if follower is None or output[: len(follower.consumed)] != follower.consumed:
            assert special.sampling.rules is not None
            follower = _Follower(self._compiled(special.sampling.rules.grammar).deep_copy())
            self._followers[key] = follower
        self._followers.move_to_end(key)
        while len(self._followers) > _KEPT_MATCHERS:
            self._followers.popitem(last=False)
        fresh = output[len(follower.consumed) :]
        if follower.matcher.try_consume_tokens(fresh) < len(fresh):
            raise GrammarError("the output is no beginning of a word of the grammar")
        follower.consumed = output
        return follower.matcher

    def _compiled(self, grammar: str) -> Any:
        found = self._grammars.get(grammar)
        if found is None:
            found = llguidance.LLMatcher(self._tokens(), grammar, log_level=0, limits=limits())
            if found.is_error():
                raise GrammarError(f"the grammar is not usable: {found.get_error()}")
            self._grammars[grammar] = found
            while len(self._grammars) > _KEPT_GRAMMARS:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(grammar)
        return found

    def _tokens(self) -> Any:
        if self._tokenizer is None:
            if not self._tokenizer_file.is_file():
                raise GrammarError(
                    f"grammars need {self._tokenizer_file.name} beside the model, which has none"
                )
            log.info("reading the tokenizer for the first grammar")
            self._tokenizer = llguidance.LLTokenizer(
                str(self._tokenizer_file), self._vocab_size, self._eos_token_ids
            )
        return self._tokenizer
