"""Which settings a running cluster can take over, and which need a restart."""

from __future__ import annotations

from dataclasses import dataclass

from configs.load import describe
from configs.policy import PolicyConfig
from configs.schema import ClusterConfig

AT_RUN_TIME = frozenset(
    {
        "policy.name",
        "policy.group_size",
        "policy.static_length",
        "policy.static_threshold",
        "policy.min_predicted_gain",
        "policy.budget_ttl_steps",
    }
)


class FixedSettingError(ValueError):
    """A change that a running cluster cannot take over; the message names every such setting."""


@dataclass(frozen=True)
class PolicyOrder:
    """The policy that all ranks and the allocator follow, once they have heard of it.

    Attributes:
        number: rises with every order. Budgets carry it, so that none outlives its policy (C3).
    """

    number: int
    policy: PolicyConfig


def policy_change(running: ClusterConfig, wanted: ClusterConfig) -> PolicyConfig:
    """The policy of `wanted`, when nothing else in it differs from what runs.

    Raises:
        FixedSettingError: naming the settings that can only change with a restart.
    """
    now = {name: value for name, value, _ in describe(running)}
    fixed = [
        f"{name} ({now[name]!r} → {value!r})"
        for name, value, _ in describe(wanted)
        if name not in AT_RUN_TIME and value != now[name]
    ]
    if fixed:
        raise FixedSettingError(
            f"a running cluster cannot change {', '.join(fixed)}; restart it with the new "
            f"configuration, or change only {', '.join(sorted(AT_RUN_TIME))}"
        )
    return wanted.policy
