"""Whoever names the server under load may name its API or the server itself, and is told when nobody is there."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from load_tests.endpoint import api_of, health_of, root_of, served_model

Answer = Callable[[httpx.Request], httpx.Response]


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_the_address_may_be_that_of_the_server_or_of_its_api(end: str) -> None:
    url = f"http://127.0.0.1:8000{end}"
    assert root_of(url) == "http://127.0.0.1:8000"
    assert api_of(url) == "http://127.0.0.1:8000/v1"
    assert health_of(url) == "http://127.0.0.1:8000/health"


async def model_of(base_url: str, answer: Answer) -> str:
    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(base_url=base_url, transport=transport) as client:
        return await served_model(client)


@pytest.mark.parametrize("end", ["", "/v1"])
async def test_the_first_model_is_asked_of_the_api(end: str) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/models"
        return httpx.Response(200, json={"data": [{"id": "one"}, {"id": "two"}]})

    assert await model_of(f"http://server{end}", answer) == "one"


@pytest.mark.parametrize(
    ("body", "status"), [(b"not found", 404), (b'{"detail": "no"}', 404), (b'{"data": []}', 200)]
)
async def test_somebody_who_serves_no_model_is_one_clear_line(body: bytes, status: int) -> None:
    with pytest.raises(SystemExit, match=f"--url: http://server/v1/models says {status}") as said:
        await model_of("http://server/v1", lambda _: httpx.Response(status, content=body))
    assert "\n" not in str(said.value)


async def test_nobody_there_is_one_clear_line() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(SystemExit, match=r"does not answer \(ConnectError\); start a server"):
        await model_of("http://server", refuse)
