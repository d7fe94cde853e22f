"""Measured cost curves: seconds of a complete step as a function of its tokens (paper section 5.2, contract C6).

A curve keeps the staircase of the hardware: nothing is smoothed, measured points are joined by straight lines, and
dips are lifted to the largest time at or below them, so that measurement noise never makes more tokens look cheaper.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from actors.core.messages import RankProfile, StepReport
from actors.core.prediction import PredictionError

Float64 = npt.NDArray[np.float64]

FLAT_RATIO = 1.02  # a curve whose dearest step costs less than this times its cheapest says nothing about tokens
CORRECTION_LIMIT = 16.0
TRUST_LIMIT = 3.0
MIN_SERVED_STEPS = 8


class CurveError(ValueError):
    """A measured curve cannot be used; the message names the field, the value and the remedy."""


class CurveIdentityError(CurveError):
    """The curve was measured on another model, device, dtype or topology."""


@dataclass(frozen=True)
class CostCurve:
    """Step time in seconds over batch tokens, and drafting time over requests.

    `is_flat` warns that the measured range shows no cost of a token at all. A search over such a curve would verify
    everything whatever it costs, so the policies fall back to a price instead.
    """

    identity: str
    batch_tokens: Float64  # [G] strictly ascending
    step_time_s: Float64  # [G] never decreasing
    draft_requests: Float64  # [H] strictly ascending
    draft_time_s: Float64  # [H] never decreasing
    gamma: int
    is_flat: bool
    # [G] never decreasing: of step_time_s, what a rank of a group did for its own tokens; None: not told apart
    own_time_s: Float64 | None = None
    tail_slope: float = field(init=False)  # seconds a token beyond the last point

    def __post_init__(self) -> None:
        # The last segment continues, but a curve that ends on a tread must not promise free tokens for ever.
        slopes = (
            np.diff(self.step_time_s) / np.diff(self.batch_tokens)
            if len(self.batch_tokens) > 1
            else [0.0]
        )
        mean = (self.step_time_s[-1] - self.step_time_s[0]) / max(
            self.batch_tokens[-1] - self.batch_tokens[0], 1.0
        )
        object.__setattr__(self, "tail_slope", float(max(slopes[-1], mean)))

    @classmethod
    def of(cls, profile: RankProfile, expected_identity: str | None = None) -> CostCurve:
        """Check a profile and turn it into a curve.

        Raises:
            CurveIdentityError: `expected_identity` is given and differs.
            CurveError: no points, unequal lengths, or values that are not positive and finite.
        """
        if expected_identity is not None and profile.identity != expected_identity:
            raise CurveIdentityError(
                f"identity: curve of {profile.identity!r}, this rank is {expected_identity!r}; profile it again"
            )
        _check(profile)
        tokens, step_time = _steps(profile.batch_tokens, profile.step_time_s)
        requests, draft_time = _steps(profile.num_requests, profile.draft_time_s)
        flat = bool(step_time[-1] < FLAT_RATIO * step_time[0])
        curve = cls(profile.identity, tokens, step_time, requests, draft_time, profile.gamma, flat)
        if profile.shared_time_s is None:
            return curve
        own_s = np.maximum(profile.step_time_s - profile.shared_time_s, np.finfo(np.float64).tiny)
        return replace(curve, own_time_s=_steps(profile.batch_tokens, own_s)[1])

    @property
    def own(self) -> CostCurve | None:
        """What the rank does for its own tokens alone; None: not told apart."""
        return None if self.own_time_s is None else replace(self, step_time_s=self.own_time_s)

    def verify_time_s(self, batch_tokens: npt.ArrayLike) -> Float64:
        """Seconds of a target step of these many tokens, without drafting. Any shape."""
        tokens = np.asarray(batch_tokens, np.float64)
        inside = np.interp(tokens, self.batch_tokens, self.step_time_s)
        beyond: Float64 = np.maximum(tokens - self.batch_tokens[-1], 0.0) * self.tail_slope
        return inside + beyond

    def step_time_s_at(self, num_requests: int, batch_tokens: npt.ArrayLike) -> Float64:
        """Seconds of a complete round, drafting for `num_requests` included. Any shape of `batch_tokens`.

        Drafting is already paid for when tokens are scheduled; it belongs in the time because throughput is tokens
        over the whole round.
        """
        return self.verify_time_s(batch_tokens) + self.draft_time_s_at(num_requests)

    def draft_time_s_at(self, num_requests: int) -> float:
        """Seconds of drafting for these many requests; nothing for none."""
        if not num_requests:
            return 0.0
        drafting = float(np.interp(num_requests, self.draft_requests, self.draft_time_s))
        return drafting * max(num_requests / float(self.draft_requests[-1]), 1.0)


def draft_times_at(
    num_requests: npt.NDArray[np.integer], sizes: npt.ArrayLike, seconds: npt.ArrayLike
) -> Float64:
    """Seconds of drafting for other numbers of requests than those it was measured for: [H] sizes, ascending.

    Beyond the last size the last segment goes on: drafting for a crowd must not look free.
    """
    known, times = np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)
    wanted = num_requests.astype(np.float64)
    slope = max((times[-1] - times[-2]) / (known[-1] - known[-2]), 0.0) if len(known) > 1 else 0.0
    beyond: Float64 = slope * np.maximum(wanted - known[-1], 0.0)
    return np.interp(wanted, known, times) + beyond


def _steps(points: npt.NDArray[np.integer], times: Float64) -> tuple[Float64, Float64]:
    """Points in strictly ascending order with the median time of each, dips lifted."""
    unique = np.unique(points)
    if len(unique) == len(points):
        medians = times[np.argsort(points)]
    else:
        medians = np.array([np.median(times[points == point]) for point in unique])
    return unique.astype(np.float64), np.maximum.accumulate(medians)


def _check(profile: RankProfile) -> None:
    shared_s = profile.draft_time_s if profile.shared_time_s is None else profile.shared_time_s
    lengths = {
        len(profile.batch_tokens),
        len(profile.num_requests),
        len(profile.step_time_s),
        len(profile.draft_time_s),
        len(shared_s),
    }
    if lengths == {0}:
        raise CurveError("batch_tokens: the curve has no points; profile the rank again")
    if len(lengths) != 1:
        raise CurveError(f"batch_tokens, num_requests and times: lengths {sorted(lengths)} differ")
    for name, values, lowest in (
        ("batch_tokens", profile.batch_tokens, 1.0),
        ("num_requests", profile.num_requests, 1.0),
        ("step_time_s", profile.step_time_s, np.finfo(np.float64).tiny),
        ("draft_time_s", profile.draft_time_s, 0.0),
        ("shared_time_s", shared_s, 0.0),
    ):
        bad = ~(np.isfinite(values) & (values >= lowest))
        if bad.any():
            raise CurveError(
                f"{name}: {values[bad][0]} is not positive and finite; profile the rank again"
            )


@dataclass
class ServedTimes:
    """How served steps differ from the curve: one robust ratio a region (a region is a doubling of batch tokens).

    A region's ratio moves by a bounded step in the direction of each served time, so it settles on the median and a
    single stalled step changes little.
    """

    log_ratio: Float64 = field(default_factory=lambda: np.zeros(24))
    num_steps: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(24, np.int64))
    least_step: float = 0.02  # of a log ratio, however much was served before

    def fold(self, batch_tokens: int, predicted_s: float, served_s: float) -> None:
        if batch_tokens < 1 or predicted_s <= 0 or served_s <= 0:
            return
        region = min(int(np.log2(batch_tokens)), len(self.log_ratio) - 1)
        self.num_steps[region] += 1
        gap = np.log(served_s / predicted_s) - self.log_ratio[region]
        step = max(self.least_step, 0.5 / self.num_steps[region])
        limit = np.log(CORRECTION_LIMIT)
        self.log_ratio[region] = np.clip(
            self.log_ratio[region] + np.clip(gap, -step, step), -limit, limit
        )

    def ratio(self, batch_tokens: npt.ArrayLike) -> Float64:
        """Factor on the predicted time, any shape. A region that was hardly served takes the nearest served one's."""
        served = np.flatnonzero(self.num_steps >= MIN_SERVED_STEPS)
        tokens = np.maximum(np.asarray(batch_tokens, np.float64), 1.0)
        if not len(served):
            return np.ones(tokens.shape)
        # Between the centres of regions the ratio is interpolated, so that correcting adds no steps of its own.
        ratio: Float64 = np.exp(np.interp(np.log2(tokens), served + 0.5, self.log_ratio[served]))
        return ratio

    @property
    def trusts_curve(self) -> bool:
        """False when measurement and prediction have parted: the regions disagree on the ratio.

        A machine that is slower throughout keeps the shape of its curve, and the best budget with it.
        """
        served = self.log_ratio[self.num_steps >= MIN_SERVED_STEPS]
        return len(served) < 2 or float(np.ptp(served)) <= np.log(TRUST_LIMIT)


@dataclass
class RankTimes:
    """The step times of one rank as known now: a measured curve, corrected by the steps it has served.

    Attributes:
        served: of target steps, by their tokens.
        drafts: of the time the rank stood waiting for blocks. One ratio for any number of them: while drafting for
            the whole batch is paused, waiting for a few still tells what it would cost.
        error: of the target steps foretold so far.
    """

    curve: CostCurve | None = None  # None until the rank was profiled
    served: ServedTimes = field(default_factory=ServedTimes)
    drafts: ServedTimes = field(default_factory=lambda: ServedTimes(least_step=0.1))
    error: PredictionError = field(default_factory=PredictionError)

    def measured(self, curve: CostCurve) -> None:
        """Take a new curve; what was served before says nothing about it."""
        fresh = RankTimes()
        self.curve, self.error = curve, fresh.error
        self.served, self.drafts = fresh.served, fresh.drafts

    def fold(
        self,
        num_requests: int,
        batch_tokens: int,
        num_prefill_tokens: int,
        served_s: float,
        draft_wait_s: float | None = None,
        num_blocks: int = 0,
    ) -> None:
        """Correct by one served round. Those with prefill are left out: prefill tokens cost differently.

        Args:
            served_s: of the target step; without `draft_wait_s` of the whole round, drafting included.
            draft_wait_s: how long the rank stood still for blocks before it.
            num_blocks: blocks that came. None came: the wait says nothing of drafting (none was asked for, or all
                were late).
        """
        if self.curve is None or not num_requests or num_prefill_tokens:
            return
        step_s = float(self.curve.verify_time_s(batch_tokens))
        if draft_wait_s is None:
            draft_s = self.curve.draft_time_s_at(num_requests)
            self.served.fold(batch_tokens, step_s + draft_s, served_s)
            self.drafts.fold(1, draft_s, served_s * draft_s / (step_s + draft_s))
            return
        self.error.note(step_s * float(self.served.ratio(batch_tokens)), served_s)
        self.served.fold(batch_tokens, step_s, served_s)
        draft_s = self.curve.draft_time_s_at(num_blocks)
        # Blocks that were there at once are cheap, not unknown.
        self.drafts.fold(1, draft_s, max(draft_wait_s, draft_s / CORRECTION_LIMIT))

    def fold_report(self, report: StepReport) -> None:
        """`fold` what a rank says of a step."""
        self.fold(
            report.num_requests,
            report.batch_tokens,
            report.num_prefill_tokens,
            report.step_time_s,
            report.draft_wait_s,
            int(report.num_proposed.max(initial=0)),
        )

    def step_time_s_at(self, num_requests: int, batch_tokens: npt.ArrayLike) -> Float64:
        return self.round_time_s_at(batch_tokens, num_requests)

    def round_time_s_at(self, batch_tokens: npt.ArrayLike, num_drafting: int) -> Float64:
        """Seconds of a round of these many tokens for which `num_drafting` blocks were asked. Any shape."""
        assert self.curve is not None, "ask `doubt` first"
        step_s = self.curve.verify_time_s(batch_tokens) * self.served.ratio(batch_tokens)
        return step_s + self.curve.draft_time_s_at(num_drafting) * self.drafts.ratio(1)

    @property
    def doubt(self) -> str:
        """Why no search should be run over these times: cold, flat_curve, curve_mistrusted; empty when it may."""
        if self.curve is None:
            return "cold"
        if self.curve.is_flat:
            return "flat_curve"
        return "" if self.served.trusts_curve else "curve_mistrusted"
