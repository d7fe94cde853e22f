"""The Ray Serve application: puts the HTTP front on the configured address and takes it down again."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import httpx

from actors import tracing
from actors.core.messages import RoutingTable
from actors.link import Link, open_link
from cluster.api_keys import KeyRing, key_limits
from cluster.dispatcher import Dispatcher, DispatchLimits
from cluster.explanations import AskRanks
from cluster.ingress import Front, build_app
from cluster.ingress_scaling import replica_options
from cluster.intake import Intake
from cluster.jobs import IntakeLimits
from cluster.live_stream import StreamLimits
from cluster.model_files import text_files
from cluster.model_share import localise
from cluster.names import NAMESPACE, SUPERVISOR
from cluster.observation import AskCluster
from cluster.placement import MARK_AMOUNT
from cluster.serve_proxy import IngressStartError, remove_proxy_files, serve_environment
from cluster.served_model import Access, ServedModel
from cluster.text import TextCodec
from configs.schema import ClusterConfig

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["IngressStartError", "run_ingress", "serve_environment", "stop_ingress"]

logger = logging.getLogger(__name__)

APPLICATION = "dspark"
READY_TIMEOUT_S, END_TIMEOUT_S, PUBLISH_S = 60.0, 5.0, 5.0
MAX_ONGOING = 4096  # streams of one replica; ranks refuse long before


# --- in the driver ----------------------------------------------------------------------------------------------------


def run_ingress(config: ClusterConfig) -> str:
    """Start the application on a running Ray whose supervisor is up; returns the base URL of the API.

    Blocks until the endpoint answers.

    Raises:
        IngressStartError: the port is taken, or the replicas do not come up.
    """
    _check_port_is_free(config.ingress.host, config.ingress.port)
    from ray import serve

    try:
        with _quiet_serve_logs():
            serve.start(
                http_options={"host": config.ingress.host, "port": config.ingress.port},
                logging_config=_quiet(),
            )
            serve.run(application(config), name=APPLICATION, route_prefix="/")
    except (RuntimeError, TimeoutError) as error:
        raise IngressStartError(f"the ingress replicas do not come up: {error}") from error
    url = config.ingress.endpoint()
    _wait_until_served(url)
    return url


def application(config: ClusterConfig) -> Any:
    """The ingress as Serve runs it; the supervisor must be up when its replicas start."""
    from ray import serve

    mark = config.ingress.node_resource
    deployment: Any = serve.deployment(
        serve.ingress()(IngressReplica),
        name="Ingress",
        max_ongoing_requests=MAX_ONGOING,
        health_check_period_s=5,
        health_check_timeout_s=15,
        **replica_options(config.ingress),
        ray_actor_options={"num_cpus": 0, "resources": {mark: MARK_AMOUNT} if mark else {}},
        logging_config=_quiet(),
    )
    return deployment.bind(config)


def _quiet() -> Any:
    from ray.serve.schema import LoggingConfig

    return LoggingConfig(enable_access_log=False, log_level="WARNING")


def stop_ingress() -> None:
    """Take the application down; open streams end with an error event. Idempotent."""
    import ray

    if ray.is_initialized():
        from ray import serve

        with _quiet_serve_logs():
            _end_streams()
            serve.shutdown()
    remove_proxy_files()


def _end_streams() -> None:
    """Serve takes the proxy down first, which would cut streams without a word."""
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        handle: Any = serve.get_app_handle(APPLICATION)
        handle.broadcast("end_streams").results(timeout_s=END_TIMEOUT_S)
    except RayServeException:
        return  # nothing is served
    except (RuntimeError, TimeoutError) as error:
        logger.warning("open streams may have been cut: %s", error)


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


def _wait_until_served(url: str) -> None:
    end_s = time.monotonic() + READY_TIMEOUT_S
    problem = "no answer"
    while time.monotonic() < end_s:
        with suppress(httpx.TransportError):
            answer = httpx.get(f"{url}/models", timeout=2.0, trust_env=False)
            if answer.status_code in (200, 401):  # 401: it wants a key
                return
            problem = f"HTTP {answer.status_code}"
        time.sleep(0.1)
    raise IngressStartError(f"{url} does not serve within {READY_TIMEOUT_S:.0f} s: {problem}")


# --- in the replica ---------------------------------------------------------------------------------------------------


class IngressReplica:
    """One Serve replica: the front, its link and its dispatcher. Serve wraps it around the ASGI app it builds."""

    _config: ClusterConfig
    _supervisor: Any
    _link: Link
    _front: Front

    async def __init__(self, config: ClusterConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        import ray
        from ray import serve

        self._config = config
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
        tracing.setup(config.telemetry, "ingress", f"ingress-{replica}")
        local = await asyncio.to_thread(localise, config)
        codec = TextCodec.from_directory(text_files(local.model.path))
        self._front = make_front(
            config, codec, self._link, self._routing, self._ask_ranks, self._ask_cluster
        )
        await asyncio.to_thread(self._front.intake.grammars.prepare)  # not while others stream
        self._is_alone = config.ingress.most_replicas == 1

    async def _routing(self, seen: int) -> RoutingTable:
        table: RoutingTable = await self._supervisor.routing.remote(seen)
        shared = key_limits(self._config, table.num_places, table.num_ingress)
        self._front.access.keys.adopt(shared)
        return table

    async def _ask_ranks(self, response_id: str) -> Mapping[str, Any]:
        answers: Mapping[str, Any] = await self._supervisor.explain.remote(response_id)
        return answers

    async def _ask_cluster(self, name: str, own: dict[str, Any]) -> dict[str, Any]:
        observed: dict[str, Any] = await self._supervisor.observe.remote(name, own)
        return observed

    async def _publish_counters(self) -> None:
        """A scrape reaches one replica and tells of all, so the others leave their counters at the supervisor."""
        while not self._is_alone:
            try:
                observer = self._front.observer
                await self._supervisor.publish.remote(observer.name, observer.own())
            except Exception as error:  # Ray's own kinds; the next try may succeed
                logger.warning("the counters could not be published: %r", error)
            await asyncio.sleep(PUBLISH_S)

    def __serve_build_asgi_app__(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(_: Any) -> AsyncGenerator[None, None]:
            await self._front.dispatcher.start()
            beside = (self._publish_counters(), self._front.meter.run())
            tasks = [asyncio.create_task(work) for work in beside]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await self._front.dispatcher.stop()
                self._link.close()
                tracing.flush()

        return build_app(self._front, lifespan)

    async def end_streams(self) -> None:
        """Called on every replica before the application goes down."""
        await self._front.dispatcher.end_streams("the server is shutting down")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve, for `cluster.ingress_scaling`."""
        num_streams = float(self._front.dispatcher.num_streams)
        return {**self._front.meter.stats(), "num_streams": num_streams}

    async def check_health(self) -> None:
        """Called by Serve on the loop that serves requests, so that a stuck loop is noticed too."""
        self._front.dispatcher.check_health()


def make_front(
    config: ClusterConfig,
    codec: TextCodec,
    link: Link,
    routing: Any,
    ask_ranks: AskRanks,
    ask_cluster: AskCluster | None = None,
) -> Front:
    """Wire the front of `config` together."""
    ingress, model = config.ingress, config.model
    intake_limits = IntakeLimits(
        model.name,
        model.max_model_len,
        ingress.default_max_tokens,
        ingress.max_stop_strings,
        max_choices=ingress.max_choices,
        max_request_tokens=ingress.max_request_tokens,
        tool_parser=ingress.tool_parser,
        classes=tuple(known.name for known in config.policy.classes),
        ranks=config.target.rank_names if ingress.allow_rank_hint else (),
    )
    identity = hashlib.sha256(model.model_dump_json().encode()).hexdigest()
    return Front(
        ServedModel(model.name, int(time.time()), f"fp_{identity[:10]}", model.max_model_len),
        Intake(codec, intake_limits),
        Dispatcher(link, routing, dispatch_limits(config)),
        ingress.request_timeout_s,
        ask_ranks,
        Access(
            KeyRing(key_limits(config)),
            ingress.cors_origins,
            ingress.max_body_bytes,
            ingress.host_names,
        ),
        ask_cluster,
        ingress.keep_alive_s,
    )


def dispatch_limits(config: ClusterConfig) -> DispatchLimits:
    """The bounds to placing streams and to going on with them."""
    front = config.ingress
    stream = StreamLimits(
        front.stall_timeout_s, front.replay_timeout_s, front.max_fruitless_replays
    )
    return DispatchLimits(front.reservation_timeout_s, stream=stream)
