"""What a running cluster can take over: at once, with a restart of some of its members, or never."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from configs.autoscale import AutoscaleConfig
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
Restarted = Literal["drafter", "target"]  # roles whose members can be restarted one by one
_RANKS: frozenset[Restarted] = frozenset({"target"})
_DRAFTERS: frozenset[Restarted] = frozenset({"drafter"})
# Settings that a member reads when it starts, and whose members: the rest never changes under running streams.
ON_RESTART: dict[str, frozenset[Restarted]] = {
    "model.drafter": _DRAFTERS,  # and ranks, where the new one reads other layers of theirs
    "drafter.gamma": _RANKS | _DRAFTERS,
    "drafter.draft_top_k": _RANKS | _DRAFTERS,  # ranks measure their steps with it
    "drafter.max_wait_ms": _RANKS,
    "drafter.stop_share": _RANKS,
    "policy.explain_rounds": _RANKS,
    # The supervisor reads them anew all the time.
    **{f"autoscale.{name}": frozenset() for name in AutoscaleConfig.model_fields},
    **dict.fromkeys(
        (
            *("target.dispatch", "target.rebalance_steps", "target.redundant_experts"),
            *("target.collective_timeout_s", "target.block_size", "target.kv_cache_tokens"),
            *("target.prefix_cache", "target.max_running", "target.max_waiting"),
            *("target.max_batch_tokens", "target.max_step_stretch"),
            *("calibration.online", "calibration.explore_share", "calibration.looks_per_alarm"),
        ),
        _RANKS,
    ),
}
# Why the others do not, by how their names begin; the first that fits.
_NEVER = (
    ("model.", "running streams would not go on with the tokens they began with"),
    ("ingress.", "the HTTP front reads it when it is deployed"),
    ("policy.", "the HTTP front numbers requests by it"),
    ("link.", "all members must speak the same"),
    ("telemetry.", "the HTTP front reads it when it is deployed"),
    ("", "it says where members are placed"),
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
    fixed = [change for name, change in changes(running, wanted).items() if name not in AT_RUN_TIME]
    if fixed:
        raise FixedSettingError(
            f"a running cluster cannot change {', '.join(fixed)}; restart it with the new "
            f"configuration, or change only {', '.join(sorted(AT_RUN_TIME))}"
        )
    return wanted.policy


def at_run_time(policy: PolicyConfig, newer: PolicyConfig) -> PolicyConfig:
    """`policy`, with those settings of `newer` that need no restart."""
    names = (name.removeprefix("policy.") for name in AT_RUN_TIME)
    return policy.model_copy(update={name: getattr(newer, name) for name in names})


def changes(running: ClusterConfig, wanted: ClusterConfig) -> dict[str, str]:
    """Every setting that differs, and how: "drafter.gamma (5 → 7)"."""
    now = {name: value for name, value, _ in describe(running)}
    return {
        name: f"{name} ({now[name]!r} → {value!r})"
        for name, value, _ in describe(wanted)
        if value != now[name]
    }


def require_rollable(running: ClusterConfig, wanted: ClusterConfig) -> None:
    """That `wanted` can take the place of what runs, member by member.

    Raises:
        FixedSettingError: naming each setting that cannot, why, and what to do instead.
    """
    fixed = [
        f"{change}: {_why_never(name)}"
        for name, change in changes(running, wanted).items()
        if name not in AT_RUN_TIME and name not in ON_RESTART
    ]
    if (running.model.drafter is None) != (wanted.model.drafter is None):
        fixed.append("model.drafter: there is room for drafters only where some were deployed")
    if fixed:
        raise FixedSettingError(
            f"a rollout cannot change {'; '.join(fixed)}. Leave it as it is, or end this deployment "
            "(`dspark stop`) and deploy the new configuration"
        )


def restarted_by(
    running: ClusterConfig, wanted: ClusterConfig, *, other_taps: bool = False
) -> Collection[Restarted]:
    """The roles whose members must start again to change from `running` to `wanted`.

    `other_taps`: the new drafter reads other layers of the target than the ranks give out now.
    """
    roles: set[Restarted] = {"target"} if other_taps else set()
    for name in changes(running, wanted):
        roles |= ON_RESTART.get(name, frozenset())
    return roles


def _why_never(name: str) -> str:
    return next(why for begins, why in _NEVER if name.startswith(begins))
