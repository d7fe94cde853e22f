"""Tiny random checkpoints and what transformers makes of them, computed once a session by an interpreter of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from actors.engine.checkpoint import find_model
from tests.torch_cpu.group_streams import texts_of

ROOT = Path(__file__).resolve().parents[2]
INTERPRETER = ROOT / ".oracle" / "bin" / "python"


def run_oracle(out_dir: Path, *arguments: Path) -> Path:
    """Let transformers write into `out_dir`; skips where its environment does not exist."""
    if not INTERPRETER.is_file():
        pytest.skip("no .oracle environment with transformers: run `make oracle`")
    script = ROOT / "tests" / "torch_cpu" / "transformers_oracle.py"
    # -I: neither the repository root (whose `kernels` shadows another package) nor the environment reaches it.
    command = [INTERPRETER, "-I", script, out_dir, *arguments]
    done = subprocess.run(command, cwd=out_dir, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return out_dir


@pytest.fixture(scope="session")
def oracle_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints, each with `expected.bin` (safetensors) beside it."""
    return run_oracle(tmp_path_factory.mktemp("oracle"))


@pytest.fixture(scope="session")
def bundled_model_expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`expected.bin` of the bundled model, in a folder of its own."""
    model_dir = find_model("smollm2-135m", progress=False)
    return run_oracle(tmp_path_factory.mktemp("bundled"), model_dir)


@pytest.fixture(scope="module", params=["mixtral", "llama"])
def group_model(oracle_models: Path, request: pytest.FixtureRequest) -> Path:
    """A mixture of experts, and a dense model whose feed-forwards are cut into slices."""
    torch.set_num_threads(1)
    return oracle_models / request.param


@pytest.fixture(scope="module")
def group_texts(group_model: Path) -> dict[str, list[int]]:
    """What one rank makes of every kind of stream."""
    return texts_of(group_model)
