"""Proof that a rank serves: before it is called ready it has taken a request through admission, step and commit."""

from __future__ import annotations

import numpy as np

from actors.core.messages import AdmittedRequest, Endpoint, Message, TokenDeltas
from actors.core.sampling import SamplingParams

PROOF_ID = "proof"


class ProofError(RuntimeError):
    """The rank could not serve its first token; the message says why."""


def proof_request(rank: Endpoint) -> AdmittedRequest:
    """One greedy token after the shortest prompt there is; the rank answers itself."""
    greedy = SamplingParams(temperature=0.0)
    return AdmittedRequest(PROOF_ID, 0, rank, np.zeros(1, np.int32), 0, 1, greedy)


def require_token(answer: Message) -> None:
    """Raises ProofError when the answer to `proof_request` brings no token."""
    assert isinstance(answer, TokenDeltas), type(answer).__name__
    (delta,) = answer.deltas
    if not delta.token_ids:
        raise ProofError(f"no first token: {delta.error or delta.finish_reason}")
