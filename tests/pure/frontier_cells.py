"""Rows as `dspark bench` measures them, for tests of what is made of them."""

from __future__ import annotations

from typing import Any


def row(
    label: str,
    concurrency: int,
    repeat: int = 0,
    node: float = 10.0,
    user: float | None = None,
    temperature: float = 0.0,
    **more: Any,
) -> dict[str, Any]:
    return {
        "label": label,
        "concurrency": concurrency,
        "temperature": temperature,
        "repeat": repeat,
        "num_requests": 3,
        "num_errors": 0,
        "error": None,
        "node_tokens_per_s": node,
        "user_tokens_per_s": node / concurrency if user is None else user,
        "ttft_s": 0.1,
        "ttft_p95_s": 0.2,
        "acceptance_length": 1.5,
        "scheduled_per_round": 2.0,
        "digests": ["a", "b", "c"],
        **more,
    }
