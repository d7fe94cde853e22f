"""How a command reaches the supervisor of a cluster: of the one that `dspark serve` runs here, or of `--cluster`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from cluster.commands import remote
from cluster.commands.control import require_running
from cluster.console import CommandError

ASK_TIMEOUT_S = 60.0


class SupervisorAwayError(CommandError):
    """It may be starting again."""


def at(arguments: argparse.Namespace, work: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """What `work` makes of the deployment of --cluster, or of the one that `dspark serve` runs here."""
    address = arguments.cluster or require_running(arguments.state).ray_address
    if not address:
        raise CommandError("the cluster is still starting; wait until `dspark status` says ready")

    def here(address: str) -> dict[str, Any]:
        with remote.joined(address) as found:
            if found is None:
                raise CommandError(f"{address}: nothing is deployed there")
            return work(found)

    return remote.here_quietly(address, here)


def ask(found: Any, method: str, *arguments: Any) -> Any:
    """An answer of the supervisor; what it refuses becomes our own error."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        return ray.get(getattr(found.supervisor, method).remote(*arguments), timeout=ASK_TIMEOUT_S)
    except RayTaskError as error:
        raise CommandError(str(error.cause)) from error
    except RayError as error:
        raise SupervisorAwayError(f"the supervisor does not answer: {error}") from error
