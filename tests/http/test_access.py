"""Keys, shares and origins over HTTP; and what the logs keep to themselves."""

from __future__ import annotations

import hashlib
import json
import logging

import openai
import pytest

from cluster.api_keys import KeyLimits, KeyRing
from cluster.served_model import Access
from tests.http.harness import CHAT, CHAT_PATH, MODEL

KEY = "sk-alice-0123456789"
MESSAGES = [{"role": "user", "content": "hi"}]


def access(requests_per_minute: float = 0, max_streams: int = 0) -> Access:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    return Access(KeyRing([KeyLimits("alice", digest, requests_per_minute, max_streams)]))


async def test_with_keys_every_endpoint_of_the_api_needs_one(launch):
    async with launch(access=access()) as server:
        for method, path in (
            ("POST", CHAT_PATH),
            ("POST", "/v1/completions"),
            ("POST", "/tokenize"),
            ("POST", "/detokenize"),
            ("GET", "/v1/models"),
            ("GET", f"/v1/models/{MODEL}"),
            ("GET", "/v1/requests/chatcmpl-1/explain"),
            ("GET", "/dashboard/rounds/chatcmpl-1"),
        ):
            for headers in ({}, {"authorization": "Bearer sk-other"}):
                answer = await server.client.request(method, path, headers=headers, json=CHAT)
                assert answer.status_code == 401, path
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["code"] == "invalid_api_key"
        assert not server.ranks[0].reserves
        assert (await server.client.get("/health")).status_code == 200
        metrics = (await server.client.get("/metrics")).text
    assert 'dspark:unknown_keys_total{ingress="ingress-0"} 16.0' in metrics


async def test_the_openai_client_with_its_key_is_served_and_counted_by_name(launch):
    async with (
        launch(access=access()) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="wrong") as stranger,
    ):
        await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        with pytest.raises(openai.AuthenticationError):
            await stranger.chat.completions.create(model=MODEL, messages=MESSAGES)
        metrics = (await server.client.get("/metrics")).text
    assert 'dspark:key_requests_total{ingress="ingress-0",key="alice"} 1.0' in metrics


async def test_a_key_has_its_rate_and_its_share(launch):
    headers = {"authorization": f"Bearer {KEY}"}
    async with launch(access=access(2)) as server:
        codes = [
            (await server.client.post(CHAT_PATH, json=CHAT, headers=headers)).status_code
            for _ in range(3)
        ]
        answer = await server.client.post(CHAT_PATH, json=CHAT, headers=headers)
    assert codes == [200, 200, 429] and 1 <= int(answer.headers["retry-after"]) <= 30
    async with launch(access=access(max_streams=2)) as server:
        rank = server.ranks[0]
        rank.num_tokens_before_pause = 3
        body = {**CHAT, "n": 2, "stream": True}
        async with server.client.stream("POST", CHAT_PATH, json=body, headers=headers) as running:
            assert running.status_code == 200
            answer = await server.client.post(CHAT_PATH, json=CHAT, headers=headers)
            assert answer.status_code == 429 and answer.json()["error"]["code"] == "share_exceeded"
        await server.until(lambda: server.dispatcher.num_streams == 0)
        rank.num_tokens_before_pause = None
        for _ in range(3):  # refused and finished requests hold nothing
            bad = await server.client.post(
                CHAT_PATH, json={**CHAT, "n": 2, "max_tokens": 9999}, headers=headers
            )
            assert bad.status_code == 400
            answer = await server.client.post(CHAT_PATH, json={**CHAT, "n": 2}, headers=headers)
            assert answer.status_code == 200
        rank.grant = False
        for _ in range(3):
            answer = await server.client.post(CHAT_PATH, json={**CHAT, "n": 2}, headers=headers)
            assert answer.json()["error"]["code"] == "overloaded"


async def test_browsers_of_other_origins_are_let_in_only_where_configured(launch):
    asks = {"origin": "https://page.example", "access-control-request-method": "POST"}
    async with launch() as server:
        answer = await server.client.options(CHAT_PATH, headers=asks)
        assert "access-control-allow-origin" not in answer.headers
        for content_type in (
            "application/json",
            "text/plain",
        ):  # the second one no browser asks about
            headers = {"origin": asks["origin"], "content-type": content_type}
            answer = await server.client.post(CHAT_PATH, content=json.dumps(CHAT), headers=headers)
            assert answer.status_code == 403
            assert "ingress.cors_origins" in answer.json()["error"]["message"]
        assert not server.ranks[0].reserves
        own = {"origin": server.url}
        assert (await server.client.post(CHAT_PATH, json=CHAT, headers=own)).status_code == 200
    async with launch(access=Access(cors_origins=("https://page.example",))) as server:
        answer = await server.client.options(CHAT_PATH, headers=asks)
        assert answer.headers["access-control-allow-origin"] == asks["origin"]
        answer = await server.client.options(
            CHAT_PATH, headers={**asks, "origin": "https://other.example"}
        )
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "path", ["/dashboard", "/dashboard/state", "/health", "/openapi.json", "/x"]
)
async def test_a_page_whose_name_was_made_to_resolve_to_us_reaches_nothing(launch, path):
    async with launch(access=Access(host_names=("localhost", "Box.example.", "lan:80"))) as server:
        for host in ("page.example", "page.example:8000", "localhost.page.example", "127.0.0.1.x"):
            rebound = {"host": host, "origin": f"http://{host}"}
            answer = await server.client.get(path, headers=rebound)
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "host_not_allowed"
            answer = await server.client.post(CHAT_PATH, json=CHAT, headers=rebound)
            assert "ingress.allowed_hosts" in answer.json()["error"]["message"]
        assert not server.ranks[0].reserves
        for host in (
            "localhost:9",
            "LOCALHOST.",
            "box.example",
            "lan",
            "127.0.0.1:8000",
            "[::1]:8000",
        ):
            answer = await server.client.post(CHAT_PATH, json=CHAT, headers={"host": host})
            assert answer.status_code == 200, host


async def test_neither_prompts_nor_answers_nor_keys_are_logged(launch, caplog):
    caplog.set_level(logging.DEBUG)
    secret, headers = "tell nobody of the squirrel", {"authorization": f"Bearer {KEY}"}
    said = "The answer is a walnut."
    async with launch(access=access(), text=said, request_timeout_s=0.5) as server:
        messages = [{"role": "user", "content": secret}]
        for fields in (
            {},
            {"stream": True},
            {"temperature": 9, "user": secret},
            {"stop": secret},
            {"seed": secret},
            {"chat_template_kwargs": {"messages": secret}},
        ):
            body = {**CHAT, "messages": messages, **fields}
            await server.client.post(CHAT_PATH, json=body, headers=headers)
        await server.client.post(CHAT_PATH, json={"messages": messages})
        server.ranks[0].num_tokens_before_pause = 3
        await server.client.post(CHAT_PATH, json={**CHAT, "messages": messages}, headers=headers)
        server.publish(**{"rank-0": "dead"})
        await server.client.post(CHAT_PATH, json={**CHAT, "messages": messages}, headers=headers)
    ours = [r for r in caplog.records if not r.name.startswith(("openai", "httpx", "httpcore"))]
    logged = "\n".join(logging.Formatter().format(record) for record in ours)
    assert "walnut" not in logged and "squirrel" not in logged and KEY not in logged
