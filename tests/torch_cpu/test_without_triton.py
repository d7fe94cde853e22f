"""A machine without Triton serves: nothing that serves imports it, and the log says what computes instead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVE = """
import importlib, importlib.metadata, logging, pkgutil, sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refusing())
known = importlib.metadata.version

def version(name):
    if name == "triton":
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)

importlib.metadata.version = version
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
import actors.engine, kernels
for package in (kernels, actors.engine):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.startswith("kernels.device") and not module.name.endswith("__main__"):
            importlib.import_module(module.name)

import numpy as np
from actors.engine.trial import TrialSequences
from tests.torch_cpu.rank_engines import real_drafter
from tests.torch_cpu.test_drafter_engine import Stream, commit_batch, tiny_config, tiny_engine as drafter, tiny_model
from tests.torch_cpu.tiny_target import tiny_engine
from kernels import bench, dispatch

rows = TrialSequences(tiny_engine("cpu"), [np.arange(40) % 60])
rows.engine.step(rows.plan({0: 17}))
assert (rows.engine.step(rows.plan({0: 3}, rounds=True)).next_token >= 0).all()
stream = Stream("a", 20, tiny_config())
assert drafter(tiny_model(tiny_config())).advance(commit_batch([stream.commit(0, 9)])) is not None
print(dispatch.describe("cuda"))
print(bench.obstacle())
assert not [name for name in sys.modules if name.split(".")[0] == "triton"]
"""


def test_everything_that_serves_runs_where_triton_cannot_be_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVE], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "drafter: kernels on cpu: torch" in done.stdout
    assert "kernels on cuda: torch, several times slower; install Triton" in done.stdout


def test_kernel_benchmark_explains_itself_without_a_gpu() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kernels.bench", "--json"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "no CUDA device here" in done.stdout or '"gpu": {' in done.stdout
