"""What an engine must do, whatever it is made of. The Ray shells and the rank loop know only these protocols."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from actors.core.layout import StepPlan, StepResult
from actors.core.messages import CommitBatch, ProposalBatch


@dataclass(frozen=True)
class TargetSpec:
    """Facts about a loaded target that others need."""

    name: str
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    # 0-based decoder layers whose raw outputs are the features; () without a drafter
    tap_layer_ids: tuple[int, ...]
    dtype: Literal["float32", "bfloat16"]
    device: str
    numerics: Literal["reproducible", "fast"]
    num_blocks: int  # physical KV blocks
    block_size: int  # tokens a block
    # hash of weights, dtype, device, threads: a cost curve is only valid for the same one
    identity: str

    @property
    def feature_dim(self) -> int:
        return len(self.tap_layer_ids) * self.hidden_size


@dataclass(frozen=True)
class DrafterSpec:
    """Facts about a loaded drafter that others need."""

    name: str
    gamma: int  # draft tokens a block
    draft_top_k: int
    feature_dim: int
    tap_layer_ids: tuple[int, ...]
    identity: str
    num_refused_calibrations: int = (
        0  # 1: there is one, for another target or drafter; it is not used
    )


class TargetEngine(Protocol):
    """The model whose distribution is served. Single-threaded: one caller, one step at a time."""

    spec: TargetSpec

    def step(self, plan: StepPlan) -> StepResult:
        """Run one flattened forward, write K/V to `plan.slot_mapping`, apply each row's acceptance rule.

        K/V of rejected draft tokens is left where it is: the next step overwrites those slots, and nothing reads
        beyond `context_len + own query` (that is how the cache is truncated).
        """
        ...

    def check_row_invariance(self) -> bool:
        """Whether a row's logits are bitwise the same alone, in a batch, and at any query length."""
        ...


class DrafterEngine(Protocol):
    """The model that proposes. Single-threaded."""

    spec: DrafterSpec

    def advance(self, batch: CommitBatch) -> ProposalBatch | None:
        """Append the features to the contexts (opening unknown requests), then draft for the rows that want a block.

        Entries whose `committed_lens` is not beyond what the context already holds are duplicates and are ignored.
        Returns None when no row wants a block.
        """
        ...

    def close(self, request_ids: tuple[str, ...]) -> None:
        """Forget these requests; unknown ids are fine."""
        ...

    def open_requests(self) -> tuple[str, ...]:
        """Ids whose context is held (for the idle integrity check)."""
        ...
