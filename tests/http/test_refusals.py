"""What cannot be served is refused clearly, before anything is allocated."""

from __future__ import annotations

import asyncio

import pytest

from cluster.served_model import Access
from tests.http.harness import CHAT, CHAT_PATH
from tests.http.sse_reader import Reader


async def test_a_request_that_takes_too_long_is_ended_and_freed(launch):
    async with launch(request_timeout_s=0.4) as server:
        rank = server.ranks[0]
        rank.num_tokens_before_pause = 10
        reading = asyncio.create_task(Reader().read(server))
        answer = await server.client.post(CHAT_PATH, json=CHAT)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "request_timeout"
        reader = await reading
        assert reader.error is not None and reader.error["code"] == "request_timeout"
        await server.until(lambda: len(rank.aborted) == 2)


async def test_all_ranks_full_is_429_with_retry_after_before_anything_is_allocated(launch):
    async with launch(num_ranks=2) as server:
        server.ranks[0].grant = server.ranks[1].grant = False
        server.ranks[1].retry_after_s = 1.2
        for stream in (True, False):
            answer = await server.client.post(CHAT_PATH, json={**CHAT, "stream": stream})
            assert answer.status_code == 429 and answer.headers["retry-after"] == "2"
            assert answer.json()["error"]["code"] == "overloaded"
        assert not any(rank.admitted for rank in server.ranks)
        assert all(len(rank.reserves) == 2 for rank in server.ranks)
        server.ranks[1].grant = True
        assert (await server.client.post(CHAT_PATH, json=CHAT)).status_code == 200


async def test_what_no_rank_can_ever_hold_is_not_worth_a_retry(launch):
    async with launch() as server:
        server.ranks[0].grant, server.ranks[0].retry_after_s = False, 0.0
        answer = await server.client.post(CHAT_PATH, json=CHAT)
        assert answer.status_code == 400 and "retry-after" not in answer.headers
        assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_several_prompts_are_placed_all_or_none(launch):
    async with launch() as server:
        rank = server.ranks[0]
        rank.num_tokens_before_pause, rank.num_grants = 0, 1
        answer = await server.client.post(
            "/v1/completions", json={"model": "tiny-bytes", "prompt": ["a", "b"]}
        )
        assert answer.status_code == 429
        await server.until(lambda: not rank._running)
        assert len(rank.admitted) == 1 and rank.aborted[0].request_id == rank.admitted[0].request_id


async def test_a_rank_that_does_not_answer_is_passed_over(launch):
    async with launch(num_ranks=2, reservation_timeout_s=0.2) as server:
        server.ranks[0].answers_reservations = False
        readers = await asyncio.gather(*(Reader().read(server) for _ in range(6)))
        assert all(reader.is_whole for reader in readers)
        mute = server.ranks[0]
        assert mute.reserves and len(mute.aborted) == len(mute.reserves)  # a late grant is undone
        server.ranks[1].answers_reservations = False
        answer = await server.client.post(CHAT_PATH, json=CHAT)
        assert answer.status_code == 503 and answer.json()["error"]["type"] == "service_unavailable"


async def test_no_ready_rank_is_503_at_once(launch):
    async with launch() as server:
        server.publish(**{"rank-0": "starting"})
        await server.until(lambda: server.dispatcher.router.table.version == 2)
        answer = await server.client.post(CHAT_PATH, json=CHAT)
        assert (
            answer.status_code == 503 and "rank-0 is starting" in answer.json()["error"]["message"]
        )
        assert not server.ranks[0].reserves


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        (CHAT_PATH, {**CHAT, "model": "other"}, 404, "model", "model_not_found"),
        (CHAT_PATH, {**CHAT, "temperature": 9}, 400, "temperature", "invalid_value"),
        (CHAT_PATH, {**CHAT, "stop": ["a"] * 5}, 400, "stop", "invalid_value"),
        (CHAT_PATH, {**CHAT, "stop": ""}, 400, "stop", "invalid_value"),
        (CHAT_PATH, {**CHAT, "stop": ["a", ""]}, 400, "stop", "invalid_value"),
        (CHAT_PATH, {**CHAT, "stop_token_ids": [10**6]}, 400, "stop_token_ids", "invalid_value"),
        (CHAT_PATH, {**CHAT, "max_tokens": 500}, 400, "max_tokens", "context_length_exceeded"),
        (
            CHAT_PATH,
            {**CHAT, "max_completion_tokens": 500},
            400,
            "max_completion_tokens",
            "context_length_exceeded",
        ),
        (
            CHAT_PATH,
            {**CHAT, "messages": [{"role": "user", "content": "x" * 600}]},
            400,
            "messages",
            "context_length_exceeded",
        ),
        (
            CHAT_PATH,
            {**CHAT, "chat_template_kwargs": {"messages": []}},
            400,
            "chat_template_kwargs.messages",
            "invalid_value",
        ),
        ("/v1/completions", {"model": "tiny-bytes", "prompt": []}, 400, "prompt", "invalid_value"),
        ("/v1/completions", {"model": "tiny-bytes", "prompt": ""}, 400, "prompt", "invalid_value"),
        (
            "/v1/completions",
            {"model": "tiny-bytes", "prompt": [[]]},
            400,
            "prompt",
            "invalid_value",
        ),
        (
            "/v1/completions",
            {"model": "tiny-bytes", "prompt": [-1]},
            400,
            "prompt",
            "invalid_value",
        ),
        (
            "/v1/completions",
            {"model": "tiny-bytes", "prompt": [258]},
            400,
            "prompt",
            "invalid_value",
        ),
        (
            "/v1/completions",
            {"model": "tiny-bytes", "prompt": "x" * 600},
            400,
            "prompt",
            "context_length_exceeded",
        ),
        (
            "/v1/completions",
            {"model": "tiny-bytes", "prompt": "x", "suffix": "y"},
            400,
            "suffix",
            "unsupported_parameter",
        ),
        (CHAT_PATH, {**CHAT, "n": 17}, 400, "n", "invalid_value"),
        (CHAT_PATH, {**CHAT, "n": 16, "max_tokens": 400}, 400, "n", "request_too_large"),
        (CHAT_PATH, {**CHAT, "logit_bias": {"258": 1}}, 400, "logit_bias", "invalid_value"),
        (CHAT_PATH, {**CHAT, "logit_bias": {"-1": 1}}, 400, "logit_bias", "invalid_value"),
        (CHAT_PATH, {**CHAT, "logit_bias": {"x": 1}}, 400, "logit_bias", "invalid_value"),
        (CHAT_PATH, {**CHAT, "min_tokens": 400}, 400, "min_tokens", "invalid_value"),
        ("/tokenize", {}, 400, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": "a", **CHAT}, 400, "prompt", "invalid_value"),
        ("/tokenize", {"model": "other", "prompt": "a"}, 404, "model", "model_not_found"),
        ("/detokenize", {"tokens": [258]}, 400, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": "ab"}, 400, "tokens", "invalid_value"),
        ("/v1/embeddings", {}, 404, None, "not_found"),
    ],
)
async def test_bad_input_is_refused_in_openai_shape_and_allocates_nothing(
    launch, path, body, status, param, code
):
    async with launch() as server:
        answer = await server.client.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (status, param, code)
        assert error["message"] and error["type"] == "invalid_request_error"
        assert not server.ranks[0].reserves


async def test_a_body_that_is_not_json_or_too_large_is_refused(launch):
    async with launch(access=Access(max_body_bytes=1000)) as server:
        answer = await server.client.post(CHAT_PATH, content=b"{")
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"
        answer = await server.client.post(CHAT_PATH, content=b"x" * 2000)
        assert answer.status_code == 413 and "1000 bytes; shorten it" in answer.text


async def test_the_context_length_message_names_the_numbers(launch):
    async with launch() as server:
        answer = await server.client.post(CHAT_PATH, json={**CHAT, "max_tokens": 500})
        message = answer.json()["error"]["message"]
    assert (
        "512" in message and "21 prompt tokens" in message and "500" in message and "491" in message
    )


async def test_a_path_or_method_that_does_not_exist_is_told_what_does(launch):
    async with launch() as server:
        lost = await server.client.get("/v1/chats")
        wrong = await server.client.get(CHAT_PATH)
    assert lost.status_code == 404 and lost.json()["error"]["code"] == "not_found"
    assert "GET /v1/chats" in lost.text and "/openapi.json" in lost.text
    assert wrong.status_code == 405 and "use POST" in wrong.json()["error"]["message"]


async def test_an_unknown_class_of_service_is_400_naming_the_field(launch):
    async with launch() as server:
        answer = await server.client.post(CHAT_PATH, json={**CHAT, "dspark": {"class": "gold"}})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "dspark.class"
        assert not server.ranks[0].reserves
