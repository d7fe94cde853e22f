"""The exchangeable parts of a cluster: what computes, and what answers HTTP. Only the actors import torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from actors.core.lockstep import group_of
from actors.core.own_profile import StepTimes
from actors.drafter import DrafterEngineFactory
from actors.engine.base import DrafterEngine, TargetEngine
from actors.peers import Seat
from actors.rank_start import MeasureSteps
from actors.target import TargetEngineFactory
from cluster.model_share import localise, share
from cluster.profile_cache import cached_samples
from configs.schema import ClusterConfig

_FETCH = """
import sys
from actors.engine.checkpoint import find_model
from actors.engine.weights import CheckpointError
try:
    print(find_model(sys.argv[1]))
except CheckpointError as error:
    print(error)
    sys.exit(1)
"""

_CHECK = """
import json, sys
from actors.engine.drafters.serve import check_drafter
from actors.engine.weights import CheckpointError
from configs.schema import ClusterConfig
try:
    print(json.dumps(check_drafter(ClusterConfig.model_validate_json(sys.argv[1]))))
except CheckpointError as error:
    print(error)
    sys.exit(1)
"""


class ModelNotFoundError(RuntimeError):
    """The model or its drafter is not there and cannot be fetched."""


class DrafterMisfitError(RuntimeError):
    """The drafter is not there, is damaged, or was made for another target; says which field and what to do."""


@dataclass(frozen=True)
class DrafterCheck:
    """What a drafter is, found before anything is changed for it.

    Attributes:
        taps: the target's layers that it reads.
        remarks: what its user should know.
    """

    taps: tuple[int, ...]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Parts:
    """What `launch` puts together. The engines' functions are sent to the actors by name."""

    target_engine: TargetEngineFactory
    drafter_engine: DrafterEngineFactory
    measure_steps: MeasureSteps
    run_ingress: Callable[[ClusterConfig], str]
    stop_ingress: Callable[[], None]
    environment: Callable[[ClusterConfig], dict[str, str]] = (
        lambda _config: {}
    )  # of a Ray of our own
    node_environment: Callable[[], dict[str, str]] = dict  # of one that is joined
    fetch_model: Callable[[ClusterConfig], None] = lambda _config: None
    check_drafter: Callable[[ClusterConfig], DrafterCheck] = lambda _config: DrafterCheck(())
    # What nodes without a common disk are told of the model, and the folders to hand out; see `model_share.share`.
    share_models: Callable[[ClusterConfig], tuple[ClusterConfig, dict[str, str]]] = lambda c: (
        c,
        {},
    )

    @classmethod
    def real(cls) -> Parts:
        from cluster.app import run_ingress, serve_environment, stop_ingress
        from cluster.serve_proxy import node_environment

        return cls(
            target_engine,
            drafter_engine,
            measure_steps,
            run_ingress,
            stop_ingress,
            environment=lambda config: serve_environment(config.ingress),
            node_environment=node_environment,
            fetch_model=fetch_model,
            check_drafter=check_drafter,
            share_models=share,
        )


# --- in the driver ----------------------------------------------------------------------------------------------------


def fetch_model(config: ClusterConfig) -> None:
    """Have the model on this machine before the actors ask for it, with the progress on our stderr.

    In a process of its own: the driver stays free of torch.

    Raises:
        ModelNotFoundError: saying what was looked for.
    """
    if Path(config.model.path).expanduser().is_dir():
        return
    is_there, said = _ask_apart(_FETCH, config.model.path)
    if not is_there:
        raise ModelNotFoundError(said)


def check_drafter(config: ClusterConfig) -> DrafterCheck:
    """Load the drafter of `config` once, in a process of its own, as the actors would.

    Raises:
        DrafterMisfitError: it does not load, or does not fit the target.
    """
    fits, said = _ask_apart(_CHECK, config.model_dump_json(), stderr=subprocess.PIPE)
    if not fits:
        is_named = said.startswith("model.drafter")
        raise DrafterMisfitError(
            said if is_named else f"model.drafter={config.model.drafter!r}: {said}"
        )
    found = json.loads(said)
    return DrafterCheck(tuple(found["taps"]), tuple(found["remarks"]))


def _ask_apart(code: str, argument: str, stderr: int | None = None) -> tuple[bool, str]:
    """Run code in a process of its own: whether it went well, and the last line it said.

    Args:
        stderr: None: the user's; PIPE: it speaks only when there is nothing else to say.
    """
    done = subprocess.run(
        [sys.executable, "-c", code, argument], stdout=subprocess.PIPE, stderr=stderr, text=True
    )
    said = done.stdout.strip() or (done.stderr or "").strip()
    lines = said.splitlines() or [f"exit status {done.returncode}"]
    return done.returncode == 0, lines[-1]


# --- in the actors ----------------------------------------------------------------------------------------------------


def target_engine(config: ClusterConfig, seat: Seat) -> TargetEngine:
    """The target with the taps its drafter wants."""
    config = localise(config)
    import torch

    from actors.engine.drafters.serve import configured_taps
    from actors.engine.expert_group import ExpertGroup
    from actors.engine.target_engine import load_engine

    torch.set_num_threads(seat.num_threads)
    size, group = config.target.group_size, None
    if size > 1:
        group = ExpertGroup(group_of(seat.rank, size)[1], size, config.model.device)
    return load_engine(config, configured_taps(config), progress=False, group=group)


def drafter_engine(config: ClusterConfig, seat: Seat) -> DrafterEngine:
    """The drafter, cut to the configured block; its proposals carry the name of its seat."""
    config = localise(config)
    import torch

    from actors.engine.drafters.serve import configured_engine

    torch.set_num_threads(seat.num_threads)
    engine = configured_engine(config, seat.name)
    assert engine is not None, "there is no drafter actor without a drafter"
    return engine


def measure_steps(engine: TargetEngine, config: ClusterConfig) -> StepTimes:
    """Times of complete steps of this engine on this machine, from the cache where they are known.

    Ranks of a group measure together, so they do it as soon as one of them has nothing kept.
    """
    from actors.engine.step_profile import quick_samples
    from actors.engine.target_engine import TorchTargetEngine

    assert isinstance(engine, TorchTargetEngine)
    is_enough = bool if engine.model.sharding is None else engine.group.all_say
    meter = partial(quick_samples, engine, config)
    return cached_samples(engine.spec, config, meter, is_enough=is_enough).curve()
