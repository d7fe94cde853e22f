"""What a request may ask for beyond temperature, top-p and top-k: changed logits, and log probabilities.

Position of a token and the tokens before it are all that these rules look at. So they are applied to every verified
position with the draft prefix taken as if it were committed, and a token is drawn from the very distribution that it
would be drawn from without speculation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LogitRules:
    """What changes the logits of a request, in this order. Values are validated by the ingress.

    Attributes:
        repetition_penalty: positive logits of tokens of the prompt and the output are divided by it, others multiplied;
            1 changes nothing.
        frequency_penalty: subtracted once for each time the token came in the output.
        presence_penalty: subtracted once for a token that came in the output.
        logit_bias: (token id, value to add), each id once.
        min_tokens: output tokens before which no stop token can come.
        grammar: what the whole output must be a word of, in the language of llguidance; empty: anything.
    """

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    grammar: str = ""

    @property
    def counts_output(self) -> bool:
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


@dataclass(frozen=True)
class LogprobsOrder:
    """Log probabilities of every token of the stream, and of the `num_top` most probable beside it.

    `raw` is the model's own distribution; `processed` the one that is sampled from (after all rules, temperature, top-k
    and top-p), or for a greedy request the one whose argmax is taken.
    """

    num_top: int = 0
    of: Literal["raw", "processed"] = "raw"


@dataclass(frozen=True)
class TokenLogprobs:
    """What a `LogprobsOrder` brings for one token; the most probable first."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
