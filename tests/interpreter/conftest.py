"""Kernels run in Triton's interpreter: decided before Triton is imported, hence here and in a process of its own."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import pytest


def _obstacle() -> str | None:
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton is loaded already: run tests/interpreter in a process of its own"
    if find_spec("triton") is None:
        return "Triton is not installed, so kernels are neither interpreted nor compiled"
    return None


OBSTACLE = _obstacle()
collect_ignore_glob = ["test_*.py"] if OBSTACLE else []
if not OBSTACLE:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if OBSTACLE:
        terminalreporter.write_line(f"tests/interpreter: {OBSTACLE}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if OBSTACLE and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
