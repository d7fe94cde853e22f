"""A training run on several trainer actors: start them, watch them, start them again from the last checkpoint."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from tqdm import tqdm

from actors.core.lockstep import CollectiveError
from actors.engine.collective import open_store
from actors.engine.training.runs import Paths
from actors.trainer import FeatureActor, Progress, TrainerActor
from cluster.console import CommandError, note
from cluster.ray_session import RaySession, RaySessionError

NAMESPACE = "dspark-training"
POLL_S = 1.0
MAX_FAILURES = 3  # one after the other without a step between them
HOST = "127.0.0.1"


@dataclass
class _Bar:
    """Steps of a run as a progress bar; what a new start repeats is taken back."""

    bar: Any

    def show(self, found: Progress | None) -> None:
        if found is None:
            return
        self.bar.n = found.step
        if found.loss is not None:
            facts = {"loss": f"{found.loss:.3f}", "agree": f"{found.agree:.2f}"}
            if found.acceptance_length is not None:
                facts["held out"] = f"{found.acceptance_length:.2f}"
            self.bar.set_postfix(facts, refresh=False)
        self.bar.refresh()


class TrainingRun:
    """`num_trainers` actors of one run.

    Args:
        paths, options: as `stages.train` takes them.
    """

    def __init__(self, paths: Paths, options: argparse.Namespace, num_trainers: int) -> None:
        self.paths, self.options, self.size = paths, options, num_trainers
        self.actors: list[Any] = []
        self.num_restarts = 0
        self._is_stopping = False

    def run(self) -> dict[str, Any]:
        """Train to the end; returns what the first trainer found.

        A trainer that dies ends its peers; all begin again at the last checkpoint. Raises CommandError when that does
        not help.
        """
        bar = _Bar(tqdm(total=self.options.steps, desc="training", unit="step", mininterval=1.0))
        failures, reached = 0, -1
        try:
            while True:
                try:
                    done = self._attempt(bar)
                    return {**done, "restarts": self.num_restarts}
                except (RayActorError, CollectiveError) as error:
                    step = int(bar.bar.n)
                    failures = 1 if step > reached else failures + 1
                    reached = max(step, reached)
                    if failures >= MAX_FAILURES:
                        raise CommandError(
                            f"trainers died {failures} times at step {step}: {_first_line(error)}"
                        ) from error
                    self.num_restarts += 1
                    note(f"\na trainer died ({_first_line(error)}); from the last checkpoint again")
        finally:
            bar.bar.close()

    def stop(self) -> None:
        """Let the step that is being made be the last."""
        self._is_stopping = True
        for actor in self.actors:
            actor.stop.remote()

    def _attempt(self, bar: _Bar) -> dict[str, Any]:
        store, address = open_store(HOST)
        threads = {"OMP_NUM_THREADS": str(self.options.threads)}
        remote = ray.remote(TrainerActor).options(
            num_cpus=0.5, max_concurrency=4, max_restarts=0, runtime_env={"env_vars": threads}
        )
        self.actors = [remote.remote(rank, self.size) for rank in range(self.size)]
        target: Any = None
        if self.options.online:
            target = ray.remote(FeatureActor).options(
                num_cpus=0.5, runtime_env={"env_vars": threads}
            )
            target = target.remote(self.paths, self.options)
        if self._is_stopping:
            self.stop()
        try:
            running = [
                actor.train.remote(self.paths, self.options, address, self.num_restarts, target)
                for actor in self.actors
            ]
            return self._watch(running, bar)
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None
        finally:
            for actor in [*self.actors, *([target] if target is not None else [])]:
                ray.kill(actor)
            del store  # it lives as long as a trainer may look for it

    def _watch(self, running: list[Any], bar: _Bar) -> dict[str, Any]:
        """Wait for all trainers, one of which may fail at any time; that shows first."""
        waiting = list(running)
        while waiting:
            done, waiting = ray.wait(waiting, timeout=POLL_S)
            ray.get(done)
            if not done:
                bar.show(ray.get(self.actors[0].progress.remote()))
        results: list[dict[str, Any]] = ray.get(running)
        return results[0]


def train_on_ray(run: TrainingRun) -> dict[str, Any]:
    """Start Ray for the length of a run; see `TrainingRun.run`."""
    session = RaySession(None, NAMESPACE)
    try:
        session.open(num_cpus=run.size)
    except RaySessionError as error:
        raise CommandError(str(error)) from error
    try:
        return run.run()
    finally:
        session.close()


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
