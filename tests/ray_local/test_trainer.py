"""Trainer actors under Ray: they make the steps of one process, and a killed one costs nothing but time."""

from __future__ import annotations

import argparse
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from actors.engine.training import options, stages
from actors.engine.training.runs import Paths
from cluster.training_run import TrainingRun
from tests.torch_cpu.rank_engines import HIDDEN, VOCAB, write_tiny_llama
from tests.torch_cpu.training_shards import shards

pytestmark = [pytest.mark.ray, pytest.mark.slow]

STEPS = 250  # long enough to be seen running, a few seconds


def train_options(**changes: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    options.add_work(parser)
    options.add_train_options(parser)
    given = "--work . --gamma 3 --layers 1 --rank 4 --taps 0 2 --draft-vocab 0 --sequences 4 --anchors 6"
    plain = [
        "--steps",
        str(STEPS),
        "--validate",
        "0",
        "--rate",
        "1e-4",
        "--checkpoint-seconds",
        "0",
    ]
    made = parser.parse_args([*given.split(), *plain])
    return argparse.Namespace(**{**vars(made), **changes})


def run_paths(work: Path, name: str) -> Paths:
    return Paths(work, work / "target", name)


def parameters(paths: Paths) -> dict[str, torch.Tensor]:
    state = torch.load(paths.run / "checkpoint.pt")
    assert state["step"] == STEPS
    found: dict[str, torch.Tensor] = state["model"]
    return found


def kill_one(run: TrainingRun) -> None:
    """Kill the second trainer once the first has made a few steps."""
    while True:
        actors = list(run.actors)
        found = ray.get(actors[0].progress.remote(), timeout=60) if actors else None
        if found is not None and found.step >= 3:
            ray.kill(actors[1])
            return


def test_a_run_whose_trainer_is_killed_ends_where_one_trainer_ends(
    local_ray: None, tmp_path: Path
) -> None:
    (tmp_path / "target").mkdir()
    write_tiny_llama(tmp_path / "target")
    shards(tmp_path / "train", vocab=VOCAB, width=HIDDEN)
    torch.set_num_threads(1)
    alone = run_paths(tmp_path, "alone")
    stages.train(alone, train_options(checkpoint_seconds=1e9))

    together = run_paths(tmp_path, "together")
    run = TrainingRun(together, train_options(), 2)
    killer = threading.Thread(target=kill_one, args=(run,), daemon=True)
    killer.start()
    done = run.run()
    killer.join(60)
    assert done["step"] == STEPS
    assert done["restarts"] == 1
    log = [json.loads(line) for line in (together.run / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log] == list(range(1, STEPS + 1))
    expected = parameters(alone)
    for name, found in parameters(together).items():
        torch.testing.assert_close(found, expected[name], atol=2e-3, rtol=1e-2, msg=name)


def test_a_run_that_cannot_go_on_says_what_is_wrong(local_ray: None, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    write_tiny_llama(tmp_path / "target")
    run = TrainingRun(run_paths(tmp_path, "empty"), train_options(), 2)
    with pytest.raises(FileNotFoundError, match="generate on-policy text first"):
        run.run()
    assert run.num_restarts == 0
