"""EAGLE-3 as DeepSpec implements it (spec 9.1): a layer over [embedding; feature], recurrent on its own output."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from actors.engine.drafters.config import Eagle3Config
from actors.engine.drafters.layers import RMSNorm
from actors.engine.drafters.pairs import PairLayer, PairModel


class Eagle3Layer(PairLayer):
    """q, k and v read the normed token embedding beside the normed hidden state, 2 d wide."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Eagle3Model(PairModel):
    """Parameters carry DeepSpec's names (spec 1.12). The recurrent input is the un-normed layer output."""

    config: Eagle3Config

    def __init__(
        self, config: Eagle3Config, embed: Tensor, head: Tensor, draft_ids: Tensor
    ) -> None:
        """See `DraftModel`."""
        super().__init__(config, embed, head, draft_ids, Eagle3Layer(config))
        self.fc = nn.Linear(config.feature_dim, config.hidden_size, bias=False)

    def first_hidden(self, features: Tensor) -> Tensor:
        """See `PairModel`: all taps, projected, without a norm."""
        out: Tensor = self.fc(features)
        return out

    def enter(self, hidden: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """See `PairModel`: the residual runs over the hidden state."""
        layer = self.layer
        assert isinstance(layer, Eagle3Layer)
        token = layer.input_layernorm(self.embed_tokens(token_ids, hidden.dtype))
        return hidden, torch.cat((token, layer.hidden_norm(hidden)), -1)
