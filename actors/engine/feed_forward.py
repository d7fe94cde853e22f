"""The feed-forward part of every layer as this rank holds it: all of it, its experts, or its slices of a dense one.

Ranks of a group share a dense feed-forward as experts that are always on: its intermediate width is cut into slices,
each computed by the rank that holds it, and their outputs are added like those of experts. How many slices there are
does not depend on how many ranks hold them, so groups of 1, 2, 3 and 4 ranks give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from actors.core.expert_placement import ExpertPlacement, slices_of
from actors.engine.checkpoint import ModelConfig
from actors.engine.expert_group import ExpertGroup
from actors.engine.experts import (
    AlwaysOn,
    ExpertBank,
    ExpertList,
    ExpertStacks,
    MoeLayer,
    Router,
    TopKRouter,
)
from actors.engine.packed_linear import NO_BIASES, Biases, GatedMlp, Linear, Numerics, min_rows
from actors.engine.sharded_experts import (
    CopyRouting,
    DispatchMode,
    ExpertSharding,
    ShardedMoeLayer,
)
from actors.engine.tensor_names import expert_names
from actors.engine.weights import CheckpointError, ModelTensors

Ids = Sequence[int]
Kept = Mapping[int, GatedMlp]  # experts that need not be read, by id


def sharding_of(
    config: ModelConfig, group: ExpertGroup | None, mode: DispatchMode
) -> ExpertSharding | None:
    """What a rank of `group` holds of the experts, or of the slices of a dense model; None without a group.

    Raises CheckpointError when there are more ranks than parts to share.
    """
    if group is None:
        return None
    if config.moe is not None:
        parts, most, what = config.moe.num_experts, config.moe.num_experts, "experts a layer"
    else:
        most, what = config.intermediate_size, "columns in a feed-forward"
        parts = len(slices_of(most, group.size))
    if group.size > most:
        raise CheckpointError(
            f"target.group_size={group.size}: the model has {most} {what} to share; use at most {most}"
        )
    return ExpertSharding(group, ExpertPlacement.even(parts, group.size), mode)


class FeedForwards:
    """Makes the feed-forward of each layer of a model from its checkpoint.

    Args:
        make: what a product is made of, see `TiledLinear`.
        sharding: this rank's place in its group, of which it reads its own part only; None: it reads all.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        numerics: Numerics,
        make: type[Linear],
        sharding: ExpertSharding | None,
    ) -> None:
        self._config, self._device, self._make = config, device, make
        self._min_rows = min_rows(numerics)
        self._sharding = sharding
        self._routing = CopyRouting(sharding.placement, device) if sharding else None

    def layer(self, source: ModelTensors, index: int) -> GatedMlp | MoeLayer:
        """That of layer `index`. Dense layers among sparse ones lie whole on every rank."""
        prefix = f"model.layers.{index}"
        if self._config.is_sparse(index):
            return self._sparse(source, prefix)
        if self._sharding is None or self._config.moe is not None:
            return self._slice(source, prefix, 0, self._config.intermediate_size)
        return self._sliced(source, prefix, self._sharding)

    # --- dense ------------------------------------------------------------------------------------------------------

    def _slice(self, source: ModelTensors, prefix: str, start: int, stop: int) -> GatedMlp:
        """Columns start to stop of the intermediate width; the output's bias comes with the first of them."""
        hidden, inner = self._config.hidden_size, self._config.intermediate_size
        name = f"{prefix}.mlp"
        weights = (
            source.take_part(f"{name}.gate_proj.weight", 0, start, stop, inner, hidden),
            source.take_part(f"{name}.up_proj.weight", 0, start, stop, inner, hidden),
            source.take_part(f"{name}.down_proj.weight", 1, start, stop, hidden, inner),
        )
        biases: Biases = NO_BIASES
        if self._config.mlp_bias:
            biases = (
                source.take_part(f"{name}.gate_proj.bias", 0, start, stop, inner),
                source.take_part(f"{name}.up_proj.bias", 0, start, stop, inner),
                None if start else source.take(f"{name}.down_proj.bias", hidden),
            )
        return GatedMlp(*weights, biases, self._make)

    def _sliced(self, source: ModelTensors, prefix: str, sharding: ExpertSharding) -> MoeLayer:
        bounds = slices_of(self._config.intermediate_size, sharding.group.size)
        own = [self._slice(source, prefix, *bounds[index]) for index in sharding.held]
        router = AlwaysOn(len(bounds), self._config.hidden_size)
        assert self._routing is not None
        return ShardedMoeLayer(router, ExpertList(own, self._min_rows), sharding, self._routing)

    # --- with experts -----------------------------------------------------------------------------------------------

    def _sparse(self, source: ModelTensors, prefix: str) -> MoeLayer:
        moe, hidden = self._config.moe, self._config.hidden_size
        assert moe is not None
        name = expert_names(self._config)[0]
        gate = self._make(source.take(f"{prefix}.{name}", moe.num_experts, hidden))
        router: Router = TopKRouter(gate, moe.top_k, moe.normalise_top_k)
        held = self._sharding.held if self._sharding else range(moe.num_experts)
        bank = self._bank(source, prefix, held, {})
        if self._sharding is None or self._routing is None:
            return MoeLayer(router, bank)
        return ShardedMoeLayer(router, bank, self._sharding, self._routing)

    def _bank(self, source: ModelTensors, prefix: str, held: Ids, kept: Kept) -> ExpertBank:
        moe, hidden = self._config.moe, self._config.hidden_size
        assert moe is not None
        _, experts, (gate, up, down) = expert_names(self._config)
        inner = moe.intermediate_size

        def weights(index: int) -> tuple[Tensor, Tensor, Tensor]:
            own = f"{prefix}.{experts}.{index}"
            return (
                source.take(f"{own}.{gate}", inner, hidden),
                source.take(f"{own}.{up}", inner, hidden),
                source.take(f"{own}.{down}", hidden, inner),
            )

        if self._device.type == "cuda":
            gates, ups, downs = zip(*map(weights, held), strict=True)
            return ExpertStacks(torch.stack(gates), torch.stack(ups), torch.stack(downs))
        made = [kept.get(index) or GatedMlp(*weights(index), make=self._make) for index in held]
        return ExpertList(made, self._min_rows)

    def bank(
        self, source: ModelTensors, layer: int, held: Ids, present: MoeLayer, before: Ids
    ) -> ExpertBank:
        """Another choice of experts for a layer; those that `present` holds (`before`, in order) are not read again."""
        bank = present.bank
        kept = dict(zip(before, bank.experts, strict=True)) if isinstance(bank, ExpertList) else {}
        return self._bank(source, f"model.layers.{layer}", held, kept)
