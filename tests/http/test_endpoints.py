"""What a client gets from every endpoint when all goes well."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.http.harness import CHAT


async def events_of(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """Decoded events of a streamed answer; `[DONE]` stays a string."""
    events: list[Any] = []
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line:
                assert line.startswith("data: ")
                data = line.removeprefix("data: ")
                events.append(data if data == "[DONE]" else json.loads(data))
    return events


async def test_chat_answers_whole_with_usage(launch):
    async with launch(text="Hello, wörld!") as server:
        answer = (await server.client.post("/v1/chat/completions", json=CHAT)).json()
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello, wörld!", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert answer["object"] == "chat.completion" and answer["model"] == "tiny-bytes"
    num_tokens = len("Hello, wörld!".encode()) + 1  # and the end token
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    num_prompt = len(prompt.replace("<|im_start|>", "S").replace("<|im_end|>", "E"))
    rounds = -(-num_tokens // 3)
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "accepted_prediction_tokens": 2 * rounds,
            "rejected_prediction_tokens": 2 * rounds,
        },
        "dspark": {
            "num_rounds": rounds,
            "num_proposed": 5 * rounds,
            "num_scheduled": 4 * rounds,
            "num_accepted": 2 * rounds,
        },
    }


async def test_chat_streams_role_text_reason_usage_done(launch):
    async with launch(text="Hello, wörld!") as server:
        body = {**CHAT, "stream_options": {"include_usage": True}}
        events = await events_of(server.client, "/v1/chat/completions", body)
    assert events[-1] == "[DONE]"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len({event["id"] for event in events[:-1]}) == 1
    *chunks, usage = events[:-1]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 15
    assert all(chunk["usage"] is None for chunk in chunks)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == "Hello, wörld!"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]


async def test_no_usage_chunk_unless_asked(launch):
    async with launch() as server:
        events = await events_of(server.client, "/v1/chat/completions", CHAT)
    assert all("usage" not in event for event in events[:-1])
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99], ["abc", "de"], [[1, 2], [3]]])
async def test_completion_takes_every_form_of_prompt(launch, prompt):
    async with launch(text="fine") as server:
        body = {"model": "tiny-bytes", "prompt": prompt}
        whole = (await server.client.post("/v1/completions", json=body)).json()
        events = await events_of(server.client, "/v1/completions", body)
        prompts = [list(request.prompt_ids) for request in server.ranks[0].admitted]
    num_prompts = 2 if prompt in (["abc", "de"], [[1, 2], [3]]) else 1
    assert [(c["index"], c["text"]) for c in whole["choices"]] == [
        (i, "fine") for i in range(num_prompts)
    ]
    texts = [""] * num_prompts
    for event in events[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == ["fine"] * num_prompts
    if prompt == [97, 98, 99]:
        assert prompts[0] == [97, 98, 99]


async def test_max_tokens_reaches_the_rank_and_ends_with_length(launch):
    async with launch(text="a longer text than that") as server:
        for name in ("max_tokens", "max_completion_tokens"):
            answer = (
                await server.client.post("/v1/chat/completions", json={**CHAT, name: 7})
            ).json()
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["choices"][0]["message"]["content"] == "a longe"
        assert [request.max_new_tokens for request in server.ranks[0].admitted] == [7, 7]
        assert [reserve.max_new_tokens for reserve in server.ranks[0].reserves] == [7, 7]


async def test_sampling_parameters_reach_the_rank(launch):
    async with launch() as server:
        body = {**CHAT, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": -3}
        await server.client.post(
            "/v1/chat/completions", json={**body, "dspark": {"speculation": False}}
        )
        await server.client.post("/v1/chat/completions", json=CHAT)
        await server.client.post("/v1/chat/completions", json=CHAT)
        first, second, third = (request.sampling for request in server.ranks[0].admitted)
    assert (first.temperature, first.top_p, first.top_k) == (0.5, 0.9, 7)
    assert (first.seed, first.noise_key, first.speculation) == (-3, -3, False)
    assert (second.temperature, second.top_p, second.top_k, second.seed) == (1.0, 1.0, 0, None)
    assert second.speculation and second.noise_key != third.noise_key


async def test_stop_string_across_tokens_ends_the_stream_and_frees_the_rank(launch):
    async with launch(text="one two STOP three four five six seven") as server:
        server.ranks[0].step_s, server.ranks[0].tokens_a_step = 0.02, 5
        for body in ({**CHAT, "stop": "STOP"}, {**CHAT, "stop": ["zzz", " STOP", "STO!"]}):
            answer = (await server.client.post("/v1/chat/completions", json=body)).json()
            assert (
                answer["choices"][0]["message"]["content"]
                == "one two STOP".partition("STOP" if body["stop"] == "STOP" else " STOP")[0]
            )
            assert answer["choices"][0]["finish_reason"] == "stop"
            # Tokens behind the stop string were committed by the rank but are not the client's.
            assert answer["usage"]["completion_tokens"] == len("one two STOP")
        await server.until(lambda: len(server.ranks[0].aborted) == 2)
        events = await events_of(server.client, "/v1/chat/completions", {**CHAT, "stop": "STOP"})
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
    assert text == "one two "


async def test_characters_split_over_tokens_arrive_whole(launch):
    text = "é€𝄞 日本語 🏳️‍🌈 done"
    async with launch(text=text) as server:
        server.ranks[0].tokens_a_step = 1
        events = await events_of(server.client, "/v1/chat/completions", CHAT)
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


async def test_text_with_unicode_line_ends_stays_on_its_line(launch):
    text = "a\u2028b\u2029c\x85d\x1ce\nf\r\ng"
    async with launch(text=text) as server:
        events = await events_of(server.client, "/v1/chat/completions", CHAT)
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1]) == text


async def test_a_stream_says_where_its_tokens_come_from_when_asked(launch):
    text = "one € two STOP three"
    async with launch(text=text) as server:
        body = {**CHAT, "dspark": {"provenance": True}}
        asked = await events_of(server.client, "/v1/chat/completions", {**body, "stop": "STOP"})
        plain = await events_of(server.client, "/v1/chat/completions", CHAT)
        refused = await server.client.post("/v1/chat/completions", json=body)
    chunks = [event["choices"][0] for event in asked[:-1]]
    said = [chunk["dspark"]["provenance"] for chunk in chunks if chunk.get("dspark")]
    # Of each three tokens the scripted rank says that two were accepted, of four verified.
    origins = [origin for chunk in said for _, origin in chunk]
    assert origins[:3] == ["accepted", "accepted", "recovered"]
    for chunk in chunks:
        if chunk["delta"].get("content"):
            told = "".join(piece for piece, _ in chunk["dspark"]["provenance"])
            assert told == chunk["delta"]["content"]
    assert "".join(piece for chunk in said for piece, _ in chunk) == "one € two "
    assert not any("dspark" in event["choices"][0] for event in plain[:-1])
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "dspark.provenance"


async def test_unmodified_openai_client_streams_and_completes(launch):
    async with (
        launch(text="Hello, wörld!") as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        assert [model.id async for model in client.models.list()] == ["tiny-bytes"]
        messages: Any = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        whole = await client.chat.completions.create(model="tiny-bytes", messages=messages, seed=1)
        assert whole.choices[0].message.content == "Hello, wörld!"
        assert whole.usage is not None and whole.usage.completion_tokens_details is not None
        assert whole.usage.completion_tokens_details.accepted_prediction_tokens == 10
        stream = await client.chat.completions.create(
            model="tiny-bytes",
            messages=messages,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == "Hello, wörld!" and chunks[-1].usage is not None
        completion = await client.completions.create(model="tiny-bytes", prompt="hi", max_tokens=5)
        assert completion.choices[0].text == "Hello"
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="gpt-9", messages=messages)
        assert caught.value.code == "model_not_found"


async def test_models_health_and_metrics(launch):
    async with launch(text="Hello, world!") as server:
        card = (await server.client.get("/v1/models/tiny-bytes")).json()
        assert card["id"] == "tiny-bytes" and card["max_model_len"] == 512
        assert (card["vocab_size"], card["eos_token_ids"]) == (258, [257])
        assert card["has_chat_template"] and card["default_sampling"] == {}
        assert (await server.client.get("/v1/models/other")).status_code == 404
        health = await server.client.get("/health")
        assert health.status_code == 200 and health.json()["status"] == "ready"
        await server.client.post("/v1/chat/completions", json=CHAT)
        metrics = (await server.client.get("/metrics")).text
        assert len(list(text_string_to_metric_families(metrics))) > 15
        values = {
            sample.name: sample.value
            for family in text_string_to_metric_families(metrics)
            for sample in family.samples
        }
        assert values["vllm:generation_tokens_total"] == len("Hello, world!") + 1
        assert values["vllm:time_to_first_token_seconds_count"] == 1
        assert values["dspark:largest_gap_seconds_count"] == 1
        assert values["vllm:request_success_total"] == 1
        server.publish(**{"rank-0": "starting"})
        await server.until(lambda: server.dispatcher.router.table.version == 2)
        health = await server.client.get("/health")
        assert health.status_code == 503 and "rank-0 is starting" in health.json()["reason"]
