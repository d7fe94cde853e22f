"""`dspark rollout`: change a cluster while it serves."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.client import EndpointClient
from cluster.commands import reach, remote
from cluster.commands.signals import interruptible
from cluster.console import CommandError, emit_json, note, say, table
from cluster.launcher_file import LauncherFile
from cluster.model_share import is_folder, localise
from configs.change import changes
from configs.load import load
from configs.schema import ClusterConfig

POLL_INTERVAL_S = 0.5
LOST_AFTER_S = 60.0  # a supervisor that starts again answers before that
DRAFTER_SETTINGS = {"model.drafter", "drafter.gamma", "drafter.draft_top_k"}
COLUMNS = ("member", "role", "outcome", "seconds", "moved")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of `dspark rollout` beside `--cluster`."""
    parser.add_argument(
        "--config",
        metavar="PRESET|FILE",
        help="the whole new configuration (default: the running one, with --set)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one setting of the running configuration; may be repeated",
    )
    parser.add_argument("--drafter", metavar="DIR", help="new drafter weights")
    parser.add_argument(
        "--drain-seconds",
        type=float,
        default=30.0,
        help="how long streams may end by themselves before they move (default 30)",
    )
    parser.add_argument(
        "--ready-seconds",
        type=float,
        default=900.0,
        help="how long a member may take from its restart to ready (default 900)",
    )
    parser.add_argument(
        "--allow-pause",
        action="store_true",
        help="go on where no other rank can serve meanwhile: streams stand still, new requests get 503",
    )


def rollout(arguments: argparse.Namespace) -> int:
    """Roll out settings or drafter weights; 1 when it stopped before all members had them."""
    if not (arguments.config or arguments.set or arguments.drafter):
        raise CommandError(
            "nothing to roll out; name --set KEY=VALUE, --config FILE or --drafter DIR"
        )
    if arguments.cluster and remote.is_launcher_file(arguments.cluster):
        report = _from_afar(LauncherFile.read(arguments.cluster), arguments)
    else:
        if arguments.drafter:  # what can be refused without the cluster is
            _drafter_folder(arguments.drafter)
        if arguments.config:
            load(arguments.config, arguments.set)
        report = reach.at(arguments, lambda found: _roll(found, arguments))
    if arguments.json:
        emit_json(report)
    else:
        say(_describe(report))
    return 0 if report["outcome"] == "done" else 1


def wanted_settings(running: dict[str, Any], arguments: argparse.Namespace) -> ClusterConfig:
    """The configuration to come to.

    Raises:
        ConfigError: a setting does not exist or does not fit.
        CommandError: the drafter's folder is not there, or is what runs already.
    """
    overrides = list(arguments.set)
    if arguments.drafter:
        folder = _drafter_folder(arguments.drafter)
        if str(folder) == running["model"]["drafter"]:
            raise CommandError(
                f"--drafter {arguments.drafter} is what runs already; put new weights into a folder of their own, "
                "so that the old ones can come back"
            )
        overrides.append(f"model.drafter={folder}")
    # What the operator's shell sets for other clusters does not concern this one.
    return load(arguments.config or running, overrides, None if arguments.config else {})


def _drafter_folder(given: str) -> Path:
    """Raises CommandError when it is not there."""
    folder = Path(given).expanduser().resolve()
    if not folder.is_dir():
        raise CommandError(f"--drafter {given}: no such folder; `dspark train` makes one")
    return folder


def _roll(found: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    from actors.core.rollout_plan import Bounds
    from cluster.parts import DrafterMisfitError
    from cluster.rollout import Wish

    running = reach.ask(found, "settings")
    wanted = wanted_settings(running, arguments)
    parts, deployment = found.members.parts, found.deployment
    taps = None
    if changes(ClusterConfig.model_validate(running), wanted).keys() & DRAFTER_SETTINGS:
        try:
            facts = parts.check_drafter(localise(wanted))
        except DrafterMisfitError as error:
            raise CommandError(f"nothing was changed: {error}") from error
        taps = facts.taps
        for remark in facts.remarks:
            note(f"WARNING: {remark}")
    if not deployment.is_local:
        wanted, folders = parts.share_models(wanted)
        found.members.share_more(folders)
    bounds = Bounds(
        drain_s=arguments.drain_seconds,
        start_s=arguments.ready_seconds,
        allows_pause=arguments.allow_pause,
    )
    counted = FailedStreams(deployment.endpoint)
    started = time.monotonic()
    progress = reach.ask(found, "rollout", Wish(wanted, taps, bounds))
    progress = _watch(found, progress)
    return _report(progress, counted.since(), time.monotonic() - started)


def _watch(found: Any, progress: dict[str, Any]) -> dict[str, Any]:
    """Say what happens until it has; Ctrl-C lets the member whose turn it is end its turn."""
    shown: dict[str, str] = {}
    heard_at = time.monotonic()
    with interruptible():
        while True:
            _show(progress, shown)
            if progress["outcome"] == "none":
                raise CommandError(
                    "the supervisor has started again and the rollout has stopped; `dspark status` shows which "
                    "revision each member runs, the same `dspark rollout` goes on"
                )
            if progress["outcome"] != "running":
                return progress
            try:
                time.sleep(POLL_INTERVAL_S)
                progress = reach.ask(found, "rollout_progress")
                heard_at = time.monotonic()
            except reach.SupervisorAwayError:
                if time.monotonic() - heard_at > LOST_AFTER_S:
                    raise
            except KeyboardInterrupt:
                note("stopping after the member whose turn it is")
                reach.ask(found, "stop_rollout")


def _show(progress: dict[str, Any], shown: dict[str, str]) -> None:
    steps = progress["steps"]
    for number, step in enumerate(steps, start=1):
        name = " and ".join(step["members"])
        text = f"{step['phase']}" + (f" ({step['note']})" if step["note"] else "")
        if step["phase"] != "waiting" and shown.get(name) != text:
            shown[name] = text
            note(f"[{number}/{len(steps)}] {name}: {text} ({step['seconds']:.1f} s)")


def _report(progress: dict[str, Any], failed_streams: int | None, seconds: float) -> dict[str, Any]:
    steps = progress["steps"]
    return {
        "outcome": progress["outcome"],
        "reason": progress["reason"],
        "revision": progress["revision"],
        "members": [
            {
                "name": name,
                "role": step["role"],
                "outcome": step["phase"],
                "note": step["note"],
                "seconds": step["seconds"],
                "moved_streams": step["moved_streams"],
            }
            for step in steps
            for name in step["members"]
        ],
        "moved_streams": sum(step["moved_streams"] for step in steps),
        "failed_streams": failed_streams,
        "seconds": seconds,
    }


def _describe(report: dict[str, Any]) -> str:
    rows = [
        [m["name"], m["role"], m["outcome"], f"{m['seconds']:.1f}", str(m["moved_streams"])]
        for m in report["members"]
    ]
    failed = "unknown" if report["failed_streams"] is None else report["failed_streams"]
    text = table([*COLUMNS], rows) + "\n\n" if rows else ""
    text += (
        f"revision {report['revision']}: {report['outcome']} after {report['seconds']:.1f} s; "
        f"streams moved {report['moved_streams']}, failed {failed}"
    )
    if report["reason"]:
        text += f"\n{report['reason']}"
        text += "\nmembers whose turn was over keep the new settings; `dspark status` shows all"
    return text


@dataclass
class FailedStreams:
    """Streams that the HTTP front ended with an error, counted from now on; None where it cannot be asked."""

    endpoint: str

    def __post_init__(self) -> None:
        self._before = self._count()

    def since(self) -> int | None:
        now = self._count()
        return None if now is None or self._before is None else now - self._before

    def _count(self) -> int | None:
        try:
            with EndpointClient(self.endpoint) as client:
                return client.failed_streams()
        except CommandError:
            return None


# --- through the head of another cluster ------------------------------------------------------------------------------


def _from_afar(file: LauncherFile, arguments: argparse.Namespace) -> dict[str, Any]:
    """Copy what is new to the head, and roll out from there."""
    command = ["rollout", "--cluster", "auto"]
    command += ["--drain-seconds", str(arguments.drain_seconds)]
    command += ["--ready-seconds", str(arguments.ready_seconds)]
    command += ["--allow-pause"] if arguments.allow_pause else []
    for setting in arguments.set:
        command += ["--set", setting]
    if arguments.config:
        load(arguments.config, arguments.set)  # refuse a bad setting here, in one line
        command += ["--config", remote.send_settings(file, arguments.config, [])]
    if arguments.drafter:
        if not is_folder(arguments.drafter):
            raise CommandError(f"--drafter {arguments.drafter}: no such folder on this machine")
        command += ["--drafter", remote.send_folder(file, arguments.drafter)]
    note("rolling out from the head")
    return file.on_head(*command, aloud=True)
