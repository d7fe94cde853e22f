"""A target and a drafter on a tiny vocabulary, and the target's own law: the oracle of the law checks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.core.logit_rules import LogitRules
from actors.core.sampling import SamplingParams
from actors.core.survival import survivals
from kernels.block_reference import MarkovHead

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TinyPair:
    """A target and a drafter that look one token back. `gamma` slots, V tokens, `num_draft` draft ids."""

    target: Tensor  # [gamma + 1, V, V] logits of the token decided by slot k after a token
    base: Tensor  # [gamma, V'] base logits of the drafter
    markov: MarkovHead
    confidence: npt.NDArray[np.float32]  # [gamma, V] confidence of slot k after a token
    d2t: Tensor | None = None

    @property
    def gamma(self) -> int:
        return len(self.base)

    @property
    def vocab(self) -> int:
        return self.target.shape[-1]

    def survivals(self, anchor: int, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Prefix survivals [P, gamma] of blocks [P, gamma] after an anchor."""
        before = np.concatenate([np.full((len(tokens), 1), anchor), tokens[:, :-1]], axis=1)
        return survivals(self.confidence[np.arange(self.gamma), before])

    @classmethod
    def random(
        cls, seed: int, gamma: int, vocab: int, dtype: torch.dtype, d2t: list[int] | None = None
    ) -> TinyPair:
        rng = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)

        num_draft = vocab if d2t is None else len(d2t)
        return cls(
            normal(gamma + 1, vocab, vocab),
            normal(gamma, num_draft),
            MarkovHead(normal(vocab, 2), normal(num_draft, 2)),
            torch.rand(gamma, vocab, generator=rng).numpy(),
            None if d2t is None else torch.tensor(d2t),
        )


def processed(logits: Float64, params: SamplingParams) -> Float64:
    """The served distribution of one row, written again from its definition: the oracle."""
    if params.temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    temperature, top_p = (
        np.float64(np.float32(params.temperature)),
        np.float64(np.float32(params.top_p)),
    )
    p = np.exp((logits - logits.max()) / temperature)  # parameters travel as float32
    p /= p.sum()
    if params.top_k:
        p[p < np.sort(p)[::-1][min(params.top_k, len(p)) - 1]] = 0
        p /= p.sum()
    kept, mass = np.zeros_like(p), 0.0
    for token in np.argsort(-p, kind="stable"):
        if mass >= top_p:
            break
        kept[token] = p[token]
        mass += p[token]
    return kept / kept.sum()


STOPS = (0,)  # the stop tokens of every request here
# Of the one grammar here, over the letters a, b, c = tokens 1, 2, 3; its first letter decides how it goes on.
WORDS = {(2,), (1, 2), (1, 3), (1, 2, 1), (1, 3, 1), (3, 3, 2)}
WORDS_REGEX = "a[bc]a?|b|ccb"


def ruled(logits: Float64, rules: LogitRules, tokens: tuple[int, ...]) -> Float64:
    """Logits after the rules, written again from their definition; `tokens` are a prompt of one and the output."""
    output, changed = tokens[1:], logits.copy()
    # Behind an end, and behind what cannot come, anything is as good.
    is_guided = bool(rules.grammar) and 0 not in output and (not output or _fits(output))
    for token in range(len(logits)):
        if token in tokens:
            penalty = rules.repetition_penalty
            changed[token] = (
                changed[token] / penalty if changed[token] > 0 else changed[token] * penalty
            )
        changed[token] -= rules.frequency_penalty * output.count(token)
        changed[token] -= rules.presence_penalty * (token in output)
        changed[token] += dict(rules.logit_bias).get(token, 0.0)
        if token in STOPS and len(output) < rules.min_tokens:
            changed[token] = -np.inf
        if is_guided and not _fits((*output, token)):
            changed[token] = -np.inf
    return changed


def _fits(output: tuple[int, ...]) -> bool:
    """Whether it begins a word, or is one and its end."""
    if output[-1] == 0:
        return output[:-1] in WORDS
    return any(word[: len(output)] == output for word in WORDS)


def next_law(pair: TinyPair, tokens: tuple[int, ...], params: SamplingParams) -> Float64:
    """P(next | the anchor and what came after it), [V], without speculation."""
    logits = pair.target[len(tokens) - 1, tokens[-1]].double().numpy()
    if params.rules is not None:
        logits = ruled(logits, params.rules, tokens)
    return processed(logits, params)


def rest_law(pair: TinyPair, tokens: tuple[int, ...], params: SamplingParams) -> Float64:
    """P(everything up to y_{gamma+1} | the tokens so far), [V] * what is left, without speculation."""
    if len(tokens) == pair.gamma + 2:
        return np.ones(())
    law = next_law(pair, tokens, params)
    rest = [rest_law(pair, (*tokens, token), params) for token in range(pair.vocab)]
    return np.stack([p * after for p, after in zip(law, rest, strict=True)])


def target_law(pair: TinyPair, anchor: int, params: SamplingParams) -> Float64:
    """P(y_1..y_{gamma+1}) without speculation, [V] * (gamma + 1)."""
    return rest_law(pair, (anchor,), params)
