"""From a checked request to lengths, sampling and stop rules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.core.sampling import SamplingBatch
from cluster.api_errors import ApiError
from cluster.intake import COMPLETION_MAX_TOKENS, Intake
from cluster.jobs import IntakeLimits, Job
from cluster.model_files import text_files
from cluster.openai_api import ChatRequest, CompletionRequest
from cluster.openai_parse import parse_request
from cluster.request_sampling import choice_seed
from cluster.text import ModelFilesError, TextCodec

LIMITS = IntakeLimits("m", max_model_len=256, default_max_tokens=100, max_stop_strings=2)


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.from_directory(text_files("smollm2-135m"))


@pytest.fixture
def intake(codec: TextCodec) -> Intake:
    return Intake(codec, LIMITS, draw_key=lambda: 77)


def chat(intake: Intake, content: str = "hi", **fields: Any) -> Job:
    body = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
    (job,) = intake.jobs(parse_request(ChatRequest, json.dumps(body).encode()), "id", None)
    return job


def completions(intake: Intake, prompt: Any, **fields: Any) -> list[Job]:
    body = {"model": "m", "prompt": prompt, **fields}
    return intake.jobs(parse_request(CompletionRequest, json.dumps(body).encode()), "id", None)


def test_a_chat_without_a_limit_gets_the_default_or_what_the_context_leaves(intake):
    short, long = chat(intake), chat(intake, "hi " * 180)
    assert short.order.max_new_tokens == 100
    assert long.order.max_new_tokens == 256 - len(long.order.prompt_ids) < 100


def test_a_request_may_leave_the_model_unnamed_but_not_name_another(intake):
    assert chat(intake, model=None).order.sampling == chat(intake).order.sampling
    with pytest.raises(ApiError, match="not served here"):
        chat(intake, model="another")


def test_a_completion_without_a_limit_gets_openais_default(intake):
    (job,) = completions(intake, "hi")
    assert job.order.max_new_tokens == COMPLETION_MAX_TOKENS


def test_a_limit_up_to_the_last_token_of_the_context_fits_and_one_more_does_not(intake):
    room = 256 - len(chat(intake).order.prompt_ids)
    assert chat(intake, max_tokens=room).order.max_new_tokens == room
    with pytest.raises(ApiError, match=f"at most {room} output tokens"):
        chat(intake, max_tokens=room + 1)


def test_the_seed_is_the_noise_key_and_without_one_it_is_drawn(intake):
    assert (
        chat(intake, seed=5).order.sampling.seed,
        chat(intake, seed=5).order.sampling.noise_key,
    ) == (5, 5)
    assert (chat(intake).order.sampling.seed, chat(intake).order.sampling.noise_key) == (None, 77)


def test_choices_have_seeds_of_their_own_that_do_not_depend_on_how_many_there_are(intake):
    def seeds(**fields):
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
        jobs = intake.jobs(parse_request(ChatRequest, json.dumps(body).encode()), "id", None)
        return [job.order.sampling.seed for job in jobs]

    two, three = seeds(seed=-5, n=2), seeds(seed=-5, n=3)
    assert two == three[:2] and three[0] == -5 and len(set(three)) == 3
    assert seeds(seed=6, n=3)[1:] != three[1:]
    assert seeds(n=2) == [None, None]
    assert choice_seed(-5, 1) == -1_296_206_490_656_398_242  # a promise: replays rely on it


def test_prompts_count_once_and_ids_are_told_apart(intake):
    jobs = completions(intake, ["a", "b"], n=2, echo=True)
    assert [job.order.request_id for job in jobs] == ["id-0", "id-1", "id-2", "id-3"]
    assert [job.is_first_choice for job in jobs] == [True, False, True, False]
    assert [job.echo for job in jobs] == ["a", "a", "b", "b"]
    (by_id,) = completions(intake, intake.codec.encode("a b", add_special_tokens=False), echo=True)
    assert by_id.echo == "a b"


def test_keys_drawn_for_two_requests_differ(codec):
    intake = Intake(codec, LIMITS)
    keys = {chat(intake).order.sampling.noise_key for _ in range(8)}
    assert len(keys) == 8 and all(0 <= key < 2**64 for key in keys)


def test_the_models_own_sampling_is_the_default_and_the_request_wins(codec, monkeypatch):
    monkeypatch.setattr(codec, "default_sampling", {"temperature": 0.6, "top_k": 20})
    intake = Intake(codec, LIMITS)
    default, own = chat(intake).order.sampling, chat(intake, temperature=0, top_k=-1).order.sampling
    assert (default.temperature, default.top_p, default.top_k) == (0.6, 1.0, 20)
    assert (own.temperature, own.top_k) == (0.0, 0)


@pytest.mark.parametrize("top_k", [2**31, 2**80])
def test_a_top_k_beyond_the_vocabulary_keeps_all_of_it(intake, codec, top_k):
    order = chat(intake, top_k=top_k).order
    assert order.sampling.top_k == codec.vocab_size
    SamplingBatch.of([order.sampling])  # 32 bits on the rank: more would end its process


def test_template_arguments_may_have_any_name(intake):
    for name in ("self", "args", "bos_token", "not a name"):
        assert chat(intake, chat_template_kwargs={name: "x"}).order.prompt_ids


def test_end_tokens_stop_unless_they_are_ignored_and_are_never_shown(intake, codec):
    job, ignoring = (
        chat(intake, stop_token_ids=[9]),
        chat(intake, stop_token_ids=[9], ignore_eos=True),
    )
    assert job.order.stop_token_ids == (2, 9) and ignoring.order.stop_token_ids == (9,)
    for each in (job, ignoring):
        assert {2, 9} | codec.special_ids <= each.hidden_ids


def test_several_prompts_get_ids_of_their_own(intake):
    jobs = completions(intake, ["a", "b"])
    assert [job.order.request_id for job in jobs] == ["id-0", "id-1"]


def test_too_many_prompts_are_refused(intake):
    with pytest.raises(ApiError, match="1 to 128 prompts"):
        completions(intake, ["a"] * 129)


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(intake, monkeypatch):
    monkeypatch.setattr(intake.codec, "encode", lambda *_, **__: pytest.fail("tokenised"))
    with pytest.raises(ApiError, match="shorten it"):
        completions(intake, "x" * (256 * 64 + 1))


def test_where_the_text_files_of_a_model_lie(tmp_path: Path):
    assert text_files("smollm2-135m").name == "smollm2-135m"
    assert text_files(str(tmp_path)) == tmp_path
    with pytest.raises(ModelFilesError, match="hub id"):
        text_files("no/such/folder")


CLASSES = replace(LIMITS, classes=("gold", "bulk"), ranks=("target-0", "target-1"))


def test_a_request_names_its_class_and_one_that_names_none_is_of_the_first(codec):
    intake = Intake(codec, CLASSES)
    assert chat(intake).order.class_id == 0
    assert chat(intake, dspark={"class": "bulk"}).order.class_id == 1
    assert chat(intake, dspark={"class": "gold", "speculation": False}).order.class_id == 0


def test_a_rank_can_be_named_only_where_hints_are_allowed(codec, intake):
    assert chat(Intake(codec, CLASSES), dspark={"rank": "target-1"}).order.rank == "target-1"
    assert chat(intake).order.rank is None
    with pytest.raises(ApiError, match="allow_rank_hint") as refused:
        chat(intake, dspark={"rank": "target-1"})
    assert (refused.value.status, refused.value.param) == (400, "dspark.rank")
    with pytest.raises(ApiError, match="known: target-0, target-1"):
        chat(Intake(codec, CLASSES), dspark={"rank": "target-7"})


@pytest.mark.parametrize(
    ("limits", "remedy"), [(CLASSES, "known: gold, bulk"), (LIMITS, "no classes are configured")]
)
def test_an_unknown_class_is_refused_by_its_field_with_the_known_ones(codec, limits, remedy):
    for body in (chat, completions):
        with pytest.raises(ApiError, match=remedy) as refused:
            body(Intake(codec, limits), "hi", dspark={"class": "silver"})
        assert (refused.value.status, refused.value.param) == (400, "dspark.class")
        assert "silver" in str(refused.value)
