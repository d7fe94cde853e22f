"""`make test-cluster`: several hosts on this machine, `ray up` on them, a deployment that loses one under load.

Everything happens in namespaces of its own: nothing outside is seen or touched, and whatever still runs ends with it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.cluster.hosts import missing

SPACES = ("--mount", "--net", "--ipc", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc")
# The drill has a temporary folder of its own: hosts, homes, logs and Ray's sessions lie there.
INSIDE = """
set -eu
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /dev/shm
mount --bind "$1" /tmp
ip link set lo up
hostname operator
printf '127.0.0.1 localhost operator\\n' > /run/hosts
: > /run/resolv.conf            # nobody answers names here, and every question would wait ten seconds
mount --bind /run/hosts /etc/hosts
mount --bind /run/resolv.conf /etc/resolv.conf
shift
exec "$@"
"""


def main() -> int:
    arguments = _arguments()
    if arguments.inside:
        from tests.cluster.drill import run

        return run(arguments, Path("/tmp/logs"))
    reason = missing()
    if reason:
        _say(f"SKIPPED: {reason}")
        return 0
    more = []
    if arguments.slow:  # the hosts reach nothing outside: what they serve must be there before
        from actors.engine.gguf_import import ensure_smollm2

        more = ["--bundled", str(ensure_smollm2())]
    folder = Path(tempfile.mkdtemp(prefix="dspark-drill-"))
    (folder / "logs").mkdir()
    again = [sys.executable, "-m", "tests.cluster", *sys.argv[1:], "--inside", *more]
    command = ["unshare", *SPACES, "bash", "-c", INSIDE, "bash", str(folder), *again]
    done = subprocess.run(command, env=_environment(), check=False)
    if done.returncode or arguments.keep:
        _say(f"what the hosts and Ray said lies in {folder / 'logs'}")
    else:
        shutil.rmtree(folder)
    _say("FAILED" if done.returncode else "PASS")
    return done.returncode


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make test-cluster", description=__doc__)
    parser.add_argument(
        "--model", choices=("tiny", "laptop-moe"), default="tiny", help="a random mixture, or ours"
    )
    parser.add_argument("--streams", type=int, default=6, help="open while a host dies (default 6)")
    parser.add_argument("--tokens", type=int, default=1200, help="of each stream (default 1200)")
    parser.add_argument(
        "--slow",
        action="store_true",
        help="instead: one host computes slower; measured, so nothing else may run",
    )
    parser.add_argument("--keep", action="store_true", help="keep the logs when all went well too")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--bundled", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def _environment() -> dict[str, str]:
    """Ours without what would lead a Ray of the drill to one outside."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "DSPARK_"))}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
