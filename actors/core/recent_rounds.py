"""The newest rounds one by one: when did predictions and labels part, and how alike are the rounds of a stream?"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Keys = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

RECENT_ROUNDS = 1024  # the longest stretch that is searched for a change
STRETCHES = np.array([32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512, 768, 1024])  # looked at
ALARM_SHIFT = 0.12  # logits, 3 % at most: many labels make small gaps certain, not important
STREAM_SPREAD = 0.35  # standard deviation of a stream around the others, in logits
MIN_STREAMS = 4  # so many tell how much streams differ among themselves


class RecentRounds:
    """The newest `RECENT_ROUNDS` rounds.

    Attributes:
        num_judged: the newest of them whose predictions are held against their labels.
    """

    def __init__(self, gamma: int) -> None:
        self.num_judged = 0
        fields: list[Any] = [
            ("logits", np.float64, gamma),
            ("seen", np.bool_, gamma),
            ("accepted", np.bool_, gamma),
            ("residual", np.float64),  # labels less predictions, over the slots seen
            ("variance", np.float64),
            ("stream", np.uint64),
            ("doubt", np.float64),  # one over the rounds the prediction rested on
        ]
        # When it is full, its second half moves to the front: most steps copy nothing but what is new.
        self._kept: npt.NDArray[Any] = np.zeros(2 * RECENT_ROUNDS, np.dtype(fields))
        self._rows = self._kept[:0]
        self._end = 0

    def add(
        self,
        logits: Float64,
        seen: Mask,
        accepted: Mask,
        predicted: Float64,
        streams: Keys,
        num_rounds: float,
    ) -> None:
        """Take in N rounds, [N, gamma] and streams [N]; `num_rounds` is what their predictions rested on."""
        count = min(len(logits), RECENT_ROUNDS)
        if self._end + count > len(self._kept):
            self._kept[:RECENT_ROUNDS] = self._kept[self._end - RECENT_ROUNDS : self._end]
            self._end = RECENT_ROUNDS
        self._end += count
        new = self._kept[self._end - count : self._end]
        newest = slice(-count, None)
        seen, accepted, predicted = seen[newest], accepted[newest], predicted[newest]
        new["logits"], new["seen"], new["accepted"] = logits[newest], seen, accepted
        new["residual"] = np.where(seen, accepted - predicted, 0.0).sum(axis=1)
        new["variance"] = np.where(seen, predicted * (1 - predicted), 0.0).sum(axis=1)
        new["stream"], new["doubt"] = streams[newest], 1 / max(1.0, num_rounds)
        self._rows = self._kept[max(0, self._end - RECENT_ROUNDS) : self._end]
        self.num_judged = min(self.num_judged + count, RECENT_ROUNDS)

    def labels(self, count: int) -> tuple[Float64, Mask, Mask]:
        """Logits, what was seen and what was accepted of the newest `count` rounds."""
        newest = self._rows[-count:]
        return newest["logits"], newest["seen"], newest["accepted"]

    def rounds_since_change(self, deviations: float) -> int:
        """The number of newest rounds that differ from what was predicted; 0: chance explains it.

        Of the stretches that end now, the one whose likeliest shift of the logits is the most standard deviations
        away from none. Streams differ from one another: many rounds of one tell little about the others, and count so.
        """
        judged = self.num_judged
        lengths = STRETCHES[judged >= STRETCHES]
        if not len(lengths):
            return 0
        newest = self._rows[-judged:]
        _, stream = np.unique(newest["stream"], return_inverse=True)
        residual, variance = newest["residual"], newest["variance"]
        doubt = newest["doubt"][::-1].cumsum()  # of shifts fitted to few rounds, all rounds alike
        away = np.zeros(len(lengths))
        for i, length in enumerate(lengths.tolist()):
            known = np.bincount(stream[-length:], variance[-length:])
            apart = 1 + STREAM_SPREAD**2 * known
            information = float((known / apart).sum()) + 1e-9
            gap = float((np.bincount(stream[-length:], residual[-length:]) / apart).sum())
            if abs(gap) >= ALARM_SHIFT * information:
                away[i] = abs(gap) / np.sqrt(information * (1 + doubt[length - 1]))
        most = int(away.argmax())
        return int(lengths[most]) if away[most] >= deviations else 0

    def alike(self) -> float:
        """How many rounds of the same streams tell as much as one of another would, at least 1."""
        _, stream = np.unique(self._rows["stream"], return_inverse=True)
        residual, variance = self._rows["residual"], self._rows["variance"]
        if stream.max() + 1 < MIN_STREAMS:
            return 1.0
        total = variance.sum() + 1e-9
        centred = np.bincount(stream, residual - residual.sum() * variance / total)
        return max(1.0, float((centred**2).sum() / total))
