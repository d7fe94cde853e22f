"""The trainer's shell: one process of a data-parallel training run.

Ray places it, starts it and says when it has ended; gradients go over gloo. It keeps nothing that a checkpoint does not
hold, so a run whose trainer died is started again as a whole.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import ray
import torch

from actors.engine.collective import DistributedCollective
from actors.engine.training import loop, stages
from actors.engine.training.parallel import Peers
from actors.engine.training.runs import Paths

COLLECTIVE_BOUND_S = 600.0  # a step, or what the first trainer measures and writes between two
JOIN_WITHIN_S = 300.0


@dataclass(frozen=True)
class Progress:
    """How far a trainer is."""

    step: int
    loss: float | None
    agree: float | None  # of the first slot
    acceptance_length: float | None  # of held-out answers, where they were measured last


class FeatureActor:
    """The target of a run on `--online` text: token ids in, hidden states out."""

    def __init__(self, paths: Paths, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        self._source = stages.local_features(paths, options)

    def features(self, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """See `FeatureSource`."""
        return self._source.features(token_ids)


class _Remote:
    """A `FeatureActor` as a `FeatureSource`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def features(self, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        taps, hidden = ray.get(self._actor.features.remote(token_ids))
        return taps, hidden


class TrainerActor:
    """Trainer `rank` of `size`. `train` blocks; the other methods answer meanwhile."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._trainer: loop.Trainer | None = None
        self._stop = False

    def train(
        self,
        paths: Paths,
        options: argparse.Namespace,
        address: str,
        epoch: int,
        target: Any = None,
    ) -> dict[str, Any]:
        """Meet the other trainers at `address` and make the run's steps; see `stages.train`.

        `target` is the `FeatureActor` of a run on `--online` text.
        Raises CollectiveError when another trainer has ended.
        """
        torch.set_num_threads(options.threads)
        peers = Peers(
            DistributedCollective.join(
                address, epoch, self.rank, self.size, COLLECTIVE_BOUND_S, JOIN_WITHIN_S
            )
        )
        source = None if target is None else _Remote(target)
        return stages.train(paths, options, peers, self._watch, source)

    def _watch(self, trainer: loop.Trainer) -> None:
        self._trainer = trainer
        trainer.stop_requested = self._stop

    def stop(self) -> None:
        """End after the step that is being made, with a checkpoint."""
        self._stop = True
        if self._trainer is not None:
            self._trainer.stop_requested = True

    def progress(self) -> Progress | None:
        """Return where the run is; None before its first step."""
        if self._trainer is None:
            return None
        latest, measured = self._trainer.latest, self._trainer.held_out
        return Progress(
            self._trainer.step,
            None if latest is None else latest.loss,
            None if latest is None else latest.agree[0],
            None if measured is None or measured.last is None else measured.last,
        )
