"""Answers on the wire: as server-sent events, or in one piece."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from cluster.answers import Answer, merged_pieces
from cluster.live_stream import StreamError
from cluster.openai_api import ApiError
from cluster.openai_responses import DONE_EVENT, Envelope, sse_event, usage_of

logger = logging.getLogger(__name__)


async def event_stream(answers: list[Answer], envelope: Envelope) -> AsyncGenerator[bytes, None]:
    """The events of a streamed response; one that cannot go on ends with an error event instead of `[DONE]`."""
    if envelope.kind == "chat":
        yield b"".join(sse_event(envelope.role_chunk(i)) for i in range(len(answers)))
    try:
        async with aclosing(merged_pieces(answers)) as pieces:
            async for index, piece in pieces:
                # One write a step, however many tokens it brought.
                text = sse_event(envelope.text_chunk(index, piece.text)) if piece.text else b""
                if piece.finish_reason is not None:
                    text += sse_event(envelope.finish_chunk(index, piece.finish_reason))
                yield text
    except StreamError as error:
        logger.warning("stream %s ends with an error: %s", envelope.response_id, error)
        yield sse_event({**failure_of(error).body})
        return
    if envelope.include_usage:
        yield sse_event(envelope.usage_chunk(_usage(answers)))
    yield DONE_EVENT


async def whole_answer(answers: list[Answer], envelope: Envelope) -> dict[str, Any]:
    """The response in one piece.

    Raises:
        StreamError: one of the streams cannot go on.
    """
    texts = [""] * len(answers)
    reasons = [""] * len(answers)
    async with aclosing(merged_pieces(answers)) as pieces:
        async for index, piece in pieces:
            texts[index] += piece.text
            reasons[index] = piece.finish_reason or ""
    return envelope.whole(list(zip(texts, reasons, strict=True)), _usage(answers))


def failure_of(error: StreamError) -> ApiError:
    """What a client is told of a stream that broke off."""
    statuses = {"request_timeout": 504, "shutting_down": 503}
    return ApiError(statuses.get(error.code, 500), str(error), code=error.code)


def _usage(answers: list[Answer]) -> dict[str, Any]:
    counts = answers[0].counts
    for answer in answers[1:]:
        counts += answer.counts
    num_prompt = sum(answer.num_prompt_tokens for answer in answers)
    return usage_of(num_prompt, sum(answer.num_tokens for answer in answers), counts)
