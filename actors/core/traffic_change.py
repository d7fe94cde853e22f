"""Has the traffic changed? An alarm with bounded false alarms, from what became of drafts and from the confidences.

Two things show that other text is being served: labels part from what older rounds predict, and the drafter is more or
less sure than it was. The second shows sooner: answers of one kind have confidences much alike, while a dozen of them
are needed before their labels say by how much their kind is off.

For every moment j at which a change may have begun, the rounds since then are held against what was known at j, by the
likelihood ratio of "moved by an unknown amount, normal around 0" over "as before". Both are laws of streams: rounds of
one stream differ from those of another by more than chance, so a stream counts as one draw with its own deviation, and
what was known at j is in doubt itself. Where nothing changed such a ratio is 1 in the mean at any time, and so is a
mean of ratios. Their sum over all j (the Shiryaev-Roberts statistic) less the number of looks is then a martingale:
until it first reaches `bound`, that many looks pass in the mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Keys = npt.NDArray[np.uint64]

MAX_LOOKS = 32  # a change is looked for among the rounds since so many looks
WARM_UP_LOOKS = 8  # before anything is held against predictions
STREAM_SPREAD = 0.35  # standard deviation of a stream's shift around the others, in logits
CHANGE_SPREAD = 0.35  # of what a change shifts, in logits
# Of mean features of streams, and how many streams that is worth.
USUAL_VARIANCE, USUAL_STREAMS = 0.1, 8.0
ALIKE = 2.0  # rounds of a stream tell as much of its mean as one would, were they independent
TELLING_ROUNDS = 8  # of a stream, before its mean says how much streams differ
MOST_CERTAIN = 300.0  # logarithm of a ratio: more is of no use to anybody
MIN_STREAMS = 4  # so many tell how much streams differ among themselves
ROUNDS_A_STREAM = 64.0  # as a rule: so many say one stream's worth of how much streams differ
MEMORY_ROUNDS = 4096.0  # of features, after which a share 1 / e is left


@dataclass(frozen=True)
class Known:
    """What rounds are held against."""

    shift: float  # common to all positions, in logits
    variance: float  # of it
    features: Float64  # [D] mean
    between: Float64  # [D] variance of streams' means around it
    within: Float64  # [D] variance of rounds around the mean of their stream
    num_streams: float  # that the mean rests on


@dataclass(frozen=True)
class Look:
    """The rounds between two looks, summed by stream [S]."""

    streams: Keys
    num_rounds: Float64
    residual: Float64  # labels less predictions, over the slots seen
    information: Float64  # p (1 - p) of these
    features: Float64  # [S, D]
    squares: Float64  # [D] of the features of all of them
    known: Known  # before these rounds
    labels: Float64  # sums for a fit, see `evidence`

    @classmethod
    def of(
        cls,
        streams: Keys,
        residual: Float64,
        information: Float64,
        features: Float64,
        known: Known,
        labels: Float64,
    ) -> Look:
        """Sum N rounds: streams, residuals and information [N], features [N, D]."""
        own, at = np.unique(streams, return_inverse=True)
        moved, known_of, *columns = (
            np.bincount(at, column, len(own)).astype(np.float64)
            for column in (residual, information, *features.T)
        )
        squares = np.square(features).sum(axis=0)
        counts = np.bincount(at, minlength=len(own)).astype(np.float64)
        summed = np.stack(columns, axis=1)
        return cls(own, counts, moved, known_of, summed, squares, known, labels)


class FeatureLaw:
    """What streams' mean features are like: their mean, how much they differ, and how much rounds do in one stream."""

    def __init__(self, num_features: int) -> None:
        # Squared distances of streams' means, of so many rounds.
        self._between = np.zeros((2, num_features))
        self._within = np.zeros((2, num_features))  # of rounds from these means, degrees of freedom
        self.restart()

    def restart(self) -> None:
        """Forget the mean; how much streams differ stays."""
        self.num_streams = self._num_rounds = 0.0
        self._sum = np.zeros(self._between.shape[1])

    @property
    def mean(self) -> Float64:
        found: Float64 = self._sum / max(1.0, self._num_rounds)
        return found

    def add(self, look: Look, num_new: int, keep: float) -> None:
        """Take in the rounds of a look, with streams not seen before among them."""
        self.num_streams = keep * self.num_streams + num_new
        self._num_rounds = keep * self._num_rounds + float(look.num_rounds.sum())
        self._sum = keep * self._sum + look.features.sum(axis=0)
        means = look.features / look.num_rounds[:, None]
        inside = look.squares - (look.features * means).sum(axis=0)
        free = float(look.num_rounds.sum()) - len(look.streams)
        self._within = keep * self._within + np.stack((inside, np.full_like(inside, free)))

    def spread(self, means: Float64, num_rounds: Float64, keep: float) -> None:
        """Of streams [S] that have run for a while, their mean features [S, D] and new rounds [S]."""
        apart = (num_rounds[:, None] * np.square(means - self.mean)).sum(axis=0)
        new = np.stack((apart, np.full_like(apart, num_rounds.sum())))
        self._between = keep * self._between + new

    def known(self, shift: float, variance: float) -> Known:
        """What the next rounds are held against, with this shift and its variance."""
        streams = self._between[1] / ROUNDS_A_STREAM
        apart = self._between[0] / ROUNDS_A_STREAM
        between = (USUAL_STREAMS * USUAL_VARIANCE + apart) / (USUAL_STREAMS + streams)
        within = self._within[0] / np.maximum(1.0, self._within[1])
        return Known(shift, variance, self.mean, between, within, max(1.0, self.num_streams))


class TrafficChange:
    """The newest looks, and since when their rounds are not what was known.

    Args:
        num_features: D.
        bound: looks that pass in the mean until an alarm, where nothing changes.

    Attributes:
        evidence: the statistic of the last look; reaching `bound` is an alarm.
    """

    def __init__(self, num_features: int, bound: float) -> None:
        self.evidence = 0.0
        self._bound = bound
        self._looks: deque[Look] = deque(maxlen=MAX_LOOKS)
        self._law = FeatureLaw(num_features)
        self._num_judged = -WARM_UP_LOOKS  # of the newest looks

    def known(self, shift: float, variance: float) -> Known:
        """What the next rounds are held against."""
        return self._law.known(shift, variance)

    def add(self, look: Look) -> int:
        """Take in a look; of how many newest looks the rounds are not what was known, 0: chance explains them."""
        table = self._learn(look)
        self._num_judged = min(self._num_judged + 1, MAX_LOOKS)
        if self._num_judged <= 0:
            return 0
        if self._num_judged < len(table.looks):
            table = _Table(table.looks[-self._num_judged :])
        ratios = _log_ratios(table)
        self.evidence = float(np.exp(ratios).sum())
        return self._num_judged - int(ratios.argmax()) if self.evidence >= self._bound else 0

    def forget(self, num_kept: int) -> Float64:
        """All but the newest looks; the labels of these."""
        kept = list(self._looks)[-num_kept:]
        self._looks.clear()
        self._law.restart()
        for look in kept:
            self._learn(look)
        self._num_judged = -WARM_UP_LOOKS
        return sum((look.labels for look in kept), np.zeros_like(kept[0].labels))

    def alike(self) -> float:
        """How many rounds of the same streams tell as much as one of another would, at least 1."""
        residual, information = (
            self._table.sums(name).sum(axis=0) for name in ("residual", "information")
        )
        if len(residual) < MIN_STREAMS:
            return 1.0
        total = information.sum() + 1e-9
        centred = residual - residual.sum() * information / total
        return max(1.0, float(np.square(centred).sum() / total))

    def _learn(self, look: Look) -> _Table:
        """Take in a look; all the looks there are."""
        self._looks.append(look)
        self._table = table = _Table(self._looks)
        keep = float(np.exp(-look.num_rounds.sum() / MEMORY_ROUNDS))
        by_look = table.sums("num_rounds")
        rounds, newest = by_look.sum(axis=0), by_look[-1]
        self._law.add(look, int(((newest > 0) & (rounds == newest)).sum()), keep)
        told = (newest > 0) & (rounds >= TELLING_ROUNDS)
        means = (
            np.stack([f.sum(axis=0) for f in table.features()], axis=1)[told] / rounds[told, None]
        )
        self._law.spread(means, newest[told], keep)
        return table


def _log_ratios(table: _Table) -> Float64:
    """Of the rounds from each look on: logarithm of how much likelier a change makes them, [L]."""
    confidences = np.logaddexp.reduce(_of_features(table)) - np.log(table.num_features)
    mean: Float64 = np.logaddexp(_of_labels(table), confidences) - np.log(2)
    return np.minimum(mean, MOST_CERTAIN)


def _of_labels(table: _Table) -> Float64:
    shift = np.array([look.known.shift for look in table.looks])[:, None]
    doubt = np.array([look.known.variance for look in table.looks])
    residual, information = table.sums("residual"), table.sums("information")
    # As if all of them had been held against what was known at the first.
    moved = _since(residual + shift * information) - shift * _since(information)
    information = _since(information)
    apart = 1 + STREAM_SPREAD**2 * information
    gaps, weights = (moved / apart).sum(axis=1), (information / apart).sum(axis=1)
    return _log_ratio(gaps, weights, doubt, CHANGE_SPREAD**2)


def _of_features(table: _Table) -> list[Float64]:
    known = [look.known for look in table.looks]
    streams = np.array([each.num_streams for each in known])
    between, within, mean = (
        np.stack(column)
        for column in zip(*((k.between, k.within, k.features) for k in known), strict=True)
    )  # [L, D]
    rounds = _since(table.sums("num_rounds"))
    some = np.maximum(rounds, 1)
    found = []
    for d, sums in enumerate(table.features()):
        weights = np.where(
            rounds > 0, 1 / (between[:, d, None] + ALIKE * within[:, d, None] / some), 0
        )
        gaps = weights * (_since(sums) / some - mean[:, d, None])
        found.append(
            _log_ratio(
                gaps.sum(axis=1), weights.sum(axis=1), between[:, d] / streams, between[:, d]
            )
        )
    return found


class _Table:
    """Looks by stream."""

    def __init__(self, looks: Iterable[Look]) -> None:
        self.looks = list(looks)
        keys = np.concatenate([look.streams for look in self.looks])
        self.streams, at = np.unique(keys, return_inverse=True)
        self.num_features = self.looks[0].features.shape[1]
        self._shape = len(self.looks), len(self.streams)
        which = np.repeat(np.arange(len(self.looks)), [len(look.streams) for look in self.looks])
        self._flat = which * len(self.streams) + at
        self._known: dict[str, Float64] = {}

    def _spread(self, values: list[Float64]) -> Float64:
        size = self._shape[0] * self._shape[1]
        summed: Float64 = np.bincount(self._flat, np.concatenate(values), size).astype(np.float64)
        return summed.reshape(self._shape)

    def sums(self, name: str) -> Float64:
        """A field of the looks, [L, S]."""
        if name not in self._known:
            self._known[name] = self._spread([getattr(look, name) for look in self.looks])
        return self._known[name]

    def features(self) -> list[Float64]:
        """The sums of each feature, [L, S] each."""
        return [
            self._spread([look.features[:, d] for look in self.looks])
            for d in range(self.num_features)
        ]


def _since(sums: Float64) -> Float64:
    """Of each look and all later ones, [L, S]."""
    return sums[::-1].cumsum(axis=0)[::-1]


def _log_ratio(
    weighted: Float64, weight: Float64, doubt: Float64, spread: Float64 | float
) -> Float64:
    """Logarithm of the likelihood ratio of a mean that is normal with variance `spread` around 0, over one that is 0.

    Args:
        weighted, weight: [L] sums over streams of their gaps times one over their variances, and of the latter.
        doubt: [L] variance of what the gaps are from.
    """
    variance = 1 / (weight + 1e-9) + doubt
    squared = np.square(weighted / (weight + 1e-9)) / variance
    more = spread / variance
    found: Float64 = 0.5 * (squared * more / (1 + more) - np.log1p(more))
    return found
