"""Answers on the wire: as server-sent events, or in one piece."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Literal

from actors.core.logit_rules import TokenLogprobs
from cluster.answers import Answer, Piece, merged_pieces
from cluster.api_errors import ApiError
from cluster.jobs import Job
from cluster.live_stream import StreamError
from cluster.logprobs import LogprobsWriter
from cluster.openai_responses import (
    DONE_EVENT,
    NOTHING,
    Details,
    Envelope,
    WholeChoice,
    sse_event,
    usage_of,
)
from cluster.text import TextCodec
from cluster.tool_parsers import Call
from cluster.tools import ToolUse

logger = logging.getLogger(__name__)


async def event_stream(
    answers: list[Answer], envelope: Envelope, codec: TextCodec
) -> AsyncGenerator[bytes, None]:
    """The events of a streamed response; one that cannot go on ends with an error event instead of `[DONE]`."""
    if envelope.kind == "chat":
        yield b"".join(sse_event(envelope.role_chunk(i)) for i in range(len(answers)))
    for index, answer in enumerate(answers):
        if answer.job.echo:
            yield sse_event(envelope.text_chunk(index, answer.job.echo))
    details = [TokenDetails(answer.job, envelope.kind, codec) for answer in answers]
    readers = [CallReader(answer.job.tools) for answer in answers]
    try:
        async with aclosing(merged_pieces(answers)) as pieces:
            async for index, piece in pieces:
                # One write a step, however many tokens it brought.
                event = b""
                text, calls = readers[index].read(piece)
                if text or piece.token_ids:
                    about = details[index].of(piece.token_ids, piece.logprobs)
                    if text == piece.text:  # not of what a tool call holds back
                        about = {**about, **provenance_of(piece)}
                    event = sse_event(envelope.text_chunk(index, text, about))
                if calls:
                    first = len(readers[index].calls) - len(calls)
                    event += sse_event(envelope.calls_chunk(index, first, calls))
                if piece.finish_reason is not None:
                    reason = readers[index].reason(piece.finish_reason)
                    event += sse_event(envelope.finish_chunk(index, reason))
                if event:
                    yield event
    except StreamError as error:
        logger.warning("stream %s ends with an error: %s", envelope.response_id, error)
        yield sse_event({**failure_of(error).body})
        return
    if envelope.include_usage:
        yield sse_event(envelope.usage_chunk(_usage(answers)))
    yield DONE_EVENT


def provenance_of(piece: Piece) -> Details:
    """Where the tokens of a piece come from, where the client asked for it."""
    said = [list(each) for each in piece.provenance if each[0]]
    return {"dspark": {"provenance": said}} if said else NOTHING


async def whole_answer(
    answers: list[Answer], envelope: Envelope, codec: TextCodec
) -> dict[str, Any]:
    """The response in one piece.

    Raises:
        StreamError: one of the streams cannot go on.
    """
    texts = [answer.job.echo for answer in answers]
    reasons = [""] * len(answers)
    token_ids: list[list[int]] = [[] for _ in answers]
    logprobs: list[list[TokenLogprobs]] = [[] for _ in answers]
    readers = [CallReader(answer.job.tools) for answer in answers]
    async with aclosing(merged_pieces(answers)) as pieces:
        async for index, piece in pieces:
            texts[index] += readers[index].read(piece)[0]
            token_ids[index] += piece.token_ids
            logprobs[index] += piece.logprobs
            reasons[index] = readers[index].reason(piece.finish_reason or "")
    details = [TokenDetails(answer.job, envelope.kind, codec) for answer in answers]
    choices = [
        WholeChoice(texts[i], reasons[i], about.of(token_ids[i], logprobs[i]), readers[i].calls)
        for i, about in enumerate(details)
    ]
    return envelope.whole(choices, _usage(answers))


class CallReader:
    """Text and tool calls of one choice; without tools, all is text."""

    def __init__(self, tools: ToolUse | None) -> None:
        self._parser = None if tools is None else tools.reader()
        self._is_named = tools is not None and tools.is_named
        self.calls: list[dict[str, Any]] = []  # so far, as OpenAI shows them

    def read(self, piece: Piece) -> tuple[str, list[dict[str, Any]]]:
        """The text and the calls that became certain with this piece."""
        if self._parser is None:
            return piece.text, []
        found = self._parser.feed(piece.text)
        if piece.finish_reason is not None:
            found += self._parser.finish()
        calls = [_shown_call(one) for one in found if isinstance(one, Call)]
        self.calls += calls
        return "".join(one for one in found if isinstance(one, str)), calls

    def reason(self, finish_reason: str) -> str:
        ends_in_calls = bool(self.calls) and finish_reason == "stop" and not self._is_named
        return "tool_calls" if ends_in_calls else finish_reason


def _shown_call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


class TokenDetails:
    """What one choice says of its tokens beside their text."""

    def __init__(self, job: Job, kind: Literal["chat", "completion"], codec: TextCodec) -> None:
        self._shows_ids = job.shows_ids
        self._writer = (
            LogprobsWriter(kind, codec, job.hidden_ids)
            if job.order.sampling.logprobs is not None
            else None
        )

    def of(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Details:
        """Fields about the tokens that come next."""
        details: dict[str, Any] = {}
        if self._writer is not None:
            details["logprobs"] = self._writer.show(token_ids, logprobs)
        if self._shows_ids:
            details["token_ids"] = list(token_ids)
        return details


def failure_of(error: StreamError) -> ApiError:
    """What a client is told of a stream that broke off."""
    statuses = {"request_timeout": 504, "shutting_down": 503}
    return ApiError(statuses.get(error.code, 500), str(error), code=error.code)


def _usage(answers: list[Answer]) -> dict[str, Any]:
    counts = answers[0].counts
    for answer in answers[1:]:
        counts += answer.counts
    first = [answer for answer in answers if answer.job.is_first_choice]
    return usage_of(
        sum(answer.num_prompt_tokens for answer in first),
        sum(answer.num_cached_tokens for answer in first),
        sum(answer.num_tokens for answer in answers),
        counts,
    )
