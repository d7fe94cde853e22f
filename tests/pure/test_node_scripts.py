"""The two scripts that the launcher runs on every node, in a home of their own."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "configs" / "ray_up"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """With what `dist/` brings, and commands that note how they were called."""
    setup = tmp_path / "dspark" / "setup"
    setup.mkdir(parents=True)
    for name in ("setup_node.sh", "node.sh"):
        shutil.copy(SCRIPTS / name, setup)
    (setup / "constraints.txt").write_text("torch==1\n")
    return tmp_path


def command(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def shell(home: Path, line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line],
        env={"HOME": str(home), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )


def set_up(home: Path) -> subprocess.CompletedProcess[str]:
    return shell(home, "bash ~/dspark/setup/setup_node.sh")


def test_an_environment_that_was_there_is_left_alone(home: Path) -> None:
    command(home / "dspark/env/bin/dspark", "exit 0")
    done = set_up(home)
    assert done.returncode == 0 and "used as it is" in done.stdout


def test_without_a_wheel_it_says_what_makes_one(home: Path) -> None:
    done = set_up(home)
    assert done.returncode == 1 and "make dist" in done.stderr


def test_the_very_same_wheel_is_not_installed_again_and_another_is(home: Path) -> None:
    command(home / "dspark/env/bin/dspark", "exit 0")
    calls = home / "calls"
    command(home / "dspark/env/bin/pip", f'echo "$@" >> {calls}')
    wheel = home / "dspark/setup/dspark_cluster-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"first")
    content = b"first" + (home / "dspark/setup/constraints.txt").read_bytes()
    stamp = home / "dspark/env/.installed-by-setup-node"
    stamp.write_text(f"{hashlib.sha256(content).hexdigest()}  -")
    done = set_up(home)
    assert done.returncode == 0 and "nothing to do" in done.stdout and not calls.exists()

    wheel.write_bytes(b"second")
    done = set_up(home)
    assert done.returncode == 0, done.stderr
    installed = calls.read_text().splitlines()
    # torch first and alone, else pip fetches another build with the rest.
    assert installed[0].endswith("install torch==1")
    assert [line for line in installed[1:] if str(wheel) in line]
    assert "nothing to do" in set_up(home).stdout


def test_every_command_of_a_node_shows_the_token_and_heeds_the_machines_own_settings(
    home: Path,
) -> None:
    (home / "dspark/local.sh").write_text('DSPARK_RAY_OPTIONS="--num-cpus=3"\n')
    done = shell(home, '. ~/dspark/setup/node.sh; echo "$RAY_AUTH_MODE $DSPARK_RAY_OPTIONS $PATH"')
    assert done.stdout.startswith(f"token --num-cpus=3 {home}/dspark/env/bin:"), done


def test_a_start_is_tried_again_on_a_busy_machine_but_not_for_ever(home: Path) -> None:
    calls = home / "calls"
    command(
        home / "dspark/env/bin/ray",
        f'echo "$1" >> {calls}\n[ "$1" = stop ] || [ "$(grep -c start {calls})" -ge "$2" ]',
    )
    start = ". ~/dspark/setup/node.sh; patiently ray start"
    assert shell(home, f"{start} 2").returncode == 0
    assert calls.read_text().split() == ["start", "stop", "start"]
    calls.unlink()
    assert shell(home, f"{start} 9").returncode == 1
    assert calls.read_text().split().count("start") == 3
