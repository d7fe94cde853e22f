"""Kernels run in Triton's interpreter: decided before Triton is imported, hence here and in a process of its own."""

from __future__ import annotations

import os
import sys

import pytest

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "Triton is loaded already: run tests/interpreter on its own", allow_module_level=True
    )
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip(
    "triton", reason="no Triton on this machine: kernels are neither run nor compiled"
)
