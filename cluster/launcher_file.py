"""A launcher file of `ray up`: read, checked for what is still to be edited, and passed to Ray's own commands."""

from __future__ import annotations

import io
import json
import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.console import CommandError, note

TOKEN = Path("~/.ray/auth_token")
ENTER = ". ~/dspark/setup/node.sh"  # what every command on a node begins with
# Addresses for documentation (RFC 5737): whoever left them there has not edited the file.
PLACEHOLDERS = ("192.0.2.", "198.51.100.", "203.0.113.")
KEY_FIELDS = ("ssh_private_key", "ssh_public_key")


@dataclass(frozen=True)
class LauncherFile:
    """What `ray up` is given."""

    path: Path
    values: dict[str, Any]

    @classmethod
    def read(cls, path: str) -> LauncherFile:
        """Raises CommandError when it is no launcher file, or not edited yet."""
        file = Path(path).expanduser()
        try:
            values = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise CommandError(f"{path}: not readable: {' '.join(str(error).split())}") from error
        if not isinstance(values, dict) or not isinstance(values.get("provider"), dict):
            raise CommandError(
                f"{path}: no launcher file of `ray up` (it has no `provider`); see configs/ray_up/"
            )
        found = cls(file, values)
        for name, text in found._texts():
            if text.startswith(PLACEHOLDERS) or "EDIT-ME" in text:
                raise CommandError(f"{path}: {name} is still {text!r}; put your own there")
        found._require_login()
        return found

    def _require_login(self) -> None:
        """Raises CommandError when the user or the key for the machines is lacking: Ray would show a traceback."""
        auth = self.values.get("auth", {})
        if not isinstance(auth, dict) or (self.is_local and not auth.get("ssh_user")):
            raise CommandError(
                f"{self.path}: auth.ssh_user is missing; name the user that opens the machines by ssh"
            )
        for field in (name for name in KEY_FIELDS if name in auth):
            try:
                Path(str(auth[field])).expanduser().open("rb").close()
            except (OSError, RuntimeError) as error:  # RuntimeError: ~ of a user who is not known
                cause = getattr(error, "strerror", None) or error
                raise CommandError(
                    f"{self.path}: auth.{field}: {auth[field]} cannot be read ({cause}); "
                    "name the key file that opens the machines by ssh, or make it with ssh-keygen"
                ) from error

    def _texts(self) -> Iterator[tuple[str, str]]:
        def walk(value: Any, name: str) -> Iterator[tuple[str, str]]:
            if isinstance(value, dict):
                for key, inner in value.items():
                    yield from walk(inner, f"{name}.{key}" if name else str(key))
            elif isinstance(value, list):
                for i, inner in enumerate(value):
                    yield from walk(inner, f"{name}[{i}]")
            elif isinstance(value, str):
                yield name, value

        return walk(self.values, "")

    @property
    def name(self) -> str:
        return str(self.values.get("cluster_name", "default"))

    @property
    def is_local(self) -> bool:
        """Whether the machines are our own, and there are as many as are named."""
        return bool(self.values["provider"].get("type") == "local")

    @property
    def workers(self) -> tuple[str, ...]:
        """Addresses of the named workers; none with a cloud."""
        return tuple(self.values["provider"].get("worker_ips", ())) if self.is_local else ()

    @property
    def num_nodes(self) -> int:
        """Those that shall be there from the start, the head included."""
        if self.is_local:
            return 1 + len(self.workers)
        types = self.values.get("available_node_types", {})
        head = self.values.get("head_node_type")
        return 1 + sum(int(t.get("min_workers", 0)) for name, t in types.items() if name != head)

    def require_mounts(self) -> None:
        """Raises CommandError when something that is to be copied to the nodes is not there."""
        for target, source in self.values.get("file_mounts", {}).items():
            if not Path(source).expanduser().exists():
                remedy = "run `make dist`" if Path(source).name == "dist" else "make it"
                raise CommandError(f"file_mounts: {target}: {source} is not there; {remedy} first")

    # --- Ray's own commands -----------------------------------------------------------------------------------------

    def ray(
        self,
        command: str,
        *arguments: str,
        wants_answer: bool = False,
        hears: Callable[[str], None] | None = None,
    ) -> str:
        """Run `ray COMMAND FILE …`; what it says goes to stderr, or is returned. Raises CommandError when it fails.

        `hears` is given every line that will be returned, when it is said; a bar ends in a carriage return alone.
        """
        said: list[str] = []
        with subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", command, str(self.path), *arguments],
            env=os.environ | self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if wants_answer else sys.stderr.fileno(),
            text=True,
            errors="replace",
        ) as process:
            if isinstance(process.stdout, io.TextIOWrapper):
                process.stdout.reconfigure(newline="")
            for line in process.stdout or ():
                said.append(line)
                if hears is not None:
                    hears(line)
        if process.returncode:
            last = "".join(said).strip().splitlines()[-5:]
            raise CommandError("; ".join([f"`ray {command}` failed ({process.returncode})", *last]))
        return "".join(said)

    @property
    def environment(self) -> dict[str, str]:
        """What Ray's commands need beside the file."""
        environment = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
        environment["PYTHONUNBUFFERED"] = "1"  # its own words before those of the node
        if self.is_local:
            # The newer autoscaler counts the head among the workers of this provider and leaves one out (Ray 2.60).
            environment["RAY_UP_enable_autoscaler_v2"] = "0"
        return environment

    def on_head(self, *command: str, aloud: bool = False) -> dict[str, Any]:
        """Run `dspark …  --json` on the head; returns its object. Raises CommandError with what it said is wrong.

        `aloud`: what it says meanwhile is said here too, at once.
        """
        line = f"{ENTER}; {shlex.join(['dspark', *command, '--json'])} || true"
        said = self.ray("exec", line, wants_answer=True, hears=_say_again if aloud else None)
        for text in reversed(said.splitlines()):
            if text.startswith("{"):
                answer: dict[str, Any] = json.loads(text)
                if "error" in answer:
                    raise CommandError(str(answer["error"]))
                return answer
        raise CommandError(f"`dspark {command[0]}` on the head said: {said.strip()[-1000:]}")

    def on_worker(self, address: str, line: str) -> None:
        """Run a shell line on one of the named workers."""
        auth = self.values["auth"]
        command = [
            "ssh",
            "-q",
            "-o",
            "StrictHostKeyChecking=no",
            "-o",
            "UserKnownHostsFile=/dev/null",
        ]
        command += ["-o", "ConnectTimeout=10", "-o", "BatchMode=yes"]
        if "ssh_private_key" in auth:
            command += ["-i", str(Path(auth["ssh_private_key"]).expanduser())]
        command += [f"{auth['ssh_user']}@{address}", f"{ENTER}; {line}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CommandError(f"{address}: {line}: {done.stderr.strip() or done.returncode}")


def _say_again(line: str) -> None:
    """What `dspark` on the head says, but for its result and its failure: those are said here in the end."""
    text = line.rstrip("\r\n")
    if text and not text.startswith(("{", "dspark: ")):
        note(text, end="\r" if line.endswith("\r") else "\n")


def ensure_token() -> Path:
    """The token that opens the cluster, made when there is none, readable by its owner only."""
    path = TOKEN.expanduser()
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
    return path
