"""`GET /v1/requests/{id}/explain`: what the ranks kept of a response's rounds, as one answer with a schema (C11)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field

from actors.core.step_decision import CutRule
from cluster.api_errors import ApiError, shown

AskRanks = Callable[[str], Awaitable[Mapping[str, Any]]]
"""A response's id to what each rank says of it: `core.explain.explanation`, or {"error": why it said nothing}."""


class ExplainedRound(BaseModel):
    """One draft-and-verify round."""

    step: int = Field(description="Number of the rank's step.")
    first_index: int = Field(description="Place of its first committed token in the output.")
    survivals: list[float] = Field(
        description="Probability that draft tokens 1 to k are all accepted, as the rank believed it, for each k; zeros "
        "without a block."
    )
    min_survival: float = Field(description="Price λ: lowest survival worth verifying.")
    max_draft_tokens: int = Field(description="Budget K: draft tokens the whole step might verify.")
    rule: str = Field(description="Who decided K and λ, or why nobody had to.")
    num_requests: int = Field(description="Rounds that shared the step.")
    num_proposed: int
    num_scheduled: int = Field(description="Draft tokens verified.")
    num_accepted: int
    num_committed: int = Field(description="Tokens that entered the stream.")
    cut_by: CutRule = Field(
        description="What ended the verified prefix, or why there was no block."
    )
    explored: bool = Field(
        False, description="Verified beyond its budget, to keep the confidences true."
    )


class ExplainedSegment(BaseModel):
    """What one rank did of one prompt, from its admission there to its end there."""

    rank: str
    generation: int = Field(description="Rises each time the stream is placed on a rank.")
    first_index: int = Field(description="Output tokens committed before it came to this rank.")
    num_rounds: int = Field(description="Rounds on this rank; the newest of them are kept.")
    has_ended: bool
    rounds: list[ExplainedRound]


class ExplainedChoice(BaseModel):
    """One prompt of the request."""

    index: int
    num_lost_tokens: int = Field(
        description="Output tokens whose rounds nobody can tell any more: their rank has gone."
    )
    segments: list[ExplainedSegment] = Field(description="In the order of the stream.")


class Explanation(BaseModel):
    """Why every round of a response was verified as far as it was."""

    id: str
    object: Literal["dspark.explanation"] = "dspark.explanation"
    choices: list[ExplainedChoice]
    unanswered: list[str] = Field(description="Ranks that did not answer in time.")


class _Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """An error in OpenAI's shape."""

    error: _Error


async def explain(response_id: str, ask_ranks: AskRanks) -> Explanation:
    """Ask every rank and put their answers together.

    Raises:
        ApiError: 404 for a response that nobody knows, or that kept no log; 503 when nobody could be asked.
    """
    try:
        answers = await ask_ranks(response_id)
    except Exception as error:
        raise ApiError(
            503, f"the ranks cannot be asked now ({error}); try again", code="not_ready"
        ) from error
    unanswered = sorted(rank for rank, answer in answers.items() if "error" in answer)
    told = {rank: answer for rank, answer in answers.items() if "error" not in answer}
    choices = _choices(response_id, told)
    if choices:
        return Explanation(id=response_id, choices=choices, unanswered=unanswered)
    raise _not_found(response_id, any(a["is_known"] for a in told.values()), unanswered)


def _choices(response_id: str, answers: Mapping[str, Any]) -> list[ExplainedChoice]:
    segments: dict[int, list[ExplainedSegment]] = {}
    for rank, answer in answers.items():
        for log in answer["logs"]:
            index = int(log["request_id"].removeprefix(response_id).removeprefix("-") or 0)
            segment = ExplainedSegment.model_validate({**log, "rank": rank})
            segments.setdefault(index, []).append(segment)
    choices = []
    for index, of_choice in sorted(segments.items()):
        of_choice.sort(key=lambda segment: (segment.generation, segment.first_index))
        choices.append(
            ExplainedChoice(index=index, num_lost_tokens=_num_lost(of_choice), segments=of_choice)
        )
    return choices


def _num_lost(segments: list[ExplainedSegment]) -> int:
    """Tokens before a segment that the one before it did not commit."""
    lost, reached = 0, 0
    for segment in segments:
        lost += max(0, segment.first_index - reached)
        last = segment.rounds[-1] if segment.rounds else None
        reached = last.first_index + last.num_committed if last else segment.first_index
    return lost


def _not_found(response_id: str, is_known: bool, unanswered: list[str]) -> ApiError:
    if is_known:
        return ApiError(
            404,
            f"id={shown(response_id)}: nothing was kept of its rounds; send the request with "
            '"dspark": {"explain": true}, or serve with --set policy.explain_rounds=256',
            param="id",
            code="explain_off",
        )
    silent = f" ({', '.join(unanswered)} did not answer)" if unanswered else ""
    return ApiError(
        404,
        f"id={shown(response_id)}: no rank knows this request{silent}; give the `id` of an answer of this "
        "cluster, not too long after its end",
        param="id",
        code="request_not_found",
    )
