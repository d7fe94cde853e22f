"""Thousands of requests, right, wrong and absurd, against a running server: none may crash it, hang, or leave anything.

`python -m load_tests.fuzz --requests 10000 --seed 1`. Talks HTTP only; needs the `test` extra (schemathesis). An answer
is wrong when it is a 5xx other than 503 or 504, when an error is not in OpenAI's shape or does not name the field, when
a stream has no end, when its status is not in /openapi.json, or when it does not come in time. At the end no stream may
be open and every KV block must be free.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn
from urllib.parse import urlsplit

import httpx

from load_tests.endpoint import health_of, root_of, served_model
from load_tests.fuzz_requests import Attempt, attempts
from load_tests.soak import baseline_problems

SHOWN_PROBLEMS = 20
LAWFUL_ENDS = ("request_timeout", "shutting_down")
UNNAMED = ("invalid_json", "body_too_large", "not_found", "method_not_allowed", "overloaded")


@dataclass
class Finding:
    """What a run came to."""

    statuses: collections.Counter[str] = field(default_factory=collections.Counter)
    made: collections.Counter[str] = field(default_factory=collections.Counter)
    problems: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    def add(self, attempt: Attempt, problem: str) -> None:
        self.problems.append(f"{problem}: {attempt.shown}")


# --- an answer --------------------------------------------------------------------------------------------------------


def problem_with(
    attempt: Attempt, response: httpx.Response, documented: dict[str, set[str]] | None = None
) -> str:
    """What is wrong with a complete answer; empty when nothing is.

    Args:
        documented: by operation ("POST /tokenize"), the statuses that the server says it may answer with.
    """
    status = response.status_code
    if status >= 500 and status not in (503, 504):
        return f"{status} {response.text[:300]}"
    if status in (429, 503) and "retry-after" not in response.headers:
        return f"{status} without Retry-After"
    allowed = (documented or {}).get(f"{attempt.method} {attempt.path.partition('?')[0]}")
    if allowed is not None and str(status) not in allowed:
        return f"{status} is not in /openapi.json: {response.text[:300]}"
    if status >= 400:
        return "" if attempt.method == "HEAD" else _problem_with_error(response)
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        return _problem_with_stream(response.text)
    if response.headers.get("content-type", "").startswith("application/json"):
        return _problem_with_json(response.text)
    return ""


def _problem_with_error(response: httpx.Response) -> str:
    if response.text.startswith("Invalid HTTP request"):
        return ""  # not even HTTP: the server library's own words
    try:
        error = response.json()["error"]
        message, kind, param, code = (error[k] for k in ("message", "type", "param", "code"))
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code} is not an error in OpenAI's shape: {response.text[:300]}"
    if not message or not kind or not code:
        return f"an error without message, type or code: {error}"
    if response.status_code in (400, 422) and code not in UNNAMED:
        if param is None:
            return f"an error that names no field: {error}"
        if not any(mark in message for mark in (":", ";")):
            return f"an error without a remedy: {error}"
    return ""


def _problem_with_stream(text: str) -> str:
    events = [line for line in text.split("\n\n") if line and not line.startswith(":")]
    if not events or not all(event.startswith("data: ") for event in events):
        return f"a stream with something else than data in it: {text[:300]}"
    if events[-1] == "data: [DONE]":
        return ""
    error = json.loads(events[-1].removeprefix("data: ")).get("error")
    if error is None:
        return f"a stream that ends without a word: {text[-300:]}"
    return "" if error["code"] in LAWFUL_ENDS else f"a stream that failed: {error}"


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _problem_with_json(text: str) -> str:
    try:
        json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        return f"an answer that is not JSON ({error}): {text[:300]}"
    return ""


def documented_statuses(document: dict[str, Any]) -> dict[str, set[str]]:
    """Statuses by operation, of paths without parameters; any method that is not served gives 405."""
    return {
        f"{method.upper()} {path}": {*operation["responses"]}
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if "{" not in path and method == "post"
    }


# --- sending ----------------------------------------------------------------------------------------------------------


async def send(
    client: httpx.AsyncClient,
    attempt: Attempt,
    finding: Finding,
    documented: dict[str, set[str]] | None = None,
) -> None:
    """Send one request and judge its answer."""
    finding.made[attempt.made] += 1
    started = time.monotonic()
    if attempt.hangup:
        await leave(client, attempt)
        finding.statuses["left"] += 1
        return
    headers = {name: value.encode("latin-1") for name, value in attempt.headers.items()}
    try:
        url = client.base_url.copy_with(raw_path=attempt.path.encode())
        response = await client.request(attempt.method, url, content=attempt.body, headers=headers)
    except httpx.TimeoutException as error:
        finding.add(attempt, f"no answer in time ({type(error).__name__})")
        return
    except httpx.RemoteProtocolError as error:
        finding.add(attempt, f"the connection broke ({error})")
        return
    finding.slowest_s = max(finding.slowest_s, time.monotonic() - started)
    finding.statuses[str(response.status_code)] += 1
    problem = problem_with(attempt, response, documented)
    if problem:
        finding.add(attempt, problem)


async def leave(client: httpx.AsyncClient, attempt: Attempt) -> None:
    """Send part of a request, or all of it, read a little of the answer, and hang up."""
    at = urlsplit(str(client.base_url))
    assert at.hostname is not None
    rng = random.Random(attempt.shown)
    body = attempt.body or b""
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    try:
        lines = [f"{attempt.method} {attempt.path} HTTP/1.1", f"host: {at.netloc}"]
        lines += [f"{name}: {value}" for name, value in attempt.headers.items()]
        lines += [f"content-length: {len(body)}", "", ""]
        sent = rng.randrange(len(body) + 1) if attempt.hangup == "in body" else len(body)
        writer.write("\r\n".join(lines).encode("latin-1") + body[:sent])
        await writer.drain()
        if attempt.hangup == "in answer":
            try:
                async with asyncio.timeout(rng.choice((0.001, 0.01, 0.05, 0.2))):
                    await reader.read(rng.choice((1, 200, 2000)))
            except TimeoutError:
                pass
    except ConnectionError:
        pass  # an early refusal closes first
    finally:
        if rng.random() < 0.5:
            writer.transport.abort()  # a reset instead of a farewell
        writer.close()


async def fuzz(
    url: str, count: int, seed: int, *, parallel: int = 8, timeout_s: float = 60.0
) -> Finding:
    """Send `count` requests to the server at `url` (without /v1), `parallel` at a time."""
    finding = Finding()
    limits = httpx.Limits(max_connections=parallel)
    async with httpx.AsyncClient(base_url=url, timeout=timeout_s, limits=limits) as client:
        model = await served_model(client)
        document = (await client.get("/openapi.json")).json()
        documented = documented_statuses(document)
        waiting, making = attempts(document, model, count, seed), threading.Lock()

        def next_attempt() -> Attempt | None:
            with making:
                return next(waiting, None)

        async def work() -> None:
            # Making one may take a while: not on the loop.
            while (attempt := await asyncio.to_thread(next_attempt)) is not None:
                await send(client, attempt, finding, documented)

        await asyncio.gather(*(work() for _ in range(parallel)))
    return finding


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    url = root_of(arguments.url)
    started = time.monotonic()
    finding = await fuzz(url, arguments.requests, arguments.seed, parallel=arguments.parallel)
    elapsed_s = time.monotonic() - started
    async with httpx.AsyncClient(timeout=60.0) as client:
        left = await baseline_problems(client, health_of(url))
    return {
        "ok": not finding.problems and not left,
        "requests": sum(finding.made.values()),
        "seconds": round(elapsed_s, 1),
        "slowest_s": round(finding.slowest_s, 2),
        "statuses": dict(sorted(finding.statuses.items())),
        "made": dict(sorted(finding.made.items())),
        "num_problems": len(finding.problems),
        "problems": finding.problems[:SHOWN_PROBLEMS],
        "baseline_problems": left,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="server under test")
    parser.add_argument("--requests", type=int, default=10_000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the same one makes the same requests")
    parser.add_argument("--parallel", type=int, default=8, help="requests in flight")
    result = asyncio.run(run(parser.parse_args()))
    print(json.dumps(result, ensure_ascii=True))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
