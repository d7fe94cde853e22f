"""Tiny random checkpoints and what transformers makes of them, computed once a session by an interpreter of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INTERPRETER = ROOT / ".oracle" / "bin" / "python"


@pytest.fixture(scope="session")
def oracle_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints, each with `expected.bin` (safetensors) beside it."""
    if not INTERPRETER.is_file():
        pytest.skip("no .oracle environment with transformers: run `make oracle`")
    out_dir = tmp_path_factory.mktemp("oracle")
    script = ROOT / "tests" / "torch_cpu" / "transformers_oracle.py"
    # -I: neither the repository root (whose `kernels` shadows another package) nor the environment reaches it.
    done = subprocess.run(
        [INTERPRETER, "-I", script, out_dir], cwd=out_dir, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out_dir
