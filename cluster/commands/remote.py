"""`dspark up`, `deploy`, `down` and what else speaks to a cluster of several machines.

`--cluster` names it in one of two ways: the launcher file, then the command runs on the head, reached by ssh as
Ray reaches it; or the address of a Ray that this machine is part of ("auto", "host:port"), then it runs here.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from cluster.commands.signals import interruptible, on_signal
from cluster.console import CommandError, emit_json, note, say, table
from cluster.launcher_file import ENTER, LauncherFile, ensure_token
from cluster.model_share import digest_of, is_folder
from configs.load import load, settings

NODES_TIMEOUT_S = 600.0
POLL_INTERVAL_S = 2.0
REMOTE_FOLDER = "~/dspark"
END_RAY = "ray stop --grace-period 30"  # a busy machine needs longer than Ray's default
TARGET_COLUMNS = ("name", "role", "state", "revision", "node_ip", "num_restarts", "reason")


def is_launcher_file(cluster: str) -> bool:
    return cluster.endswith((".yaml", ".yml"))


def up(arguments: argparse.Namespace) -> int:
    """Start Ray on the machines of a launcher file and wait until all are there."""
    started = time.monotonic()
    file = LauncherFile.read(arguments.file)
    token = ensure_token()
    file.require_mounts()
    note(f"starting {file.name}: {file.num_nodes} machines; the token is {token}")
    file.ray("up", "--yes", "--no-config-cache")
    note(f"the head is up ({time.monotonic() - started:.1f} s)")
    nodes = _await_nodes(file, started + NODES_TIMEOUT_S)
    report = {"cluster": file.name, "nodes": nodes, "seconds": time.monotonic() - started}
    if arguments.json:
        emit_json(report)
    else:
        say(_node_table(nodes))
        say(f"\nnext: dspark deploy --cluster {arguments.file} --config …")
    return 0


def _await_nodes(file: LauncherFile, deadline: float) -> list[dict[str, Any]]:
    shown = -1
    while True:
        nodes: list[dict[str, Any]] = file.on_head("status", "--cluster", "auto")["nodes"]
        if len(nodes) != shown:
            shown = len(nodes)
            note(f"{shown} of {file.num_nodes} machines")
        if shown >= file.num_nodes:
            return nodes
        if time.monotonic() > deadline:
            raise CommandError(
                f"{shown} of {file.num_nodes} machines within {NODES_TIMEOUT_S:g} s; "
                f"`ray monitor {file.path}` shows what the launcher does"
            )
        time.sleep(POLL_INTERVAL_S)


def down(arguments: argparse.Namespace) -> int:
    """End the deployment and Ray on every machine."""
    file = LauncherFile.read(arguments.file)
    try:
        file.on_head("stop", "--cluster", "auto")
    except CommandError as error:
        note(f"nothing was ended in order: {error}")
    failures = []
    if file.is_local:
        # Ray leaves our own machines running, and looks for itself on the head where it is not. The head goes first: it
        # would start a worker again.
        try:
            file.ray("exec", f"{ENTER}; {END_RAY}")
        except CommandError as error:
            failures.append(str(error))
    file.ray("down", "--yes")
    for address in file.workers:
        try:
            file.on_worker(address, END_RAY)
        except CommandError as error:
            failures.append(str(error))
    if failures:
        raise CommandError("still to be stopped by hand: " + "; ".join(failures))
    if arguments.json:
        emit_json({"stopped": True})
    return 0


# --- what a deployment is made of -------------------------------------------------------------------------------------


def deploy(arguments: argparse.Namespace) -> int:
    """Start the model on a running Ray cluster; it stays when this command has ended."""
    config = load(arguments.config, arguments.set)  # refuse a bad setting here, in one line
    if is_launcher_file(arguments.cluster):
        file = LauncherFile.read(arguments.cluster)
        note(f"copying the settings to the head of {file.name}")
        sent = send_settings(file, arguments.config, arguments.set)
        note("deploying from the head; it takes a minute or two")
        room = ("--room-seconds", f"{arguments.room_seconds:g}")
        sending = ("--cluster", "auto", "--config", sent, *room)
        report = file.on_head("deploy", *sending, aloud=True)
    else:
        with contextlib.redirect_stdout(sys.stderr):
            report = _deploy_here(config, arguments.cluster, arguments.room_seconds)
    if arguments.json:
        emit_json(report)
    else:
        say(f"endpoint {report['endpoint']}  model {report['model']}")
    return 0


def _deploy_here(config: Any, address: str, room_timeout_s: float) -> dict[str, Any]:
    from cluster import launch as launcher

    started = time.monotonic()
    with interruptible():
        try:
            launched = launcher.launch(
                config, note, address, outlives=True, room_timeout_s=room_timeout_s
            )
        except launcher.LaunchError as error:
            raise CommandError(str(error)) from error
        finally:
            on_signal(lambda: note("already stopping; a moment"))
            launcher.shutdown()  # of what did not come up
    return {
        "endpoint": launched.endpoint_url,
        "model": config.model.name,
        "seconds": time.monotonic() - started,
    }


def send_settings(file: LauncherFile, config: str, overrides: Sequence[str]) -> str:
    """Copy settings, and the model folders they name, to the head; returns the file to name as --config there."""
    values = settings(config, overrides)
    model = values.setdefault("model", {})
    for name in ("path", "drafter"):
        folder = model.get(name)
        if isinstance(folder, str) and is_folder(folder):
            model[name] = send_folder(file, folder)
    with tempfile.TemporaryDirectory(prefix="dspark-") as folder:
        written = Path(folder) / "deploy.yaml"
        written.write_text(yaml.safe_dump(values), encoding="utf-8")
        file.ray("rsync-up", str(written), f"{REMOTE_FOLDER}/deploy.yaml")
    return f"{REMOTE_FOLDER}/deploy.yaml"


def send_folder(file: LauncherFile, folder: str) -> str:
    """Copy a folder of this machine to the head, under the digest of its content; returns where it lies there."""
    there = f"{REMOTE_FOLDER}/models/{digest_of(Path(folder).expanduser())[:16]}"
    note(f"copying {folder} to the head")
    file.ray("exec", f"mkdir -p {there}")  # rsync makes the last folder of a path only
    file.ray("rsync-up", f"{Path(folder).expanduser()}/", f"{there}/")
    return there


def stop(arguments: argparse.Namespace) -> int:
    """End what is deployed; Ray stays."""
    report = there_or_here(arguments, "stop", _stop_here)
    if arguments.json:
        emit_json(report)
    else:
        note("stopped")
    return 0


def _stop_here(address: str) -> dict[str, Any]:
    with joined(address) as found:
        if found is None:
            raise CommandError(f"{address}: nothing is deployed there")
        found.end()
    return {"stopped": True}


def status(arguments: argparse.Namespace) -> int:
    """The machines, what is deployed on them, and how it is."""
    report = there_or_here(arguments, "status", _status_here)
    if arguments.json:
        emit_json(report)
    else:
        say(_describe(report))
    return 0 if report["deployed"] else 1


def _status_here(address: str) -> dict[str, Any]:
    with joined(address) as found:
        report: dict[str, Any] = {"deployed": found is not None, "nodes": _nodes()}
        if found is not None:
            deployment, state = found.deployment, found.ask("status")
            report |= {
                "endpoint": deployment.endpoint,
                "model": deployment.model,
                "numerics": deployment.numerics,
                "version": deployment.version,
                "uptime_s": time.time() - deployment.deployed_at_s,
                "is_settled": state["is_settled"],
                "autoscale": state["autoscale"],
                "ingress": state["ingress"],
                "members": [
                    {name: member[name] for name in (*TARGET_COLUMNS, "last_failure", "pid")}
                    for member in state["members"]
                ],
            }
    return report


def _describe(report: dict[str, Any]) -> str:
    if not report["deployed"]:
        return f"{_node_table(report['nodes'])}\n\nnothing is deployed"
    members = report["members"]
    ready = sum(member["state"] == "ready" for member in members)
    columns = [name for name in TARGET_COLUMNS if any(member[name] for member in members)]
    rows = [[str(member[name]) for name in columns] for member in members]
    scaling = report.get("autoscale")
    why = f"\nautoscale {scaling['kind']}: {scaling['why']}" if scaling else ""
    if ingress := report.get("ingress"):
        why += f"\ningress   {ingress['num_replicas']} replicas: {ingress['why']}"
    return "\n\n".join(
        [
            f"endpoint  {report['endpoint']}\nmodel     {report['model']} ({report['numerics']})\n"
            f"ready     {ready} of {len(members)} parts{why}",
            _node_table(report["nodes"]),
            table([name.removeprefix("num_") for name in columns], rows),
        ]
    )


def _node_table(nodes: list[dict[str, Any]]) -> str:
    rows = [[n["address"], n["name"], str(n["CPU"]), str(n["GPU"]), n["offers"]] for n in nodes]
    return table(["address", "host", "CPUs", "GPUs", "offers"], rows)


def _nodes() -> list[dict[str, Any]]:
    import ray

    return [
        {
            "address": node["NodeManagerAddress"],
            "name": node["NodeManagerHostname"],
            "CPU": node["Resources"].get("CPU", 0),
            "GPU": node["Resources"].get("GPU", 0),
            "offers": ", ".join(sorted({"ingress", "target"} & set(node["Resources"]))),
        }
        for node in ray.nodes()
        if node["Alive"]
    ]


# --- where a command runs ---------------------------------------------------------------------------------------------


def there_or_here(
    arguments: argparse.Namespace, command: str, here: Callable[[str], dict[str, Any]]
) -> dict[str, Any]:
    """What `here` finds on the Ray of `--cluster`, or what the same command says on that cluster's head."""
    if is_launcher_file(arguments.cluster):
        return LauncherFile.read(arguments.cluster).on_head(command, "--cluster", "auto")
    return here_quietly(arguments.cluster, here)


def here_quietly(address: str, here: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """What `here` finds, while stdout is for results alone."""
    with contextlib.redirect_stdout(sys.stderr):  # Ray talks
        return here(address)


@contextlib.contextmanager
def joined(address: str) -> Iterator[Any]:
    """The deployment at `address`, or None when that Ray runs nothing of ours."""
    from cluster.deployment import join
    from cluster.ray_session import RaySessionError

    try:
        with join(address) as found:
            yield found
    except RaySessionError as error:
        raise CommandError(str(error)) from error
