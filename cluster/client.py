"""A small client of our own endpoint for the command line. It speaks HTTP only; any OpenAI client would do."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from cluster.console import CommandError

CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 120.0  # longest wait for the next bytes of a stream


@dataclass(frozen=True)
class Chunk:
    """Text that arrived, or (once, at the end) what the answer cost."""

    text: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    speculation: Mapping[str, int] | None = None


@dataclass
class Answer:
    """One finished answer. Times are seconds from sending the request."""

    text: str = ""
    finish_reason: str | None = None
    completion_tokens: int = 0
    num_rounds: int = 0
    num_accepted: int = 0
    elapsed_s: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Committed tokens per round, bonus included; 1 without speculation."""
        return 1 + self.num_accepted / self.num_rounds if self.num_rounds else 1.0

    @property
    def tokens_per_s(self) -> float:
        return self.completion_tokens / self.elapsed_s if self.elapsed_s else 0.0


FAILED_STREAMS = "dspark:num_failed_total{"  # in /metrics, one line for each replica


class EndpointClient:
    """Talks to `base_url` (…/v1). Raises CommandError with one line the user can act on."""

    def __init__(
        self,
        base_url: str,
        transport: httpx.BaseTransport | None = None,
        key_file: str | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        timeout = httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        # A proxy of the environment has no business between us and our own endpoint.
        headers = {} if key_file is None else {"authorization": f"Bearer {_read_key(key_file)}"}
        self._http = httpx.Client(
            timeout=timeout, transport=transport, trust_env=False, headers=headers
        )

    def __enter__(self) -> EndpointClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def models(self) -> list[str]:
        body = self._get(f"{self.base_url}/models")
        try:
            return [str(entry["id"]) for entry in body["data"]]
        except (KeyError, TypeError) as error:
            raise _not_ours(self.base_url) from error

    def health(self) -> dict[str, Any]:
        """The body of /health, whatever its status code: a cluster that is not ready says why in it."""
        url = self.base_url.removesuffix("/v1") + "/health"
        try:
            body = self._http.get(url).json()
        except httpx.HTTPError as error:
            raise _unreachable(self.base_url, error) from error
        except ValueError as error:
            raise _not_ours(self.base_url) from error
        return body if isinstance(body, dict) else {"status": body}

    def failed_streams(self) -> int:
        """Streams that ended with an error event, since the replicas started.

        Raises:
            CommandError: the endpoint cannot be reached, or does not tell.
        """
        try:
            response = self._http.get(f"{self.base_url.removesuffix('/v1')}/metrics")
        except httpx.HTTPError as error:
            raise _unreachable(self.base_url, error) from error
        if response.status_code != httpx.codes.OK:
            raise _not_ours(self.base_url)
        lines = (line for line in response.text.splitlines() if line.startswith(FAILED_STREAMS))
        return sum(int(float(line.split()[-1])) for line in lines)

    def explain(self, response_id: str) -> dict[str, Any]:
        """What the cluster kept of the rounds of a response (`cluster.explanations.Explanation`)."""
        body = self._get(f"{self.base_url}/requests/{quote(response_id, safe='')}/explain")
        if not isinstance(body, dict) or "choices" not in body:
            raise _not_ours(self.base_url)
        return body

    def choose_model(self, wanted: str | None) -> str:
        """The model to ask for: `wanted` if it is served, else the only one there is."""
        served = self.models()
        if wanted is None:
            if not served:
                raise CommandError(f"{self.base_url} serves no model yet; see `dspark status`")
            return served[0]
        if wanted not in served:
            raise CommandError(f"model {wanted!r} is not served here; served: {', '.join(served)}")
        return wanted

    def stream_chat(
        self,
        model: str,
        messages: Sequence[Mapping[str, str]],
        *,
        speculation: bool | None = True,
        **parameters: Any,
    ) -> Generator[Chunk, None, None]:
        """Chunks of one chat answer. Closing the iterator early cancels the request on the server.

        `speculation=None` leaves our own field out, for servers that are not ours.
        """
        ours = {} if speculation is None else {"dspark": {"speculation": speculation}}
        return self._stream(
            "/chat/completions", model, {"messages": list(messages), **ours, **parameters}
        )

    def stream_text(
        self, model: str, prompt: str, **parameters: Any
    ) -> Generator[Chunk, None, None]:
        """Chunks of one text completion."""
        return self._stream("/completions", model, {"prompt": prompt, **parameters})

    def _stream(
        self, path: str, model: str, parameters: Mapping[str, Any]
    ) -> Generator[Chunk, None, None]:
        body = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in parameters.items() if value is not None},
        }
        try:
            url = f"{self.base_url}{path}"
            with self._http.stream("POST", url, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise _refused(response)
                yield from _chunks(response.iter_lines())
        except httpx.HTTPError as error:
            raise _unreachable(self.base_url, error) from error

    def _get(self, url: str) -> Any:
        try:
            response = self._http.get(url)
        except httpx.HTTPError as error:
            raise _unreachable(self.base_url, error) from error
        if response.status_code != httpx.codes.OK:
            raise _refused(response)
        try:
            return response.json()
        except ValueError as error:
            raise _not_ours(self.base_url) from error


def _read_key(path: str) -> str:
    """From a file, because what stands on a command line can be seen by everybody on the machine."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--api-key-file {path}: not readable ({error})") from error


def collect(
    chunks: Iterator[Chunk], show: Callable[[str], None], into: Answer | None = None
) -> Answer:
    """Drain a stream into an `Answer`; `show` sees each piece of text as it comes.

    With `into`, what had arrived is kept there even when the stream is broken off.
    """
    answer, started = into or Answer(), time.perf_counter()
    for chunk in chunks:
        if chunk.text:
            answer.text += chunk.text
            show(chunk.text)
        answer.finish_reason = chunk.finish_reason or answer.finish_reason
        if chunk.text or chunk.finish_reason:
            answer.elapsed_s = time.perf_counter() - started
        if chunk.usage is not None:
            answer.completion_tokens = int(chunk.usage.get("completion_tokens", 0))
        if chunk.speculation is not None:
            answer.num_rounds = int(chunk.speculation.get("num_rounds", 0))
            answer.num_accepted = int(chunk.speculation.get("num_accepted", 0))
    return answer


def _chunks(lines: Iterator[str]) -> Iterator[Chunk]:
    """Server-sent events → chunks. A stream that does not end in [DONE] was cut, and says so."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise CommandError(f"the stream ended with an error: {_message(event)}")
        choice = event["choices"][0] if event.get("choices") else {}
        usage = event.get("usage")
        yield Chunk(
            text=(choice.get("delta") or {}).get("content") or choice.get("text") or "",
            finish_reason=choice.get("finish_reason"),
            usage=usage,
            speculation=event.get("dspark") or (usage or {}).get("dspark"),
        )
    raise CommandError("the stream was cut before its end; see the log of `dspark serve`")


def _refused(response: httpx.Response) -> CommandError:
    try:
        reason = _message(response.json())
    except ValueError:
        reason = response.text[:200]
    return CommandError(f"the endpoint answered {response.status_code}: {reason}")


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _unreachable(base_url: str, error: Exception) -> CommandError:
    reason = str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return CommandError(
            f"no answer from {base_url} ({reason}); start a cluster with `dspark serve`"
        )
    if isinstance(error, httpx.ReadTimeout):
        reason = f"silent for {SILENCE_TIMEOUT_S:g} s"
    return CommandError(f"the connection to {base_url} broke ({reason}); see `dspark status`")


def _not_ours(base_url: str) -> CommandError:
    return CommandError(f"{base_url} does not answer like an OpenAI endpoint; check the address")
