"""The real HTTP front under uvicorn on loopback, with scripted ranks in the same process instead of Ray."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from actors.core.logit_rules import TokenLogprobs
from actors.core.messages import (
    AbortRequest,
    AdmittedRequest,
    Endpoint,
    FinishReason,
    RankRoute,
    ReservationReply,
    Reserve,
    RoutingTable,
    TokenDelta,
    TokenDeltas,
)
from actors.link import Link, LocalHub
from cluster.dispatcher import Dispatcher, DispatchLimits
from cluster.ingress import Front, build_app
from cluster.intake import Intake
from cluster.jobs import IntakeLimits
from cluster.live_stream import StreamLimits
from cluster.served_model import Access, ServedModel
from cluster.text import TextCodec

MODEL = "tiny-bytes"
MAX_MODEL_LEN = 512
TEXT = "The quick brown fox jumps over the lazy dög, twice."
CHAT_PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_codec() -> TextCodec:
    """A byte-level tokenizer without merges: every byte is a token, so characters split across tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t) for t in ("<|im_start|>", "<|im_end|>")])
    eos = tokenizer.token_to_id("<|im_end|>")
    return TextCodec(tokenizer, eos_token_ids=(eos,), chat_template=TEMPLATE)


def wait_until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    """For conditions that another thread brings about."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "the condition did not come true in time"
        time.sleep(0.005)


class ScriptedRank:
    """Answers like a target rank: token i of every stream is `script[i]`. Knobs may be turned while it runs."""

    def __init__(self, link: Link, script: list[int]) -> None:
        self.name = link.endpoint.name
        self.link = link
        self.script = script
        self.finish: FinishReason = "stop"
        self.grant = True
        self.num_grants = 10**6  # after so many it refuses
        self.retry_after_s = 2.0
        self.answers_reservations = True
        self.tokens_a_step = 3
        self.step_s = 0.0
        self.num_tokens_before_pause: int | None = None
        self.lost_indices: set[int] = set()  # a delta that starts there is lost, once
        self.reserves: list[Reserve] = []
        self.admitted: list[AdmittedRequest] = []
        self.aborted: list[AbortRequest] = []
        self._running: dict[str, tuple[AdmittedRequest, int, int]] = {}  # next index, rounds
        self._ended: dict[str, int] = {}  # last generation, as a real rank remembers it
        self._killed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> Endpoint:
        return self.link.endpoint

    def kill(self) -> None:
        """The process is gone: nothing is received or sent any more."""
        self._killed = True
        self.link.wake()
        self._thread.join()
        self.link.close()

    def say(self, request: AdmittedRequest, *deltas: TokenDelta) -> None:
        self.link.send(request.reply_to, TokenDeltas(self.name, self.endpoint.epoch, 0, deltas))

    def _run(self) -> None:
        while not self._killed:
            for message in self.link.poll(self.step_s if self._running else 0.05):
                self._on(message)
            self._step()

    def _on(self, message: object) -> None:
        match message:
            case Reserve():
                self.reserves.append(message)
                if self.answers_reservations:
                    self.num_grants -= 1
                    granted = self.grant and self.num_grants >= 0
                    reason = "" if granted else "no free KV blocks"
                    self.link.send(
                        message.reply_to,
                        ReservationReply(
                            self.name, message.request_id, granted, reason, self.retry_after_s
                        ),
                    )
            case AdmittedRequest():
                self.admitted.append(message)
                if message.generation > self._ended.get(message.request_id, -1):
                    start = (message, message.num_prior_tokens, 0)
                    self._running.setdefault(message.request_id, start)
            case AbortRequest():
                self.aborted.append(message)
                self._ended[message.request_id] = message.generation
                running = self._running.get(message.request_id)
                if running is not None and running[0].generation == message.generation:
                    del self._running[message.request_id]

    def _logprobs(
        self, request: AdmittedRequest, index: int, end: int
    ) -> tuple[TokenLogprobs, ...]:
        """Token i has -i / 8, the one after it in the vocabulary a little less, and so on."""
        order = request.sampling.logprobs
        if order is None:
            return ()
        tops = range(order.num_top)
        return tuple(
            TokenLogprobs(
                -i / 8,
                tuple((self.script[i] + k) % 256 for k in tops),
                tuple(-i / 8 - k for k in tops),
            )
            for i in range(index, end)
        )

    def _step(self) -> None:
        deltas: dict[str, list[TokenDelta]] = {}
        replies: dict[str, AdmittedRequest] = {}
        for request_id, (request, index, rounds) in list(self._running.items()):
            end = min(index + self.tokens_a_step, len(self.script), request.max_new_tokens)
            if self.num_tokens_before_pause is not None:
                end = min(end, max(index, self.num_tokens_before_pause))
            finish = None
            if end == request.max_new_tokens:
                finish = "length"
            elif end == len(self.script):
                finish = self.finish
            if end == index and finish is None:
                continue
            rounds += 1
            delta = TokenDelta(
                request_id,
                request.generation,
                index,
                tuple(self.script[index:end]),
                finish,
                num_rounds=rounds,
                num_proposed=5 * rounds,
                num_scheduled=4 * rounds,
                num_accepted=2 * rounds,
                logprobs=self._logprobs(request, index, end),
            )
            if index in self.lost_indices:
                self.lost_indices.remove(index)
            else:
                deltas.setdefault(request.reply_to.uri, []).append(delta)
                replies[request.reply_to.uri] = request
            self._running[request_id] = (request, end, rounds)
            if finish is not None:
                del self._running[request_id]
        for uri, of_one_ingress in deltas.items():
            self.say(replies[uri], *of_one_ingress)


@dataclass
class Server:
    """A running front and everything behind it."""

    url: str
    codec: TextCodec
    hub: LocalHub
    ranks: list[ScriptedRank]
    dispatcher: Dispatcher
    front: Front
    client: httpx.AsyncClient
    tables: list[RoutingTable]
    said: (
        dict[str, Any] | None
    )  # what each rank says of any request's rounds; None: cannot be asked

    async def ask_ranks(self, _: str) -> dict[str, Any]:
        if self.said is None:
            raise ConnectionError("the supervisor is away")
        return self.said

    def publish(self, **states: str) -> None:
        """A new routing table; ranks not named are ready, `rank="gone"` leaves it out."""
        routes = tuple(
            RankRoute(rank.endpoint, states.get(rank.name, "ready"))  # type: ignore[arg-type]
            for rank in self.ranks
            if states.get(rank.name) != "gone"
        )
        self.tables.append(RoutingTable(self.tables[-1].version + 1, routes))

    async def until(self, condition: Callable[[], object], timeout_s: float = 5.0) -> None:
        await asyncio.to_thread(wait_until, condition, timeout_s)

    def ids(self, text: str) -> list[int]:
        return self.codec.encode(text, add_special_tokens=False)


@contextlib.asynccontextmanager
async def serving(front: Front) -> AsyncIterator[str]:
    """The front under uvicorn; yields its URL."""
    config = uvicorn.Config(
        build_app(front), "127.0.0.1", 0, log_level="error", lifespan="off", ws="none"
    )
    http = uvicorn.Server(config)
    task = asyncio.create_task(http.serve())
    while not http.started:
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{http.servers[0].sockets[0].getsockname()[1]}"
    finally:
        http.should_exit = True
        await task


@contextlib.asynccontextmanager
async def launched(
    codec: TextCodec,
    num_ranks: int = 1,
    text: str = TEXT,
    *,
    request_timeout_s: float = 30.0,
    reservation_timeout_s: float = 2.0,
    access: Access | None = None,
    max_model_len: int = MAX_MODEL_LEN,
    **stream_limits: float,
) -> AsyncIterator[Server]:
    """A front and its scripted ranks, all ready."""
    hub = LocalHub()
    script = codec.encode(text, add_special_tokens=False) + list(codec.eos_token_ids)
    ranks = [ScriptedRank(hub.open(f"rank-{i}", "target"), script) for i in range(num_ranks)]
    link = hub.open("ingress-0", "ingress")
    tables: list[RoutingTable] = [RoutingTable(0)]

    async def routing(_seen: int) -> RoutingTable:
        return tables[-1]

    limits = StreamLimits(**{"replay_timeout_s": 3.0, **stream_limits})
    dispatcher = Dispatcher(link, routing, DispatchLimits(reservation_timeout_s, 0.05, limits))
    intake = Intake(
        codec, IntakeLimits(MODEL, max_model_len, max_model_len // 8, 4, max_request_tokens=5000)
    )
    front = Front(
        ServedModel(MODEL, 1, "fp_test", max_model_len),
        intake,
        dispatcher,
        request_timeout_s,
        lambda response_id: server.ask_ranks(response_id),
        access,
    )
    async with serving(front) as url, httpx.AsyncClient(base_url=url, timeout=20.0) as client:
        server = Server(url, codec, hub, ranks, dispatcher, front, client, tables, {})
        server.publish()
        await dispatcher.start()
        while dispatcher.router.table.version < 1:
            await asyncio.sleep(0.005)
        try:
            yield server
        finally:
            await dispatcher.stop()
            for rank in server.ranks:
                rank.kill()
            link.close()
