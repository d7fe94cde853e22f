"""Experts moved between ranks while they serve: every so many steps the load is looked at, and weights follow it.

Everything happens at the same step on every rank. The loads are gathered, rank 0 says where experts should lie, every
rank reads what it lacks beside its steps, and in the first step for which all are ready tables and weights change.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from actors.core.expert_balance import decode, encode, imbalance, rebalanced
from actors.core.expert_placement import ExpertPlacement
from actors.core.lockstep import StepLayout
from actors.engine.collective import all_gather
from actors.engine.experts import ExpertBank
from actors.engine.sharded_experts import CopyRouting, ShardedMoeLayer
from actors.engine.target_model import TargetModel

log = logging.getLogger(__name__)
OBSERVED_STEPS = 256  # between two looks at the load where experts never move


class Rebalancer:
    """Placements of all layers of one rank's model.

    Args:
        tensors: the checkpoint, to read experts from that come to this rank.
        every_steps: steps of the group between two looks at the load, after which experts may move; 0: they never
            do, and the load is looked at all the same.
        num_redundant: experts a rank may hold beyond its even share.
    """

    def __init__(
        self,
        model: TargetModel,
        tensors: Mapping[str, Tensor],
        every_steps: int,
        num_redundant: int,
    ) -> None:
        assert model.sharding is not None
        self._model, self._tensors = model, tensors
        self._every_steps, self._moves = every_steps or OBSERVED_STEPS, every_steps > 0
        self._group = model.sharding.group
        self._layers = {
            index: layer.mlp
            for index, layer in enumerate(model.layers)
            if isinstance(layer.mlp, ShardedMoeLayer)
        }
        even = model.sharding.placement
        self._num_slots = -(-even.num_experts // self._group.size) + num_redundant
        self.placements = [even] * len(self._layers)
        self._pending: list[ExpertPlacement] | None = None
        self._banks: list[ExpertBank] = []
        self._applied_epoch = 0
        self._reader: threading.Thread | None = None
        self._group.on_layout = self.step

    def step(self, layout: StepLayout) -> None:
        """After every agreement, before the step computes."""
        if layout.plan_epoch > self._applied_epoch:
            self._apply(layout.plan_epoch)
        is_due = layout.step > 0 and layout.step % self._every_steps == 0
        if is_due and self._pending is None and not layout.is_led:
            self._consider()

    def _consider(self) -> None:
        group = self._group
        own = torch.cat([layer.load for layer in self._layers.values()])
        row = torch.cat([own, torch.tensor([group.node])])
        gathered = all_gather(group.collective, row.to(group.device)).cpu()
        load = gathered[:, :-1].sum(0).view(len(self._layers), -1).numpy()
        for layer in self._layers.values():
            layer.load.zero_()
        worst = [imbalance(p, of_layer) for p, of_layer in zip(self.placements, load, strict=True)]
        group.balance["expert_imbalance"] = round(sum(worst) / len(worst), 3)
        if not self._moves:
            return
        found = None
        if group.rank == 0:
            found = rebalanced(self.placements, load, gathered[:, -1].tolist(), self._num_slots)
        told = group.share(encode(found) if found else ())
        if told:
            self._pending = decode(told, group.size, load.shape[1])
            self._reader = threading.Thread(target=self._read, args=(self._pending,), daemon=True)
            self._reader.start()

    def _read(self, placements: Sequence[ExpertPlacement]) -> None:
        """Beside the steps: what this rank lacks."""
        rank = self._group.rank
        try:
            self._banks = [
                self._model.expert_bank(self._tensors, index, new.held_by(rank), old.held_by(rank))
                for index, new, old in zip(self._layers, placements, self.placements, strict=True)
            ]
        except Exception:  # the ranks go on as they are: this one never says that it is ready
            log.exception("rank %d could not read the experts that should come to it", rank)
            self._group.balance["num_failed_rebalances"] += 1
            return
        self._group.plan_epoch = self._applied_epoch + 1

    def _apply(self, epoch: int) -> None:
        assert self._pending is not None and epoch == self._applied_epoch + 1
        made: dict[ExpertPlacement, CopyRouting] = {}
        for layer, bank, placement in zip(
            self._layers.values(), self._banks, self._pending, strict=True
        ):
            if placement not in made:
                made[placement] = CopyRouting(placement, self._model.device)
            layer.place(bank, made[placement])
        self.placements, self._pending, self._banks = self._pending, None, []
        self._applied_epoch = epoch
        self._group.balance["num_rebalances"] += 1
        log.info("rank %d: experts lie by placement %d", self._group.rank, epoch)
