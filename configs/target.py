"""Settings of the target ranks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.section import Section


class TargetConfig(Section):
    """Every target rank."""

    num_ranks: int = Field(1, ge=1, le=1024, description="Target actors (data parallel replicas).")
    group_size: int = Field(
        1,
        ge=1,
        le=1024,
        description="Ranks that share one copy of the experts, or of a dense model's feed-forwards, and step together; "
        "1 = each has all.",
    )
    dispatch: Literal["all_gather", "all_to_all"] = Field(
        "all_gather",
        description="How tokens reach experts of other ranks: all_gather = every rank sees all tokens, in fewer "
        "messages; all_to_all = only the copies an expert needs travel.",
    )
    rebalance_steps: int = Field(
        0,
        ge=0,
        description="Steps of a group after which experts are moved to where the load is lower; 0 = never.",
    )
    redundant_experts: int = Field(
        0,
        ge=0,
        description="Copies of hot experts a rank may hold beyond its even share, in experts a layer.",
    )
    collective_timeout_s: float = Field(
        20.0,
        gt=0,
        description="Longest a rank waits for its group before the group is formed anew, in seconds.",
    )
    num_threads: int = Field(
        0, ge=0, description="CPU threads of one rank; 0 = share the node's cores evenly."
    )
    num_cpus: float = Field(
        0.5, ge=0, description="CPUs Ray reserves for one rank (a placement weight, not a limit)."
    )
    num_gpus: float = Field(0.0, ge=0, description="GPUs Ray reserves for one rank.")
    node_resource: str | None = Field(
        None,
        min_length=1,
        description="Ray resource that marks the nodes for ranks and their drafters; null = any node.",
    )
    block_size: int = Field(16, ge=1, le=256, description="KV cache block, in tokens.")
    kv_cache_tokens: int = Field(32768, ge=64, description="KV cache of one rank, in tokens.")
    prefix_cache: bool = Field(
        True, description="Whether prompts that begin alike share KV and draft context."
    )
    max_running: int = Field(32, ge=1, description="Requests that run at once on one rank.")
    max_waiting: int = Field(
        128, ge=0, description="Granted requests that may wait for a place on one rank."
    )
    max_batch_tokens: int = Field(
        256, ge=8, description="Tokens of one forward, prefill chunks included."
    )

    max_step_stretch: float = Field(
        2.5,
        gt=1,
        description="How many times as long as without them a step may take for prompt tokens that ride in it; bounds "
        "the gap between tokens of running streams.",
    )

    @property
    def rank_names(self) -> tuple[str, ...]:
        """Of the target actors, as `policy.group_size` counts them."""
        return tuple(f"target-{number}" for number in range(self.num_ranks))
