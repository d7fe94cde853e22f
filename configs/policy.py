"""The settings of verification budgets, and of the classes of service they weigh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from configs.section import Section


class ServiceClassConfig(Section):
    """What the requests of one tenant or class are owed."""

    name: str = Field(
        min_length=1, max_length=64, description='Its name in requests: "dspark": {"class": "…"}.'
    )
    weight: float = Field(
        1.0, gt=0, description="What a token of its requests is worth, relative to other classes."
    )
    max_tpot_ms: float | None = Field(
        None, gt=0, description="Deadline: mean milliseconds a token; null = none."
    )
    min_verify_len: int = Field(
        0, ge=0, le=32, description="Draft tokens verified whatever they are worth."
    )
    max_verify_len: int | None = Field(
        None, ge=0, le=32, description="Most draft tokens verified in a round; null = the block."
    )


class PolicyConfig(Section):
    """How verification budgets are decided."""

    name: Literal["none", "static_length", "static_threshold", "algorithm1", "lagged", "joint"] = (
        Field(
            "lagged",
            description="none = no speculation; lagged = measured curves and survivals two steps old, each rank for "
            "itself; joint = the same for all ranks of a group at once.",
        )
    )
    group_size: int = Field(
        0,
        ge=0,
        le=1024,
        description="Ranks that joint plans together, in the order of their numbers; 0 = all ranks.",
    )
    classes: tuple[ServiceClassConfig, ...] = Field(
        (),
        strict=False,
        description="Classes of service that joint weighs; a request that names none is of the first.",
    )
    fairness: float = Field(
        0.0,
        ge=0,
        le=4,
        description="Between classes: 0 = most tokens of all; 1 = requests of half the speed count twice.",
    )
    static_length: int = Field(
        5, ge=0, le=32, description="Draft tokens verified per request by static_length."
    )
    static_threshold: float = Field(
        0.3, ge=0, le=1, description="Lowest survival verified by static_threshold (a probability)."
    )
    min_predicted_gain: float = Field(
        0.0,
        ge=0,
        description="Relative gain over no speculation below which a budget is not applied.",
    )
    budget_ttl_steps: int = Field(
        8, ge=1, description="Steps after which a budget is stale and the rank decides alone."
    )
    explain_rounds: int = Field(
        0,
        ge=0,
        le=4096,
        description="Rounds kept of every request for `dspark explain`; 0 = only of requests that ask for it.",
    )

    def conflicts(self, num_ranks: int) -> Iterator[tuple[str, str, str]]:
        """(field, problem, remedy) of each pair of settings that cannot both hold."""
        if self.group_size and num_ranks % self.group_size:
            yield (
                "policy.group_size",
                f"target.num_ranks = {num_ranks} is no multiple of it",
                "use a divisor, or 0 for one group of all ranks",
            )
        if self.classes and self.name != "joint":
            yield (
                "policy.classes",
                f"policy.name = {self.name} weighs no classes",
                "use policy.name = joint (with policy.group_size = 1, every rank for itself)",
            )
        names = [known.name for known in self.classes]
        for known in self.classes:
            if names.count(known.name) > 1:
                yield "policy.classes", f"two are named {known.name!r}", "give each its own name"
            if known.max_verify_len is not None and known.max_verify_len < known.min_verify_len:
                yield (
                    "policy.classes",
                    f"{known.name}: max_verify_len is below min_verify_len",
                    "raise one or lower the other",
                )
