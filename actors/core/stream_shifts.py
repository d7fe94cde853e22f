"""What each running stream is off by: texts differ among themselves more than kinds of text do.

A filter for each stream: its shift of the confidence logits has a normal prior around what all streams share, and every
finished round of its own moves it by residual over information. It starts at nothing and counts for something after a
dozen rounds, long before enough streams of a new kind have been seen to say what that kind is like. It follows from
rounds of the stream that are over, so what is decided by it stays lawful (C3).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Keys = npt.NDArray[np.uint64]

OWN_SPREAD = 0.3  # prior standard deviation of a stream around the others, in logits
MAX_STREAMS = 1024  # the ones heard of last are kept; an ended stream says nothing


class StreamShifts:
    """Shifts by stream key; a stream nothing is known of has 0."""

    def __init__(self) -> None:
        self._keys: Keys = np.zeros(0, np.uint64)  # rising
        self._state = np.zeros((4, 0))  # shift, information of labels, when last heard of, rounds
        self._now = 0.0

    def of(self, streams: Keys) -> Float64:
        """Shifts [N] in logits of the streams with these keys [N]."""
        return self._found(0, streams)

    def ages(self, streams: Keys) -> Float64:
        """Rounds [N] that these streams have behind them."""
        return self._found(3, streams)

    def _found(self, field: int, streams: Keys) -> Float64:
        if not len(self._keys):
            return np.zeros(len(streams))
        at = np.minimum(np.searchsorted(self._keys, streams), len(self._keys) - 1)
        found: Float64 = np.where(self._keys[at] == streams, self._state[field, at], 0.0)
        return found

    def learn(self, streams: Keys, residual: Float64, information: Float64) -> None:
        """Take in N rounds: labels less predictions, and p (1 - p), each summed over the slots seen, [N]."""
        self._now += 1.0
        own, which = np.unique(streams, return_inverse=True)
        at = np.searchsorted(self._keys, own)
        if not np.array_equal(self._keys[at[at < len(self._keys)]], own):
            self._make_room(own)
            at = np.searchsorted(self._keys, own)
        state = self._state
        state[1, at] += np.bincount(which, information, len(own))
        state[0, at] += np.bincount(which, residual, len(own)) / (state[1, at] + OWN_SPREAD**-2)
        state[2, at] = self._now
        state[3, at] += np.bincount(which, minlength=len(own))

    def _make_room(self, streams: Keys) -> None:
        """Of the streams there are, those heard of last stay beside these."""
        newest = np.sort(np.argsort(self._state[2], kind="stable")[-MAX_STREAMS:])
        keys = np.union1d(self._keys[newest], streams)
        state = np.zeros((4, len(keys)))
        state[:, np.searchsorted(keys, self._keys[newest])] = self._state[:, newest]
        self._keys, self._state = keys, state

    def others_moved(self, by: float) -> None:
        """What all streams share has changed `by` logits: what a stream has shown of itself stays what it was."""
        shift, information, *_ = self._state
        shift -= by * information / (information + OWN_SPREAD**-2)
