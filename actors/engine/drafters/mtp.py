"""MTP-1 (spec 9.3): one transformer block fed with proj[norm(h); norm(e(x))], one token beyond the anchor.

The feature is the raw output h of the target's last decoder layer, as the engine taps it. Training shards hold the
target's *normed* final state instead, and state / final norm weight = h / rms(h), which `hnorm` maps to what it maps
h itself to: a root-mean-square norm does not see the scale of its input (beyond its eps). So the model trains on the
one and serves on the other without knowing which it has.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from actors.engine.drafters.config import MtpConfig
from actors.engine.drafters.layers import RMSNorm
from actors.engine.drafters.pairs import PairLayer, PairModel


class MtpModel(PairModel):
    """Embedding, output head and vocabulary are the target's, as in DeepSeek-V3."""

    config: MtpConfig

    def __init__(self, config: MtpConfig, embed: Tensor, head: Tensor, draft_ids: Tensor) -> None:
        """See `DraftModel`."""
        layer = PairLayer(config, config.hidden_size)
        super().__init__(config, embed, head, draft_ids, layer)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def first_hidden(self, features: Tensor) -> Tensor:
        """See `PairModel`: the feature is the hidden state."""
        return features

    def enter(self, hidden: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """See `PairModel`."""
        token = self.enorm(self.embed_tokens(token_ids, hidden.dtype))
        joined = self.eh_proj(torch.cat((self.hnorm(hidden), token), -1))
        return joined, self.layer.input_layernorm(joined)
