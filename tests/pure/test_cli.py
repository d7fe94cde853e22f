"""The command as a whole: what it shows without a cluster, and a cluster of its own for one command."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import actors.engine
from cluster.cli import main
from cluster.commands.local import local_cluster
from cluster.console import CommandError
from configs.load import load
from configs.schema import ClusterConfig

ROOT = Path(__file__).parents[2]


def test_config_prints_yaml_that_loads_back_to_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--config",
        "single-node-gpu",
        "--set",
        "model.drafter=null",
        "--set",
        "model.name='7'",
    ]
    assert main(["config", *options]) == 0
    text = capsys.readouterr().out
    path = tmp_path / "again.yaml"
    path.write_text(text, encoding="utf-8")
    again = load(str(path), environment={})
    assert again == load("single-node-gpu", ["model.drafter=null", "model.name='7'"])
    assert "Longest prompt plus output, in tokens. (allowed: integer, ≥ 16)" in text


def test_config_as_json_is_the_whole_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--set", "target.num_ranks=3", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert ClusterConfig.model_validate(values).target.num_ranks == 3


def test_a_bad_setting_is_one_line_and_status_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--set", "target.num_rank=3", "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert "did you mean target.num_ranks?" in printed.err
    assert "did you mean" in json.loads(printed.out)["error"]


def test_version_names_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["python"].startswith("3.")
    assert main(["version"]) == 0
    assert "pydantic" in capsys.readouterr().out


def test_help_of_every_command_works(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (
        "serve",
        "stop",
        "status",
        "chat",
        "demo",
        "bench",
        "export",
        "up",
        "down",
        "deploy",
        "rollout",
        "drain",
        "undrain",
        "environment",
        "config",
        "version",
    ):
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0
        assert "--state" in capsys.readouterr().out


def test_python_m_cluster_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cluster", "version"], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == 0
    assert b"python" in done.stdout


def test_output_into_a_closed_pipe_is_no_crash() -> None:
    done = subprocess.run(
        f"{sys.executable} -m cluster config | true",
        shell=True,
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert b"Traceback" not in done.stderr
    assert b"Exception" not in done.stderr


@pytest.fixture
def engine_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(
        config: ClusterConfig,
        batch_sizes: Sequence[int],
        progress: Callable[[str], None],
        context: int,
    ) -> dict[str, Any]:
        progress("measuring")
        rates = {str(size): 10.0 * size for size in batch_sizes}
        parts = {"1": {"linears": 2.5, "attention": 0.25}}
        return {
            "tokens_per_s": rates,
            "breakdown_ms": parts,
            "dtype": config.model.dtype,
            "context": context,
        }

    module = ModuleType("actors.engine.bench")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "actors.engine.bench", module)
    monkeypatch.setattr(actors.engine, "bench", module, raising=False)


@pytest.mark.usefixtures("engine_bench")
def test_bench_prints_tokens_per_second_by_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--engine-only", "--json", "--batch", "1", "2"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["tokens_per_s"] == {"1": 10.0, "2": 20.0}
    assert report["dtype"] == load("laptop-cpu").model.dtype and report["context"] == 128
    assert main(["bench", "--engine-only"]) == 0
    text = capsys.readouterr().out
    assert "160.0" in text
    assert "a step at batch 1, in ms: linears 2.5, attention 0.2" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine-only", "--ranks", "2"], "one of them"),
        (["--engine-only", "--batch", "0"], "at least 1"),
    ],
)
def test_bench_refuses_what_it_cannot_measure(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *options]) == 2
    assert message in capsys.readouterr().err


SERVE_STUB = """#!{python}
import argparse, pathlib, signal, sys, threading
sys.path.insert(0, {root!r})
from cluster.run_state import RunState, register
parser = argparse.ArgumentParser()
parser.add_argument("--state")
given, rest = parser.parse_known_args()
if "target.num_ranks=3" in rest:
    sys.exit("stub: cannot start")
done = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: done.set())
state = RunState(1, "ready", "http://here/v1", "m", "fast", 0.0)
with register(pathlib.Path(given.state), state):
    done.wait()
pathlib.Path({marker!r}).write_text(" ".join(rest))
"""


@pytest.fixture
def serve_stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `dspark serve` that only registers itself; on SIGTERM it writes its arguments to the returned file."""
    stub, marker = tmp_path / "stub", tmp_path / "ended"
    text = SERVE_STUB.format(python=sys.executable, root=str(ROOT), marker=str(marker))
    stub.write_text(text, encoding="utf-8")
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))
    return marker


def arguments(*settings: str) -> argparse.Namespace:
    return argparse.Namespace(config="laptop-cpu", set=list(settings))


def test_a_cluster_of_our_own_is_ended_even_when_the_command_fails(
    serve_stub: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        with local_cluster(arguments("drafter.gamma=2"), "model.numerics=fast") as endpoint:
            assert endpoint == "http://here/v1"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        command()
    given = serve_stub.read_text()
    assert "--end-with-parent" in given
    assert "--set drafter.gamma=2 --set model.numerics=fast --set ingress.port=" in given
    assert capfd.readouterr().out == ""


@pytest.mark.usefixtures("serve_stub")
def test_a_cluster_that_does_not_start_is_one_line() -> None:
    with (
        pytest.raises(CommandError, match="did not start"),
        local_cluster(arguments("target.num_ranks=3")),
    ):
        pytest.fail("nothing to run on")
