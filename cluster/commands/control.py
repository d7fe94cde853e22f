"""`dspark stop` and `dspark status`: what they know comes from the state file and the endpoint's /health."""

from __future__ import annotations

import argparse
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.client import EndpointClient
from cluster.commands import remote
from cluster.console import CommandError, emit_json, note, say, table
from cluster.run_state import RunState, find

POLL_INTERVAL_S = 0.1
RANK_COLUMNS = (
    "name", "state", "revision", "num_running", "num_waiting", "num_free_blocks", "num_blocks", "reason",
)  # fmt: skip

OTHER_COLUMNS = ("name", "state", "revision", "reason")


def require_running(state_file: str) -> RunState:
    """The running cluster, or a CommandError that says how to get one."""
    state = find(Path(state_file))
    if state is None:
        raise CommandError("no cluster is running here; start one with `dspark serve`")
    return state


def stop(arguments: argparse.Namespace) -> int:
    if arguments.cluster:
        return remote.stop(arguments)
    state = find(Path(arguments.state))
    if state is None:
        note("no cluster is running here")
    else:
        note(f"stopping the cluster of process {state.pid}")
        _end(state, Path(arguments.state), arguments.timeout)
        note("stopped")
    if arguments.json:
        emit_json({"stopped": state is not None})
    return 0


def _end(state: RunState, state_file: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    os.kill(state.pid, signal.SIGTERM)
    while find(state_file) is not None:
        if time.monotonic() > deadline:
            raise CommandError(
                f"process {state.pid} has not ended within {timeout_s:g} s; "
                f"look at its log, then `kill -KILL {state.pid}`"
            )
        time.sleep(POLL_INTERVAL_S)


def status(arguments: argparse.Namespace) -> int:
    if arguments.cluster:
        return remote.status(arguments)
    state = find(Path(arguments.state))
    if state is None:
        note("no cluster is running here; start one with `dspark serve`")
        if arguments.json:
            emit_json({"running": False})
        return 1
    report = {"running": True, **asdict(state), "uptime_s": time.time() - state.started_at_s}
    if state.phase == "ready":
        with EndpointClient(state.endpoint) as client:
            report["health"] = client.health()
    if arguments.json:
        emit_json(report)
    else:
        say(_describe(report))
    return 0


def _describe(report: dict[str, Any]) -> str:
    health = report.get("health", {})
    facts = [
        ["state", str(health.get("status", report["phase"]))],
        ["endpoint", report["endpoint"]],
        ["model", f"{report['model']} ({report['numerics']})"],
        ["process", f"{report['pid']}, up {_duration(report['uptime_s'])}"],
        ["ray", report["ray_address"] or "-"],
    ]
    text = "\n".join(f"{name:<9} {value}" for name, value in facts)
    ranks = [rank for rank in health.get("ranks", ()) if isinstance(rank, dict)]
    if ranks:
        columns = [name for name in RANK_COLUMNS if any(rank.get(name) for rank in ranks)]
        rows = [[str(rank.get(name, "-")) for name in columns] for rank in ranks]
        text += "\n\n" + table([name.removeprefix("num_") for name in columns], rows)
    others = [other for other in health.get("others", ()) if isinstance(other, dict)]
    if others:
        columns = [name for name in OTHER_COLUMNS if any(other.get(name) for other in others)]
        rows = [[str(other.get(name, "-")) for name in columns] for other in others]
        text += "\n\n" + table(columns, rows)
    for rank in ranks:
        problems = [f"left behind when idle: {p}" for p in rank.get("integrity_problems", ())]
        for remark in [*filter(None, [rank.get("warning")]), *problems]:
            text += f"\n{rank.get('name', '-')}: {remark}"
    return text


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
