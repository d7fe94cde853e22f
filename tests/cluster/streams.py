"""Greedy streams over HTTP, as a client far from the cluster reads them."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

SILENCE_S = 150.0  # longer than a host may take to be missed, with room for a busy machine


@dataclass
class Stream:
    """What one client has seen so far."""

    prompt: list[int] | str
    tokens: list[int] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False
    error: str = ""
    longest_pause_s: float = 0.0


class Load:
    """Streams of the same length, one for each prompt, read by a thread of its own."""

    def __init__(
        self, endpoint: str, model: str, prompts: Sequence[list[int] | str], num_tokens: int
    ) -> None:
        self._endpoint, self._model, self._num_tokens = endpoint, model, num_tokens
        self.streams = [Stream(prompt) for prompt in prompts]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._read_all()), daemon=True)

    def start(self) -> Load:
        self._thread.start()
        return self

    @property
    def num_begun(self) -> int:
        return sum(len(stream.tokens) > 0 for stream in self.streams)

    @property
    def num_done(self) -> int:
        return sum(stream.is_done for stream in self.streams)

    @property
    def num_tokens(self) -> int:
        return sum(len(stream.tokens) for stream in self.streams)

    def until(self, condition: Callable[[], bool]) -> None:
        """Return when it holds, or when all streams have ended."""
        while self._thread.is_alive() and not condition():
            time.sleep(0.02)

    def finish(self) -> list[Stream]:
        """Wait for the last one; raises AssertionError for one that broke."""
        self._thread.join()
        broken = [f"{s.prompt!r}: {s.error or 'cut'}" for s in self.streams if not s.is_done]
        assert not broken, "\n".join(broken)
        return self.streams

    async def _read_all(self) -> None:
        timeout = httpx.Timeout(SILENCE_S, connect=10)
        async with httpx.AsyncClient(timeout=timeout, trust_env=False) as client:
            await asyncio.gather(*(self._read(client, stream) for stream in self.streams))

    async def _read(self, client: httpx.AsyncClient, stream: Stream) -> None:
        body = {
            "model": self._model,
            "prompt": stream.prompt,
            "max_tokens": self._num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with client.stream("POST", f"{self._endpoint}/completions", json=body) as answer:
                if answer.status_code != 200:
                    stream.error = (await answer.aread()).decode()
                    return
                last = time.monotonic()
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        stream.longest_pause_s = max(
                            stream.longest_pause_s, time.monotonic() - last
                        )
                        last = time.monotonic()
                        _take(stream, line.removeprefix("data: "))
        except httpx.HTTPError as error:
            stream.error = repr(error)


def _take(stream: Stream, data: str) -> None:
    if data == "[DONE]":
        stream.is_done = not stream.error
        return
    event = json.loads(data)
    if "error" in event:
        stream.error = str(event["error"])
        return
    for choice in event["choices"]:
        stream.tokens += choice.get("token_ids") or []
    stream.usage = event.get("usage") or stream.usage


def prompts(count: int, seed: int, vocab_size: int) -> list[list[int]]:
    """Token ids, no two prompts alike; the first few ids of a vocabulary are special."""
    rng = random.Random(seed)
    return [
        [rng.randrange(3, vocab_size) for _ in range(rng.randint(20, 40))] for _ in range(count)
    ]
