"""Grammars are tried over the tokens of the model before a rank gets them."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer, models

from cluster.grammar_trial import GrammarTrial
from cluster.model_files import text_files
from cluster.text import TextCodec


@pytest.fixture(scope="module")
def trial() -> GrammarTrial:
    return GrammarTrial(TextCodec.from_directory(text_files("smollm2-135m")))


@pytest.mark.parametrize(
    ("regex", "has_words"), [("[a-z]+!", True), ("", True), (r"ab[^\s\S]", False), ("é", True)]
)
def test_only_a_grammar_that_has_words_is_let_through(
    trial: GrammarTrial, regex: str, has_words: bool
) -> None:
    problem = trial.problem(str(LLMatcher.grammar_from_regex(regex)))
    assert (problem == "") == has_words and "<state>" not in problem


def test_a_grammar_that_needs_tokens_of_another_model_is_not(trial: GrammarTrial) -> None:
    grammar = str(LLMatcher.grammar_from_lark("start: <|of_another_model|>"))
    assert "unknown special token" in trial.problem(grammar)


def test_a_tokenizer_that_cannot_follow_grammars_says_so_and_stops_nothing(caplog) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a"))
    trial = GrammarTrial(TextCodec(words, eos_token_ids=(1,), chat_template=None))
    trial.prepare()
    assert "cannot follow grammars" in trial.problem(str(LLMatcher.grammar_from_regex("a")))
    assert len(caplog.records) == 1 and "refused" in caplog.text
