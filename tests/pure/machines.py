"""State machines that must pass, and that must fail once something is broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

QUICK = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
UNTIL_FOUND = settings(
    QUICK,
    max_examples=1000,
    derandomize=True,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    print_blob=False,
)


def holds(machine: type[RuleBasedStateMachine]) -> None:
    """Run a machine over many orders of events."""
    run_state_machine_as_test(machine, settings=QUICK)


def finds(
    machine: type[RuleBasedStateMachine],
    of: type,
    method: str,
    mutant: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine fails when `method` does what `mutant` does; the product's own assertions count as well."""
    monkeypatch.setattr(of, method, mutant)
    with pytest.raises(Exception):  # noqa: B017, PT011
        run_state_machine_as_test(machine, settings=UNTIL_FOUND)
