"""What people and scrapers look at: `/metrics`, `/dashboard` with its files, and the documents behind the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from cluster import live_page
from cluster.api_errors import ApiError
from cluster.api_keys import KeyRing
from cluster.dispatcher import Dispatcher
from cluster.explanations import AskRanks, explain
from cluster.exposition import exposition
from cluster.loop_meter import LoopMeter
from cluster.observation import Observer
from cluster.telemetry import FrontMetrics

FOLDER = Path(__file__).parent / "dashboard"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
# Nothing is fetched from anywhere else, so the page works offline and runs no foreign script.
HEADERS = {"content-security-policy": "default-src 'self'", "cache-control": "no-cache"}


def front_snapshot(
    metrics: FrontMetrics, dispatcher: Dispatcher, keys: KeyRing, meter: LoopMeter
) -> dict[str, Any]:
    """An ingress replica's counters and open streams, in plain numbers."""
    return {
        **metrics.snapshot(),
        "dispatch": asdict(dispatcher.counters),
        "num_streams": dispatcher.num_streams,
        "streams": dispatcher.describe_streams(),
        "keys": dict(keys.num_requests),
        "num_unknown_keys": keys.num_unknown,
        **meter.stats(),
        "memory_bytes": psutil.Process().memory_info().rss,
    }


def add_routes(
    app: FastAPI,
    observer: Observer,
    ask_ranks: AskRanks,
    authorise: Callable[[Request], object],
    model: str,
) -> None:
    """Numbers of the whole cluster are open to whoever reaches the port; the rounds of an answer need a key."""

    @app.get("/metrics")
    async def metrics() -> Response:
        text = exposition(await observer.look(), model)
        return PlainTextResponse(text, media_type=CONTENT_TYPE_LATEST)

    @app.get("/dashboard", include_in_schema=False)
    async def page() -> Response:
        return _file("index.html")

    @app.get("/dashboard/state", include_in_schema=False)
    async def page_state() -> Response:
        return JSONResponse(live_page.state(await observer.look(), model))

    @app.get("/dashboard/rounds/{response_id}", include_in_schema=False)
    async def page_rounds(request: Request, response_id: str) -> Response:
        try:
            authorise(request)
            return JSONResponse(live_page.rounds_of(await explain(response_id, ask_ranks)))
        except ApiError as error:
            return JSONResponse(error.body, error.status, error.headers)

    @app.get("/dashboard/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        return _file(name)


def _file(name: str) -> Response:
    known = {path.name: path for path in FOLDER.iterdir() if path.suffix in MEDIA_TYPES}
    path = known.get(name)
    if path is None:
        raise HTTPException(404, f"/dashboard/{name}: no such file; the page is at /dashboard")
    kind = MEDIA_TYPES[path.suffix]
    return Response(path.read_bytes(), media_type=kind, headers=HEADERS)
