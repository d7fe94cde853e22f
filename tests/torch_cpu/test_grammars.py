"""Grammars through desk, engine and rank: always a word of the grammar, and the same word without speculation."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from actors.core.layout import DraftTokens, SpecialRow, StepPlan
from actors.core.logit_rules import LogitRules
from actors.core.sampling import SamplingBatch, SamplingParams
from actors.engine.grammars import GrammarDesk, TokenMasks
from actors.engine.target_engine import TorchTargetEngine, load_engine
from cluster.structured_output import of_schema
from configs.schema import ClusterConfig
from tests.pure.rank_harness import Session, admitted
from tests.torch_cpu.rank_engines import TAPS, VOCAB, KnowingDrafter, real_drafter, write_tiny_llama
from tests.torch_cpu.test_rank_with_engine import rank_for
from tests.torch_cpu.tiny_tokenizers import write_tokenizer

EOS, FIRST = 2, 3
PRINTABLE = [chr(c) for c in range(0x20, 0x7F) if chr(c) not in "`~"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 2},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "tags", "count"],
    "additionalProperties": False,
}
GRAMMAR = of_schema(SCHEMA)
ALPHABET = 5  # of the small desk: an end, then a, b, c, d


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("letters"), "abcd")


def row(
    grammar: str, output: Sequence[int], request_id: str = "r", generation: int = 0
) -> SpecialRow:
    params = SamplingParams(rules=LogitRules(grammar=grammar))
    tokens = np.array([1, *output], np.int32)
    return SpecialRow(0, request_id, generation, params, tokens, len(output), (0,))


def masks_of(desk: GrammarDesk, special: SpecialRow, drafts: Sequence[int]) -> TokenMasks:
    tokens = np.array([special.token_ids[-1], *drafts], np.int32)
    found = desk.masks(
        StepPlan(
            step=0,
            request_ids=("r",),
            token_ids=tokens,
            positions=np.arange(len(tokens), dtype=np.int32),
            cu_query_len=np.array([0, len(tokens)], np.int32),
            context_len=np.zeros(1, np.int32),
            block_tables=np.zeros((1, 1), np.int32),
            slot_mapping=np.arange(len(tokens), dtype=np.int32),
            verify_len=np.array([len(drafts)], np.int32),
            samples=np.ones(1, np.bool_),
            sampling=SamplingBatch.of([special.sampling]),
            draft=None if not drafts else _no_q(len(drafts)),
            special=(special,),
        )
    )
    assert found is not None
    return found


def _no_q(count: int) -> DraftTokens:
    return DraftTokens(np.zeros((1, count, 1), np.int32), np.ones((1, count, 1), np.float32))


def allowed(masks: TokenMasks) -> list[set[int]]:
    bits = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little", count=ALPHABET)
    return [set(np.flatnonzero(line).tolist()) for line in bits]


A, B, C, D = 1, 2, 3, 4
PATTERN = LLMatcher.grammar_from_regex("a[bc]{1,2}d?")


def test_masks_follow_the_drafts_and_stop_where_none_fits(tokenizer_file: Path) -> None:
    desk = GrammarDesk(tokenizer_file, ALPHABET, [0])
    masks = masks_of(desk, row(PATTERN, []), [A, B, D, A])
    assert allowed(masks) == [{A}, {B, C}, {0, B, C, D}, {0}]
    assert masks.rows.tolist() == [0, 1, 2, 3]  # the row behind the misfit is free
    assert allowed(masks_of(desk, row(PATTERN, []), [B, B])) == [{A}]
    # What was walked is taken back; what was committed stays.
    assert allowed(masks_of(desk, row(PATTERN, [A]), [])) == [{B, C}]
    assert allowed(masks_of(desk, row(PATTERN, [A, C, B]), [])) == [{0, D}]


@pytest.mark.parametrize("at", range(4))
def test_an_end_at_every_draft_position(tokenizer_file: Path, at: int) -> None:
    # serving_faults D 42: nothing is asked of a matcher behind its end.
    desk = GrammarDesk(tokenizer_file, ALPHABET, [0])
    drafts = [A, B, C, D]
    drafts[at] = 0
    masks = masks_of(desk, row(PATTERN, []), drafts)
    assert not masks.errors and len(masks.rows) == at + 1
    assert (0 in allowed(masks)[at]) == (at >= 2)


def test_a_matcher_that_was_dropped_or_moved_is_built_again(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.engine.grammars._KEPT_MATCHERS", 2)
    monkeypatch.setattr("actors.engine.grammars._KEPT_GRAMMARS", 1)
    desk = GrammarDesk(tokenizer_file, ALPHABET, [0])
    other = LLMatcher.grammar_from_regex("d*")
    for step in range(3):
        for name in ("r", "s", "t"):
            found = allowed(masks_of(desk, row(PATTERN, [A, B, C][:step], name), []))
            assert found == [[{A}], [{B, C}], [{0, B, C, D}]][step]
        assert allowed(masks_of(desk, row(other, [D] * step, "u"), [])) == [{0, D}]
    # The same name for another output: what was followed before does not count.
    assert allowed(masks_of(desk, row(PATTERN, [A, C], "r"), [])) == [{0, B, C, D}]
    assert allowed(masks_of(desk, row(PATTERN, [], "r"), [])) == [{A}]
    # A new generation starts where the journal says.
    assert allowed(masks_of(desk, row(PATTERN, [A, B, C], "r", 1), [])) == [{0, D}]


@pytest.mark.parametrize(
    ("grammar", "output", "says"),
    [
        ("start: nothing", [], "not usable"),
        (PATTERN, [D], "no beginning of a word"),
    ],
)
def test_what_cannot_be_followed_fails_its_own_row_only(
    tokenizer_file: Path, grammar: str, output: list[int], says: str
) -> None:
    desk = GrammarDesk(tokenizer_file, ALPHABET, [0])
    masks = masks_of(desk, row(grammar, output), [])
    assert says in masks.errors[0] and not len(masks.rows)
    missing = GrammarDesk(tokenizer_file.parent / "absent.json", ALPHABET, [0])
    assert "absent.json" in masks_of(missing, row(PATTERN, []), []).errors[0]


@settings(max_examples=60, deadline=None)
@given(
    words=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=4),
    blocks=st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=1, max_size=5),
    seed=st.integers(0, 99),
)
def test_any_drafts_and_any_choice_among_what_is_allowed_make_a_word(
    words: list[list[int]], blocks: list[list[int]], seed: int
) -> None:
    names = {"|".join("".join(" abcd"[t] for t in word) for word in words)}
    grammar = LLMatcher.grammar_from_regex(f"({names.pop()})")
    desk, rng, output = _shared_desk(), random.Random(seed), []
    for number in range(12):
        drafts = blocks[number % len(blocks)]
        found = allowed(masks_of(desk, row(grammar, output, f"{words}{blocks}{seed}"), drafts))
        accepted = 0
        while (
            accepted < len(found) - 1 and drafts[accepted] in found[accepted] and rng.random() < 0.7
        ):
            accepted += 1
        output += [*drafts[:accepted], rng.choice(sorted(found[accepted]))]
        if 0 in output:
            break
    assert output[: output.index(0)] in words


_DESKS: list[GrammarDesk] = []


def _shared_desk() -> GrammarDesk:
    if not _DESKS:
        file = write_tokenizer(Path(tempfile.mkdtemp()), "abcd")
        _DESKS.append(GrammarDesk(file, ALPHABET, [0]))
    return _DESKS[0]


# --- through a rank ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TorchTargetEngine:
    path: Path = tmp_path_factory.mktemp("tiny-llama")
    write_tiny_llama(path)
    write_tokenizer(path, "".join(PRINTABLE), specials=FIRST)
    model = {"path": str(path), "dtype": "float32", "max_model_len": 128}
    target = {"kv_cache_tokens": 8192, "block_size": 8, "max_batch_tokens": 64}
    return load_engine(ClusterConfig.model_validate({"model": model, "target": target}), TAPS)


def text_of(tokens: list[int]) -> str:
    assert tokens[-1] == EOS
    return "".join(PRINTABLE[token - FIRST] for token in tokens[:-1])


def test_json_is_always_valid_and_the_same_with_speculation(engine: TorchTargetEngine) -> None:
    rng = random.Random(5)
    messages = {}
    for i in range(60):
        kind = ("greedy", "seeded", "free")[i % 3]
        params = SamplingParams(
            temperature=0.0 if kind == "greedy" else 1.0,
            seed=i if kind == "seeded" else None,
            noise_key=i,
            rules=LogitRules(grammar=GRAMMAR),
        )
        prompt = [rng.randrange(FIRST, VOCAB) for _ in range(1 + i % 5)]
        messages[f"{kind} {i}"] = replace(
            admitted(f"{kind} {i}", prompt, 100, stops=(EOS,)), sampling=params
        )
    plain = Session(rank_for(engine, 0, max_running=30, max_waiting=90), target=engine)
    for message in messages.values():
        plain.submit(message)
    plain.run(2000)
    texts = {
        name: [*m.prompt_ids.tolist(), *plain.streams[name].tokens] for name, m in messages.items()
    }
    drafter = KnowingDrafter(texts, 4, 0.3, random.Random(1), lenient=True)
    rank = rank_for(engine, 4, max_running=30, max_waiting=90)
    session = Session(rank, target=engine, drafter=drafter)
    for message in messages.values():
        session.submit(message)
    session.run(2000)
    for name, stream in session.streams.items():
        assert stream.reason == "stop", name
        value = json.loads(text_of(stream.tokens))
        assert set(value) == set(SCHEMA["properties"]) and 0 <= value["count"] <= 999  # type: ignore[call-overload]
        assert len(value["name"]) <= 6 and len(value["tags"]) <= 2
        if not name.startswith("free"):
            assert stream.tokens == plain.streams[name].tokens
    assert rank.counters.acceptance.accepted.sum() > 200
    assert rank.check_idle() == []


def test_a_request_whose_grammar_fails_ends_alone(engine: TorchTargetEngine) -> None:
    broken = SamplingParams(temperature=0.0, rules=LogitRules(grammar="start: nothing"))
    session = Session(rank_for(engine, 3), target=engine, drafter=real_drafter(3))
    session.submit(admitted("fine", [5, 6, 7], 12))
    session.submit(replace(admitted("broken", [8, 9], 12), sampling=broken))
    session.run()
    assert session.streams["broken"].reason == "error" and not session.streams["broken"].tokens
    assert session.streams["broken"].last is not None
    assert "not usable" in session.streams["broken"].last.error
    assert len(session.streams["fine"].tokens) == 12
    assert (session.rank.counters.num_failed, session.rank.counters.num_finished) == (1, 1)
    assert session.rank.check_idle() == []
    unguided = TorchTargetEngine(engine.model, engine.store, engine.spec)
    session = Session(rank_for(engine, 0), target=unguided)
    session.submit(replace(admitted("broken", [8, 9], 12), sampling=broken))
    session.run()
    assert session.streams["broken"].reason == "error"
