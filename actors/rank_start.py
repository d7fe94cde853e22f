"""From configuration and a loaded engine to what a rank needs: limits, decisions, the cost curve, a check of rows.

Rank 0 of a group checks for all of it, while the others take part in its steps; all measure at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from actors.core.admission import RankLimits
from actors.core.local_policy import LocalPolicy
from actors.core.messages import CloseDraft, Endpoint
from actors.core.own_profile import StepTimes
from actors.core.prefix_scheduler import allocate
from actors.core.rank import Outgoing, Rank
from actors.core.rank_calibration import RankCalibration
from actors.core.service_class import ClassAllocation, classes_of
from actors.core.sps import RankTimes
from actors.engine.base import DrafterSpec, TargetEngine, TargetSpec
from actors.group_member import GroupMember
from actors.timing import TimedDecider
from configs.policy import PolicyConfig
from configs.schema import ClusterConfig

MeasureSteps = Callable[[TargetEngine, ClusterConfig], StepTimes]


def limits_of(spec: TargetSpec, config: ClusterConfig) -> RankLimits:
    """What the rank admits and batches."""
    return RankLimits(
        num_blocks=spec.num_blocks,
        block_size=spec.block_size,
        max_model_len=spec.max_model_len,
        vocab_size=spec.vocab_size,
        max_running=config.target.max_running,
        max_waiting=config.target.max_waiting,
        max_batch_tokens=config.target.max_batch_tokens,
        gamma=gamma_of(config),
        max_wait_s=config.drafter.max_wait_ms / 1000,
        stop_share=config.drafter.stop_share,
        explain_rounds=config.policy.explain_rounds,
        max_step_stretch=config.target.max_step_stretch,
        prefix_cache=config.target.prefix_cache,
        model_identity=spec.identity,
    )


def rank_of(
    endpoint: Endpoint,
    spec: TargetSpec,
    config: ClusterConfig,
    decider: TimedDecider,
    policy: LocalPolicy,
) -> Rank:
    """The rank of a loaded target."""
    limits, calibration = limits_of(spec, config), calibration_of(config)
    return Rank(endpoint, limits, decider, calibration, policy.times)


def gamma_of(config: ClusterConfig) -> int:
    """Draft tokens of a block; 0 without a drafter."""
    return config.drafter.gamma if config.model.drafter else 0


def rows_are_invariant(engine: TargetEngine, member: GroupMember | None) -> bool:
    """Whether a row's result does not depend on its batch, on this machine."""
    if member is None:
        return engine.check_row_invariance()
    return bool(member.led(lambda: [engine.check_row_invariance()])[0])


def decider_of(rank: Endpoint, config: ClusterConfig, policy: LocalPolicy) -> TimedDecider:
    """What decides how much of each block is verified."""
    classes = classes_of(config.policy)
    weighed = ClassAllocation(classes) if classes else None
    return TimedDecider(rank.name, rank.epoch, policy, allocate, policy.drafting, weighed)


def calibration_of(config: ClusterConfig) -> RankCalibration:
    """What learns how true the drafter's confidences are."""
    stops = config.drafter.stop_share > 0
    return RankCalibration(gamma_of(config), config.calibration, config.policy.name, stops=stops)


def policy_of(policy: PolicyConfig, times: RankTimes | None = None) -> LocalPolicy:
    """What the rank goes by without a budget of the allocator's; `times`: what an earlier policy has learned."""
    lengths = policy.static_length, policy.static_threshold
    return LocalPolicy(policy.name, *lengths, policy.min_predicted_gain, times)


def misfit(drafter: DrafterSpec, target: TargetSpec, gamma: int) -> str:
    """Why this rank cannot use that drafter, as happens in the middle of a rollout; '' when it can."""
    if drafter.gamma != gamma:
        return f"it offers blocks of gamma={drafter.gamma}, not {gamma}"
    if drafter.tap_layer_ids != target.tap_layer_ids:
        return f"it reads layers {drafter.tap_layer_ids}, not {target.tap_layer_ids}"
    return ""


def farewells(rank: Rank, old: Sequence[Endpoint], staying: Sequence[Endpoint]) -> Outgoing:
    """A drafter that lives on without this rank shall forget what it holds for it."""
    names = {endpoint.name for endpoint in staying}
    out: Outgoing = []
    for endpoint in old:
        held = [r.request_id for r in rank.book.live.values() if r.drafter == endpoint.name]
        if endpoint.name not in names and held:
            out.append((endpoint, CloseDraft(rank.endpoint.name, tuple(held))))
    return out
