"""Hold many streams open for a while and check every one of them.

`python -m load_tests.soak --streams 32 --seconds 120`. Talks HTTP only. Every prompt is first answered alone, at
temperature 0 and with a seed; afterwards each stream's text must equal that answer byte for byte, which finds lost,
repeated, reordered and changed tokens alike (it needs a server with `numerics: reproducible`; `--no-compare` checks the
counts only). At the end the server must be back at its baseline: no stream open, every KV block free, no integrity
problem.

For an hour with everything: `--seconds 3600 --abort-share 0.1 --disturb-every 300 --disturb 'kill -9 …' --out DIR`. The
command is whatever a shell can do to the server; DIR gets samples of its metrics, and a picture of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from load_tests.endpoint import api_of, health_of, served_model
from load_tests.record import Record, draw, summary

PROMPTS = (
    "Write a Python function that reverses the words of a sentence.",
    "Explain in two sentences why the sky is blue.",
    "A train travels 180 km in 2.5 hours. What is its average speed? Think step by step.",
    "List five uses of a paper clip.",
    "Write a short email that asks a colleague to review a document.",
    "What is the derivative of x^3 - 4x + 1?",
    "Tell a story of three sentences about a fox.",
    "Write a SQL query that counts orders per customer.",
)
SETTLE_S = 30.0


@dataclass
class Outcome:
    """What the streams of a run came to."""

    num_streams: int = 0
    num_tokens: int = 0
    num_changed: int = 0
    num_aborted: int = 0
    errors: list[str] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)


def body(model: str, prompt: str, max_tokens: int, seed: int | None) -> dict[str, Any]:
    law = {"temperature": 0} if seed is None else {"temperature": 0.8, "seed": seed}
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **law,
    }


async def read_stream(
    client: httpx.AsyncClient, request: dict[str, Any], abort_after: int | None = None
) -> tuple[str, int, float, float]:
    """Text, completion tokens, seconds to the first text, seconds in all. Raises RuntimeError on an error event."""
    started = time.monotonic()
    text, tokens, first_s, chunks, done = "", -1, 0.0, 0, False
    async with client.stream("POST", "/chat/completions", json=request) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()[:300]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                done = True
                continue
            event = json.loads(line[len("data: ") :])
            if "error" in event:
                raise RuntimeError(json.dumps(event["error"]))
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                if piece and not text:
                    first_s = time.monotonic() - started
                text += piece
                chunks += 1
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            if abort_after is not None and chunks >= abort_after:
                return text, tokens, first_s, time.monotonic() - started
    if not done or tokens < 0:
        raise RuntimeError("the stream ended without [DONE] or without usage")
    return text, tokens, first_s, time.monotonic() - started


async def keep_streaming(
    client: httpx.AsyncClient,
    requests: list[dict[str, Any]],
    expected: list[str] | None,
    until: float,
    abort_share: float,
    rng: random.Random,
    outcome: Outcome,
) -> None:
    """One user: stream after stream until the time is up."""
    while time.monotonic() < until:
        index = rng.randrange(len(requests))
        abort_after = rng.randrange(1, 20) if rng.random() < abort_share else None
        try:
            text, tokens, first_s, total_s = await read_stream(client, requests[index], abort_after)
        except (RuntimeError, httpx.HTTPError) as error:
            outcome.errors.append(f"{type(error).__name__}: {error}")
            continue
        outcome.num_streams += 1
        if abort_after is not None and tokens < 0:
            outcome.num_aborted += 1
            continue
        outcome.num_tokens += tokens
        outcome.first_token_s.append(first_s)
        outcome.tokens_per_s.append((tokens - 1) / max(total_s - first_s, 1e-9))
        if expected is not None and text != expected[index]:
            outcome.num_changed += 1


async def baseline_problems(client: httpx.AsyncClient, health_url: str) -> list[str]:
    """What is not back at its baseline once the server had time to settle."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        health = (await client.get(health_url)).json()
        problems = [f"{health['num_streams']} streams still open"] if health["num_streams"] else []
        for rank in health["ranks"]:
            if rank["num_running"] or rank["num_waiting"]:
                problems.append(f"{rank['name']}: {rank['num_running']} running")
            if rank["num_free_blocks"] != rank["num_blocks"]:
                problems.append(
                    f"{rank['name']}: {rank['num_free_blocks']} of {rank['num_blocks']} blocks free"
                )
            problems += [
                f"{rank['name']}: {problem}" for problem in rank.get("integrity_problems", ())
            ]
        if not problems or time.monotonic() > deadline:
            return problems
        await asyncio.sleep(0.5)


async def soak(arguments: argparse.Namespace) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=arguments.streams + 4)
    async with httpx.AsyncClient(
        base_url=api_of(arguments.url), timeout=120.0, limits=limits
    ) as client:
        model = arguments.model or await served_model(client)
        requests = [
            body(model, prompt, arguments.max_tokens, seed)
            for prompt in PROMPTS
            for seed in (None, 7)
        ]
        expected = None
        if not arguments.no_compare:
            expected = [(await read_stream(client, request))[0] for request in requests]
        outcome, started = Outcome(), time.monotonic()
        users = [
            keep_streaming(
                client, requests, expected, started + arguments.seconds,
                arguments.abort_share, random.Random(user), outcome,
            )
            for user in range(arguments.streams)
        ]  # fmt: skip
        out = Path(arguments.out) if arguments.out else None
        async with watched(client, out) as record, disturbed(arguments) as disturbances:
            bar = asyncio.create_task(show(arguments.seconds, outcome))
            await asyncio.gather(*users)
            bar.cancel()
            elapsed_s = time.monotonic() - started
            problems = await baseline_problems(client, health_of(arguments.url))
    found = report(outcome, problems, elapsed_s)
    if disturbances:
        found["disturbances"] = dict(Counter(disturbances))
    if record is not None and out is not None:
        found |= summary(record)
        draw(record.samples, out / "soak.png")
        (out / "report.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    return found


async def show(seconds: float, outcome: Outcome) -> None:
    """A bar of the time that has passed."""
    with tqdm(total=round(seconds), desc="soak", unit="s", disable=None) as bar:
        while True:
            await asyncio.sleep(1)
            bar.set_postfix_str(f"{outcome.num_streams} streams, {len(outcome.errors)} errors")
            bar.update()


@asynccontextmanager
async def watched(client: httpx.AsyncClient, out: Path | None) -> AsyncIterator[Record | None]:
    """A record of the server's metrics, kept in `out`."""
    if out is None:
        yield None
        return
    out.mkdir(parents=True, exist_ok=True)
    record = Record(client, out)
    task = asyncio.create_task(record.run())
    try:
        yield record
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def disturbed(arguments: argparse.Namespace) -> AsyncIterator[list[str]]:
    """The user's command again and again; the list fills with how each ended ("exit 0", …)."""
    ends: list[str] = []
    if not arguments.disturb:
        yield ends
        return

    async def disturb() -> None:
        while True:
            await asyncio.sleep(arguments.disturb_every)
            process = await asyncio.create_subprocess_shell(arguments.disturb, stdout=sys.stderr)
            ends.append(f"exit {await process.wait()}")

    task = asyncio.create_task(disturb())
    try:
        yield ends
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def report(outcome: Outcome, problems: list[str], elapsed_s: float) -> dict[str, Any]:
    return {
        "ok": not outcome.errors
        and not outcome.num_changed
        and not problems
        and outcome.num_streams > 0,
        "seconds": round(elapsed_s, 1),
        "streams": outcome.num_streams,
        "aborted": outcome.num_aborted,
        "errors": len(outcome.errors),
        "first_errors": outcome.errors[:3],
        "changed_streams": outcome.num_changed,
        "completion_tokens": outcome.num_tokens,
        "tokens_per_s": round(outcome.num_tokens / elapsed_s, 1),
        "median_first_token_s": _median(outcome.first_token_s),
        "median_tokens_per_s_per_user": _median(outcome.tokens_per_s),
        "baseline_problems": problems,
    }


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="endpoint under test")
    parser.add_argument("--model", default="", help="model name; default: the first one served")
    parser.add_argument("--streams", type=int, default=32, help="streams held open at once")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="how long new streams are begun"
    )
    parser.add_argument("--max-tokens", type=int, default=96, help="output tokens a stream")
    parser.add_argument(
        "--abort-share", type=float, default=0.0, help="share of streams cut by the client"
    )
    parser.add_argument("--out", default="", metavar="DIR", help="samples, picture and report")
    parser.add_argument(
        "--disturb", default="", metavar="COMMAND", help="done to the server while it is under load"
    )
    parser.add_argument(
        "--disturb-every", type=float, default=300.0, metavar="SECONDS", help="default 300"
    )
    parser.add_argument("--no-compare", action="store_true", help="do not compare the texts")
    result = asyncio.run(soak(parser.parse_args()))
    sys.stdout.write(json.dumps(result) + "\n")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
