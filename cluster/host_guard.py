"""Requests for a host that is not ours are refused: a page could otherwise reach a loopback endpoint (DNS rebinding).

The page's own name is made to resolve to 127.0.0.1 after it was loaded; to the browser the endpoint then is the page's
own site, so neither CORS nor the origin keeps it out. The `Host` header still says the page's name. An address in its
place is always right: nobody can make an address resolve to another one.
"""

from __future__ import annotations

import ipaddress

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api_errors import ApiError, shown
from cluster.served_model import Access


def guard(app: FastAPI, access: Access) -> None:
    """What every request passes first."""
    if access.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(access.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
            expose_headers=["retry-after"],
        )
    if access.host_names is not None:
        app.add_middleware(HostGuard, names=access.host_names)


class HostGuard:
    """ASGI middleware.

    Args:
        app: what it guards.
        names: host names that requests may be for; case, a port and a final dot do not matter.
    """

    def __init__(self, app: ASGIApp, names: tuple[str, ...]) -> None:
        self._app = app
        # Of a bare IPv6 address nothing is left; every address is ours anyway.
        self._names = frozenset(map(host_name, names)) - {""}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host")
            if host is not None and not self._is_ours(host):
                error = ApiError(
                    403,
                    f"host={shown(host)}: this endpoint is not known by that name; use its address, or have its "
                    "operator name the host in ingress.allowed_hosts",
                    param="host",
                    code="host_not_allowed",
                )
                await JSONResponse(error.body, error.status)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_ours(self, host: str) -> bool:
        name = host_name(host)
        return name in self._names or _is_address(name)


def host_name(host: str) -> str:
    """The name or address of a `Host` header, without its port; in lower case."""
    if host.startswith("["):  # an IPv6 address
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
