"""The server under load, by whatever part of its address somebody gives."""

from __future__ import annotations

import httpx

API = "/v1"


def root_of(url: str) -> str:
    """The address of the server, from that of its API or its own."""
    return url.rstrip("/").removesuffix(API)


def api_of(url: str) -> str:
    """The address of its API (`…/v1`), from that or from the server's own."""
    return root_of(url) + API


def health_of(url: str) -> str:
    """Where it says how it is."""
    return root_of(url) + "/health"


async def served_model(client: httpx.AsyncClient) -> str:
    """The first model that the server of `client` names.

    Raises:
        SystemExit: nobody answers there, or nobody who serves models; the line says where and what to do.
    """
    models = api_of(str(client.base_url)) + "/models"
    try:
        answer = await client.get(models)
        return str(answer.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise SystemExit(
            f"--url: {models} does not answer ({type(error).__name__}); start a server, or name another"
        ) from error
    except (ValueError, LookupError, TypeError) as error:
        raise SystemExit(
            f"--url: {models} says {answer.status_code} and names no model; name an OpenAI-compatible server"
        ) from error
