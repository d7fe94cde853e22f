"""`dspark serve`: start the cluster, say where it listens, stay until told to stop, leave nothing behind."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

from cluster.commands.signals import interruptible, on_signal
from cluster.console import CommandError, emit_json, note, say
from cluster.run_state import AlreadyRunningError, Registration, RunState, register
from configs.ingress import IngressConfig
from configs.load import load
from configs.machine import multiplies_bfloat16
from configs.schema import ClusterConfig

WATCH_INTERVAL_S = 0.5
EXIT_INTERRUPTED = 130


def serve(arguments: argparse.Namespace) -> int:
    results = sys.stdout
    config = load(arguments.config, arguments.set)
    _require_free_port(config.ingress)
    state = RunState(
        pid=os.getpid(),
        phase="starting",
        endpoint=config.ingress.endpoint(),
        model=config.model.name,
        numerics=config.model.numerics,
        started_at_s=time.time(),
    )
    try:
        with (
            register(Path(arguments.state), state) as registration,
            contextlib.redirect_stdout(
                sys.stderr
            ),  # whatever a library prints, stdout is for results
        ):
            return _run(config, registration, arguments, results)
    except AlreadyRunningError as error:
        raise CommandError(str(error)) from error


def _run(
    config: ClusterConfig,
    registration: Registration,
    arguments: argparse.Namespace,
    results: TextIO,
) -> int:
    model = config.model
    note(
        f"starting {model.name} ({model.device}, {model.dtype}, {model.numerics}); Ctrl-C stops it"
    )
    if model.device == "cpu" and model.dtype == "bfloat16" and not multiplies_bfloat16():
        note(
            "WARNING: this CPU does not multiply bfloat16; model.dtype=auto is several times faster here"
        )
    with interruptible():
        try:
            started = time.perf_counter()
            _launch(config, registration)
            note(f"ready after {time.perf_counter() - started:.1f} s")
            note(f"live page {registration.state.endpoint.removesuffix('/v1')}/dashboard")
            _announce(config, registration.state, arguments.json, results)
            _wait(os.getppid() if arguments.end_with_parent else None)
        except KeyboardInterrupt:
            raise CommandError("interrupted while starting", EXIT_INTERRUPTED) from None
        finally:
            on_signal(lambda: note("already stopping; a moment"))
            registration.update(phase="stopping")
            note("stopping the cluster")
            _shutdown()
    note("stopped")
    return 0


def _wait(parent: int | None) -> None:
    """Until a signal comes, or until the process that started us has gone."""
    stop = threading.Event()
    on_signal(stop.set)  # now, not earlier: Ray installs handlers of its own while it starts
    while not stop.wait(WATCH_INTERVAL_S):
        if parent is not None and os.getppid() != parent:
            note("the process that started this cluster has gone")
            return


def _launch(config: ClusterConfig, registration: Registration) -> None:
    from actors import tracing
    from cluster import launch as launcher  # imports Ray: late, so that other commands stay quick

    tracing.setup(config.telemetry, "driver", "driver")
    try:
        with tracing.span(tracing.SPAN_LAUNCH, {}):
            cluster = launcher.launch(config, progress=note)
    except launcher.LaunchError as error:
        raise CommandError(str(error)) from error
    registration.update(
        phase="ready", endpoint=cluster.endpoint_url, ray_address=cluster.ray_address
    )


def _announce(config: ClusterConfig, state: RunState, as_json: bool, results: TextIO) -> None:
    name = config.model.name
    if as_json:
        emit_json({"endpoint": state.endpoint, "model": name, "pid": state.pid}, to=results)
    else:
        say(f"endpoint {state.endpoint}  model {name}", to=results)


def _shutdown() -> None:
    from actors import tracing
    from cluster import launch as launcher

    launcher.shutdown()
    tracing.flush()


def _require_free_port(ingress: IngressConfig) -> None:
    family = socket.AF_INET6 if ":" in ingress.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ingress.host, ingress.port))
        except OSError as error:
            raise CommandError(
                f"cannot listen on {ingress.host}:{ingress.port} ({error.strerror}); "
                f"choose another with --set ingress.port={ingress.port % 65535 + 1}"
            ) from error
