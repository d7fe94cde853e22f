"""/tokenize and /detokenize, in the shapes that vLLM gave them."""

from __future__ import annotations

from typing import Any

from cluster.api_errors import ApiError, bad_request
from cluster.intake import Intake
from cluster.openai_api import DetokenizeRequest, TokenizeRequest


def tokenize(intake: Intake, request: TokenizeRequest) -> dict[str, Any]:
    """Token ids of a prompt, or of a chat as the model's template renders it.

    Raises:
        ApiError: neither or both are given, another model, or what the template refuses.
    """
    intake.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(
            400, "prompt: give either prompt or messages", param="prompt", code="invalid_value"
        )
    if request.prompt is None:
        token_ids = intake.chat_prompt(request)
    else:
        adds = request.add_special_tokens is not False
        token_ids = intake.tokenise_prompt(request.prompt, add_special_tokens=adds)
    answer: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": intake.limits.max_model_len,
        "tokens": token_ids,
    }
    if request.return_token_strs:
        answer["token_strs"] = [
            intake.codec.token_bytes(token_id).decode(errors="replace") for token_id in token_ids
        ]
    return answer


def detokenize(intake: Intake, request: DetokenizeRequest) -> dict[str, Any]:
    """The text of token ids, special tokens included.

    Raises:
        ApiError: another model, too many ids, or one that is no token.
    """
    intake.check_model(request.model)
    most = intake.limits.max_request_tokens
    if len(request.tokens) > most:
        raise bad_request("tokens", len(request.tokens), f"give at most {most} ids")
    return {"prompt": intake.codec.decode(intake.checked_ids("tokens", request.tokens))}
