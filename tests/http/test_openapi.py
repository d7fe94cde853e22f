"""What /openapi.json says of bodies is what the endpoints read."""

from __future__ import annotations

from typing import Any

from cluster.openai_api import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

SCHEMAS = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def _references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(_references(value) for value in node.values()))
    if isinstance(node, list):
        return set().union(*(_references(value) for value in node))
    return set()


async def test_every_body_has_the_schema_that_checks_it(launch):
    async with launch() as server:
        document = (await server.client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    for path, model in SCHEMAS.items():
        operation = document["paths"][path]["post"]
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        described = schemas[reference.rpartition("/")[2]]
        expected = {field.alias or name for name, field in model.model_fields.items()}
        assert set(described["properties"]) == expected
        assert {"400", "401", "429", "503"} <= set(operation["responses"])
    assert schemas["ChatRequest"]["required"] == ["messages"]


async def test_every_reference_resolves(launch):
    async with launch() as server:
        document = (await server.client.get("/openapi.json")).json()
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert _references(document) <= known


async def test_answers_that_stream_say_so(launch):
    async with launch() as server:
        document = (await server.client.get("/openapi.json")).json()
    chat = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    tokenize = document["paths"]["/tokenize"]["post"]["responses"]["200"]["content"]
    assert "text/event-stream" in chat and "text/event-stream" not in tokenize
