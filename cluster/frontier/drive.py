"""One cell against one endpoint: a closed loop that keeps its streams in flight until a list of requests is served."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cluster.client import Chunk, EndpointClient
from cluster.console import CommandError
from cluster.frontier.rates import StreamSample
from cluster.frontier.workload import Request

COMPLETIONS = "/completions"
CHAT = "/chat/completions"
OpenClient = Callable[[], EndpointClient]


class Server:
    """An endpoint to be measured, ours or a peer's.

    Args:
        url: base (…/v1), or the whole address of `/completions` or `/chat/completions`. Chat unless it says otherwise.
        model: to ask for; None: the one that is served.
        is_peer: nothing of ours is put into its requests.
        open_client: for tests.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        is_peer: bool = False,
        open_client: Callable[[str], EndpointClient] = EndpointClient,
    ) -> None:
        self._is_chat = url.endswith(CHAT) or not url.endswith(COMPLETIONS)
        base = url.removesuffix(CHAT).removesuffix(COMPLETIONS)
        self._open: OpenClient = lambda: open_client(base)
        self._is_peer = is_peer
        self._model = model

    def stream(
        self, client: EndpointClient, request: Request, temperature: float
    ) -> Iterator[Chunk]:
        if self._model is None:
            self._model = client.choose_model(None)
        parameters: dict[str, Any] = {
            "temperature": temperature,
            "max_tokens": request.max_tokens,
            "seed": request.seed if temperature > 0 else None,
        }
        if not self._is_chat:
            return client.stream_text(self._model, request.prompt, **parameters)
        messages = [{"role": "user", "content": request.prompt}]
        speculation = None if self._is_peer else True
        return client.stream_chat(self._model, messages, speculation=speculation, **parameters)

    def serve(
        self, requests: Sequence[Request], concurrency: int, temperature: float
    ) -> list[StreamSample]:
        """Serve the list with `concurrency` streams in flight; a sample for each request, in their order."""
        loop = _ClosedLoop(self, requests, temperature)
        threads = [threading.Thread(target=loop.run, daemon=True) for _ in range(concurrency)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return loop.samples()

    def open(self) -> EndpointClient:
        return self._open()


class _ClosedLoop:
    """What the slots share: the next request, the clock, and what came of it."""

    def __init__(self, server: Server, requests: Sequence[Request], temperature: float) -> None:
        self._server = server
        self._requests = requests
        self._temperature = temperature
        self._next = iter(enumerate(requests))
        self._lock = threading.Lock()
        self._samples: dict[int, StreamSample] = {}
        self._started = time.perf_counter()

    def run(self) -> None:
        """One slot, with a connection of its own."""
        with self._server.open() as client:
            while True:
                with self._lock:
                    index, request = next(self._next, (-1, None))
                if request is None:
                    return
                self._samples[index] = self._follow(client, index, request)

    def _follow(self, client: EndpointClient, index: int, request: Request) -> StreamSample:
        sent = self._now()
        try:
            chunks = self._server.stream(client, request, self._temperature)
            return self._read(chunks, index, sent)
        except CommandError as error:
            return StreamSample(index, sent, error=str(error))
        except Exception as error:  # a slot that ends silently would let the others flatter
            return StreamSample(index, sent, error=f"{type(error).__name__}: {error}")

    def _read(self, chunks: Iterator[Chunk], index: int, sent: float) -> StreamSample:
        text, reason = "", None
        first = last = None
        usage: dict[str, Any] | None = None
        counts: dict[str, int] = {}
        for chunk in chunks:
            if chunk.text or chunk.finish_reason:
                last = self._now()
                first = last if first is None else first
            text += chunk.text
            reason = chunk.finish_reason or reason
            usage = dict(chunk.usage) if chunk.usage is not None else usage
            counts = dict(chunk.speculation) if chunk.speculation is not None else counts
        if usage is None or "completion_tokens" not in usage:
            raise CommandError("the stream carried no usage: tokens cannot be counted")
        if first is None or last is None:
            raise CommandError("the stream carried neither text nor an end")
        tokens = int(usage["completion_tokens"])
        said = hashlib.sha256(f"{tokens}|{reason}|{text}".encode()).hexdigest()[:16]
        return StreamSample(
            index,
            sent,
            first,
            last,
            tokens,
            num_rounds=counts.get("num_rounds", 0),
            num_scheduled=counts.get("num_scheduled", 0),
            num_accepted=counts.get("num_accepted", 0),
            digest=said,
        )

    def _now(self) -> float:
        return time.perf_counter() - self._started

    def samples(self) -> list[StreamSample]:
        return [self._samples[index] for index in range(len(self._requests))]
