"""A target and a drafter on a tiny vocabulary, and the target's own law: the oracle of the law checks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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


def target_law(pair: TinyPair, anchor: int, params: SamplingParams) -> Float64:
    """P(y_1..y_{gamma+1}) without speculation, [V] * (gamma + 1)."""
    law = np.ones(())
    for k in range(pair.gamma + 1):
        rows = np.stack(
            [processed(pair.target[k, v].double().numpy(), params) for v in range(pair.vocab)]
        )
        law = law[..., None] * (rows[anchor] if k == 0 else rows)
    return law
