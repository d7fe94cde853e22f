"""`GET /v1/requests/{id}/explain`: from real rank decisions to one answer with a schema, and typed refusals."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.explanations import Explanation
from tests.http.harness import CHAT, CHAT_PATH
from tests.pure.explained import a_log, a_round

KEPT = {**CHAT, "dspark": {"explain": True}, "max_tokens": 30}


def told(*logs: Any) -> dict[str, Any]:
    return {"is_known": True, "logs": list(logs)}


NOTHING = {"is_known": False, "logs": []}


async def test_the_body_asks_the_rank_to_keep_a_log(launch):
    async with launch() as server:
        await server.client.post(CHAT_PATH, json=KEPT)
        await server.client.post(CHAT_PATH, json=CHAT)
        assert [request.explain for request in server.ranks[0].admitted] == [True, False]
        refused = await server.client.post(CHAT_PATH, json={**CHAT, "dspark": {"explain": "yes"}})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "dspark.explain"


async def test_segments_of_several_ranks_are_in_the_order_of_the_stream(launch):
    async with launch() as server:
        server.said["rank-1"] = told(a_log("chatcmpl-1", 1, 7, a_round(8, 2), a_round(10, 1)))
        server.said["rank-0"] = told(a_log("chatcmpl-1", 0, 0, a_round(1, 2), a_round(3, 1)))
        server.said["rank-2"] = NOTHING
        answer = await server.client.get("/v1/requests/chatcmpl-1/explain")
    assert answer.status_code == 200
    body = Explanation.model_validate(answer.json())
    (choice,) = body.choices
    assert [(s.rank, s.generation) for s in choice.segments] == [("rank-0", 0), ("rank-1", 1)]
    assert choice.segments[0].rounds[0].survivals == [0.9, 0.5]
    # rank-0 was heard of up to token 3, but rank-1 began at 7: three tokens nobody can explain.
    assert choice.num_lost_tokens == 3
    assert body.unanswered == []


async def test_every_prompt_is_a_choice_of_its_own(launch):
    async with launch() as server:
        server.said["rank-0"] = told(
            a_log("cmpl-7-1", 0, 0), a_log("cmpl-7-0", 0, 0, a_round(1, 1))
        )
        server.said["rank-1"] = told(a_log("cmpl-7-10", 0, 0))
        body = (await server.client.get("/v1/requests/cmpl-7/explain")).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 10]


async def test_a_rank_that_does_not_answer_is_named(launch):
    async with launch() as server:
        server.said["rank-0"] = told(a_log("a", 0, 0, a_round(1, 1)))
        server.said["rank-1"] = {"error": "TimeoutError()"}
        body = (await server.client.get("/v1/requests/a/explain")).json()
    assert body["unanswered"] == ["rank-1"]


@pytest.mark.parametrize(
    ("said", "code", "remedy"),
    [
        (NOTHING, "request_not_found", "give the `id` of an answer"),
        (told(), "explain_off", '"dspark": {"explain": true}'),
        ({"error": "TimeoutError()"}, "request_not_found", "rank-0 did not answer"),
    ],
)
async def test_what_cannot_be_explained_is_a_typed_404_with_a_remedy(launch, said, code, remedy):
    async with launch() as server:
        server.said["rank-0"] = said
        answer = await server.client.get("/v1/requests/nobody/explain")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, "id")
    assert remedy in error["message"] and "nobody" in error["message"]


async def test_a_supervisor_that_is_away_is_a_503(launch):
    async with launch() as server:
        server.said = None
        answer = await server.client.get("/v1/requests/a/explain")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "not_ready"


async def test_the_answer_has_a_schema(launch):
    async with launch() as server:
        schema = (await server.client.get("/openapi.json")).json()
    operation = schema["paths"]["/v1/requests/{response_id}/explain"]["get"]
    content = operation["responses"]["200"]["content"]["application/json"]
    assert content["schema"] == {"$ref": "#/components/schemas/Explanation"}
    assert "404" in operation["responses"]
    fields = schema["components"]["schemas"]["ExplainedRound"]["properties"]
    assert "late" in fields["cut_by"]["enum"] and "description" in fields["min_survival"]
