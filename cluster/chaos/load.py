"""The clients of a storm: they stream, hang up when they are told to, and retry what may be retried."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from cluster.chaos.history import Event, History

PROMPTS = (
    "Write a function that reverses a list.",
    "Why is the sky blue?",
    "Name five uses of a paper clip.",
    "What is 17 times 23?",
    "Tell a story about a fox.",
    "Count orders per customer in SQL.",
)
MIN_TOKENS, MAX_TOKENS = 48, 140
SILENCE_S = 240.0  # longer than a stream may wait for a rank
GIVE_UP_S = 300.0  # a client's patience with one request
FINISH_S = 300.0
RETRY_S = 0.5
LEARN_AT_ONCE = 4
_RETRIED = ("refused", "broken", "status")


class UndisturbedError(RuntimeError):
    """Before the storm has begun, a stream does not end as it should."""


@dataclass(frozen=True)
class Request:
    """One of the requests that clients send again and again; seeded, or greedy without a seed."""

    number: int
    prompt: str
    max_tokens: int
    seed: int | None

    def body(self, model: str, **more: Any) -> dict[str, Any]:
        law = {"temperature": 0} if self.seed is None else {"temperature": 1.0, "seed": self.seed}
        return {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,  # so that every stream is as long as it was asked to be
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **law,
            **more,
        }


def make_requests(seed: int) -> list[Request]:
    """Every prompt greedily and seeded, each of its own length."""
    rng = random.Random(seed)
    asked = itertools.product(PROMPTS, (False, True))
    return [
        Request(number, prompt, rng.randint(MIN_TOKENS, MAX_TOKENS), 100 + number if seeded else None)
        for number, (prompt, seeded) in enumerate(asked)
    ]  # fmt: skip


@dataclass
class _Live:
    task: asyncio.Task[Event]
    num_tokens: int = 0
    is_leaving: bool = False


@dataclass
class Load:
    """Many clients of one endpoint.

    Args:
        url: of the API (…/v1).
        model: its name there.
        requests: what is asked.
        history: where everything is noted.
        seed: of which request comes next.
        transport: in place of the network.
    """

    url: str
    model: str
    requests: Sequence[Request]
    history: History
    seed: int
    transport: httpx.AsyncBaseTransport | None = None
    _live: dict[str, _Live] = field(default_factory=dict)
    _users: list[asyncio.Task[None]] = field(default_factory=list)
    _chains: itertools.count[int] = field(default_factory=itertools.count)
    _is_over: bool = False

    def __post_init__(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(SILENCE_S, connect=10.0)
        self._http = httpx.AsyncClient(
            base_url=self.url,
            timeout=timeout,
            limits=limits,
            trust_env=False,
            transport=self.transport,
        )

    @property
    def num_live(self) -> int:
        """Streams that have brought a token and are not over."""
        return sum(live.num_tokens > 0 for live in self._live.values())

    @property
    def num_open(self) -> int:
        """Streams that are asked for and not over."""
        return len(self._live)

    async def learn(self) -> None:
        """What an undisturbed cluster answers, without speculation.

        Raises:
            UndisturbedError: it does not answer as it should.
        """
        gate = asyncio.Semaphore(LEARN_AT_ONCE)

        async def learn_one(request: Request) -> None:
            token_ids: list[int] = []
            async with gate:
                end = await self._read(request, token_ids, dspark={"speculation": False})
            if end["how"] != "complete" or len(token_ids) != request.max_tokens:
                raise UndisturbedError(
                    f"an undisturbed stream ended {end} after {len(token_ids)} tokens"
                )
            self.history.note("expected", request=request.number, token_ids=token_ids)

        await asyncio.gather(*map(learn_one, self.requests))

    def begin(self, num_streams: int) -> None:
        """So many streams at any time from now on."""
        for number in range(num_streams):
            user = self._use(random.Random(f"{self.seed} {number}"))
            self._users.append(asyncio.create_task(user))

    async def crowd(self, count: int, rng: random.Random) -> None:
        """So many more long streams, once; returns when they are over."""
        longest = sorted(self.requests, key=lambda request: -request.max_tokens)
        asked = longest[: (len(longest) + 1) // 2]
        await asyncio.gather(*(self._ask(rng.choice(asked)) for _ in range(count)))

    def hang_up(self, rng: random.Random) -> list[str]:
        """Half of the open streams are left by their clients; returns their names."""
        names = [name for name, live in self._live.items() if not live.is_leaving]
        chosen = rng.sample(names, (len(names) + 1) // 2)
        for name in chosen:
            self._live[name].is_leaving = True
            self._live[name].task.cancel()
        return chosen

    async def finish(self) -> None:
        """Nothing new; wait for what runs, up to a bound."""
        self._is_over = True
        done, late = await asyncio.wait(self._users, timeout=FINISH_S)
        for user in late:
            user.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        await self._http.aclose()
        for user in done:
            user.result()  # an error of ours

    async def _use(self, rng: random.Random) -> None:
        while not self._is_over:
            await self._ask(rng.choice(self.requests))

    async def _ask(self, request: Request) -> None:
        """One request of one client, with its retries."""
        chain, patient_until = f"c{next(self._chains)}", time.monotonic() + GIVE_UP_S
        for attempt in itertools.count():
            end = await self._attempt(request, chain, f"{chain}.{attempt}")
            if end["how"] not in _RETRIED or time.monotonic() > patient_until:
                return
            await asyncio.sleep(max(RETRY_S, min(float(end.get("retry_after_s") or 0), 5.0)))

    async def _attempt(self, request: Request, chain: str, stream: str) -> Event:
        self.history.note("open", stream=stream, request=request.number, chain=chain)
        task = asyncio.create_task(self._read(request, [], stream))
        live = self._live[stream] = _Live(task)
        try:
            end = await task
        except asyncio.CancelledError:
            if not live.is_leaving:
                raise
            end = {"how": "aborted"}
        finally:
            del self._live[stream]
        self.history.note("end", stream=stream, **end)
        return end

    async def _read(
        self, request: Request, token_ids: list[int], stream: str = "", **more: Any
    ) -> Event:
        """One response to its end, whatever that is; what `History` calls an end."""
        body, usage = request.body(self.model, **more), dict[str, Any]()
        try:
            async with self._http.stream("POST", "/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    return _refusal(response, await response.aread())
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        return {
                            "how": "complete",
                            "completion_tokens": usage.get("completion_tokens"),
                        }
                    if not line.startswith("data: "):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        return {"how": "error", "detail": json.dumps(event["error"])[:300]}
                    usage = event.get("usage") or usage
                    fresh = [i for choice in event["choices"] for i in choice.get("token_ids", ())]
                    token_ids += fresh
                    if fresh and stream:
                        self._live[stream].num_tokens += len(fresh)
                        self.history.note("tokens", stream=stream, token_ids=fresh)
        except httpx.HTTPError as error:
            return {"how": "broken", "detail": f"{type(error).__name__}: {error}"[:300]}
        return {"how": "cut", "detail": f"after {len(token_ids)} tokens"}


def _refusal(response: httpx.Response, content: bytes) -> Event:
    status, after = response.status_code, response.headers.get("retry-after")
    try:
        is_ours = "message" in json.loads(content)["error"]
    except (ValueError, KeyError, TypeError):
        is_ours = False
    detail = f"{status} {content[:200].decode(errors='replace')}"
    if is_ours and after is not None and status in (429, 503):
        return {"how": "refused", "detail": detail, "retry_after_s": float(after)}
    return {"how": "status", "status": status, "detail": detail}
