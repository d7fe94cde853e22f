"""The messages of a chat as its template wants them; tools too, whether the template knows of them or not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cluster.api_errors import ApiError
from cluster.openai_api import ChatMessage
from cluster.tools import Tool, described, written_calls


def template_messages(
    messages: Sequence[ChatMessage], tools: Sequence[Tool], parser: str, *, knows_tools: bool
) -> list[dict[str, Any]]:
    """What `TextCodec.render_chat` takes.

    Raises:
        ApiError: the arguments of an earlier call are not JSON.
    """
    if knows_tools:
        return [_as_it_is(message, index) for index, message in enumerate(messages)]
    plain = [_in_words(message, parser) for message in messages]
    if not tools:
        return plain
    if plain and plain[0]["role"] == "system":
        first, *rest = plain
        return [{**first, "content": f"{first['content']}\n\n{described(tools)}"}, *rest]
    return [{"role": "system", "content": described(tools)}, *plain]


def _role(message: ChatMessage) -> str:
    return "system" if message.role == "developer" else message.role


def _as_it_is(message: ChatMessage, index: int) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": _role(message), "content": message.text}
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        calls = []
        for number, call in enumerate(message.tool_calls):
            field = f"messages[{index}].tool_calls[{number}].function.arguments"
            try:
                arguments = json.loads(call.function.arguments)
            except ValueError as error:
                raise ApiError(
                    400, f"{field}: not JSON; send a JSON object as text", param=field
                ) from error
            function = {"name": call.function.name, "arguments": arguments}
            calls.append({"id": call.id, "type": "function", "function": function})
        shown["tool_calls"] = calls
    return shown


def _in_words(message: ChatMessage, parser: str) -> dict[str, Any]:
    text = message.text
    if message.tool_calls:
        calls = written_calls(message.tool_calls, parser)
        text = f"{text}\n{calls}" if text else calls
    if message.role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    return {"role": _role(message), "content": text}
