"""How far a block is drafted: not so far that nobody would verify what comes.

The confidence of a slot is known before its token is drawn: it reads the slot's hidden state and the token before. So
a drafter can stop where the survival falls below what its rank will pay for, and leave out output head and sampling
from there on. What it sends instead is a proposal all the same: a token with q one-hot on it. Whoever verified it would
keep the law; nobody does, as its survival is 0 and the rank cuts every length at what was drafted.

Contract C3: the survival a rank names follows from a price that is itself at least two steps old, from the class of the
request and from its id and length, never from a draft. Where a block stops then depends on the tokens before that slot
alone, as confidences do.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from actors.core.prefix_scheduler import MIN_SURVIVAL
from actors.core.step_decision import VerifyChoice

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]

# Slots that are drafted whatever they are worth: by their confidences a rank sees whether its traffic has changed, and
# by their survivals whether drafting pays, so they may not be missing where they are low.
LEAST_DRAFTED = 2
# `cold` has seen no survivals yet; the price of `algorithm1` comes of the very blocks it is spent on.
_WITHOUT_PRICE = frozenset({"cold", "algorithm1"})


class Asked(NamedTuple):
    """What is asked of the drafters for the next step, by slot."""

    asks: Mask  # [S] whom for a block
    min_survivals: Float32  # [S] it may stop where survivals fall below; 0: whole

    @classmethod
    def whole(cls, asks: Mask) -> Asked:
        """Whole blocks for these slots [S]."""
        return cls(asks, np.zeros(len(asks), np.float32))


def stop_survivals(choice: VerifyChoice, share: float, class_ids: Int32) -> Float32:
    """The survival [R] below which blocks need not be drafted; 0: draft them whole.

    Args:
        choice: in force when the blocks are asked for.
        share: of the price. Below 1, as prices move until the block is here, and a rank corrects confidences.
        class_ids: [R]; under weights the price is a worth, survival times weight.
    """
    whole = np.zeros(len(class_ids), np.float32)
    if choice.rule in _WITHOUT_PRICE or choice.max_draft_tokens <= 0:
        return whole
    weights = np.array(choice.class_weights or (1.0,), np.float32)
    stops = share * choice.min_survival / weights[class_ids if choice.class_weights else 0]
    stops = np.broadcast_to(np.minimum(stops, 1.0), whole.shape)
    # A price so low admits every slot there is: stopping below it would not leave anything out.
    return np.where(stops < MIN_SURVIVAL, whole, stops).astype(np.float32)
