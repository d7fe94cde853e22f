"""The real Serve application, in a process with a Ray of its own, through each proxy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import openai
import pytest

from tests.http.harness import TEXT
from tests.http.served import ServeProcess

MODEL = "smollm2-135m-instruct"

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module", params=["haproxy", "python"])
def served(request: pytest.FixtureRequest) -> Iterator[ServeProcess]:
    server = ServeProcess("tests.http.serve_process", request.param)
    server.proxy = request.param
    yield server
    server.quit()


def stream(url: str) -> tuple[str, str | None]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        text, reason = "", None
        for chunk in client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        ):
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason
        return text, reason


def test_openai_client_streams_and_completes_through_serve(served):
    assert stream(served.url) == (TEXT, "stop")
    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}]
        )
    assert whole.choices[0].message.content == TEXT


def test_hundred_concurrent_streams_lose_no_token(served):
    with ThreadPoolExecutor(100) as pool:
        results = list(pool.map(stream, [served.url] * 100))
    assert results == [(TEXT, "stop")] * 100


def leave_mid_stream(url: str, body: dict[str, object]) -> None:
    with (
        httpx.Client(base_url=url) as client,
        client.stream("POST", "/chat/completions", json={**body, "stream": True}) as response,
    ):
        next(response.iter_lines())


def leave_before_the_answer(url: str, body: dict[str, object]) -> None:
    with httpx.Client(base_url=url, timeout=0.5) as client, suppress(httpx.ReadTimeout):
        client.post("/chat/completions", json=body)


@pytest.mark.parametrize("leave", [leave_mid_stream, leave_before_the_answer])
def test_client_that_leaves_frees_the_rank(served, leave):
    before = int(served.ask("aborted"))
    leave(served.url, {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]})
    served.until(lambda: int(served.ask("aborted")) == before + 1, within_s=2.0)


def test_errors_keep_their_shape_through_the_proxy(served):
    body = {"model": "other", "messages": [{"role": "user", "content": "hi"}]}
    answer = httpx.post(f"{served.url}/chat/completions", json=body)
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
    assert httpx.get(served.url.removesuffix("/v1") + "/health").json()["status"] == "ready"


def test_while_no_replica_lives_a_client_gets_an_error_it_can_read_and_comes_again(served):
    """Through HAProxy; Serve's own proxy knows nothing of OpenAI's errors."""
    assert served.ask("kill") == "1"
    answers: list[httpx.Response] = []

    def serves() -> bool:
        with suppress(httpx.TransportError):
            answers.append(httpx.get(f"{served.url}/models", timeout=30))
        return any(answer.status_code == 200 for answer in answers)

    served.until(serves, 60)
    refused = [answer for answer in answers if answer.status_code != 200]
    if served.proxy == "python":
        return
    for answer in refused:
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1", answer.text
        assert answer.json()["error"]["type"] == "service_unavailable"


def test_shutdown_ends_open_streams_with_an_error_event(served):
    """The last test here: nothing is served afterwards."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    with (
        httpx.Client(base_url=served.url, timeout=30) as client,
        client.stream("POST", "/chat/completions", json=body) as response,
    ):
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        with ThreadPoolExecutor(1) as pool:
            stopped = pool.submit(served.ask, "quit")
            assert (
                json.loads(list(lines)[-1].removeprefix("data: "))["error"]["code"]
                == "shutting_down"
            )
            assert stopped.result() == "STOPPED"
