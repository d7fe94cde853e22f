"""`dspark chaos` itself, over tiny models: every kind of fault strikes at least once, and no stream suffers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.chaos.checker import check
from cluster.chaos.history import read_history
from cluster.chaos.plan import KINDS
from tests.http.engine_rank import LETTERS
from tests.torch_cpu.rank_engines import write_tiny_llama
from tests.torch_cpu.tiny_tokenizers import write_tokenizer

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
STREAMS = 8


@pytest.fixture(scope="module")
def stormy(
    private_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Exit status and report of one run, on a Ray of its own."""
    model, out = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("histories")
    write_tiny_llama(model)
    write_tokenizer(model, LETTERS, specials=3)
    settings = {
        "model.name": "tiny",
        "model.path": str(model),
        "model.dtype": "float32",
        "model.drafter": "ngram",
        "target.num_cpus": 0.1,
        "drafter.num_cpus": 0.1,
        "ingress.proxy": "python",
    }
    command = [sys.executable, "-m", "cluster", "chaos", "--json", "--out", str(out)]
    command += ["--kills", "1", "--streams", str(STREAMS), "--seed", "11", "--at-once", "4"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ.copy(), capture_output=True, text=True, check=False
    )
    assert done.stdout, done.stderr[-4000:]
    yield done.returncode, json.loads(done.stdout.splitlines()[-1])
    assert not [p for p in psutil.Process().children(recursive=True) if "ray::" in str(p.cmdline())]


def test_every_kind_of_fault_struck_and_no_stream_lost_a_token(
    stormy: tuple[int, dict[str, Any]],
) -> None:
    code, told = stormy
    assert told["problems"] == [] and told["ok"] and code == 0, told["problems"]
    assert {kind: told["by_kind"][kind]["kills"] for kind in KINDS} == dict.fromkeys(KINDS, 1)
    assert told["streams"] >= 2 * STREAMS
    assert all(told["by_kind"][kind]["recovery_s"] for kind in KINDS)


def test_the_faults_had_their_effects(stormy: tuple[int, dict[str, Any]]) -> None:
    _, told = stormy
    assert told["evidence"]["clients_left"] > 0 and told["evidence"]["clock_jumps"] == 2
    evidence = told["evidence"]  # whoever was killed before it was asked has told nothing
    assert evidence.get("messages_dropped", 0) + evidence.get("messages_delayed", 0) > 0
    killed = [kind for kind, about in KINDS.items() if about.action == "kill"]
    assert all(told["by_kind"][kind]["recovery_s"]["max"] > 0 for kind in killed)


def test_the_kept_history_repeats_the_verdict_and_names_its_seed(
    stormy: tuple[int, dict[str, Any]],
) -> None:
    _, told = stormy
    histories = [read_history(Path(path)) for path in told["histories"]]
    assert [events[0]["seed"] for events in histories] == [11, 11]
    verdicts = [check(events) for events in histories]
    assert sum(verdict.total.num_struck for verdict in verdicts) == told["kills"]
    # A checker that no longer looks would pass this too.
    tokens = next(event for event in histories[0] if event["event"] == "tokens")
    tokens["token_ids"][0] += 1
    assert check(histories[0]).total.difference.num_changed
