"""Tests that launch kernels. Without a CUDA device, or without Triton, each is skipped and says why."""

from __future__ import annotations

import os

import pytest
import torch

from kernels import dispatch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _obstacle()
    for item in items:
        if "/tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def _obstacle() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device here"
    if not dispatch.triton_version():
        return "Triton is not installed: pip install 'dspark-cluster[gpu]'"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "kernels are interpreted in this process: run tests/gpu on its own"
    return None
