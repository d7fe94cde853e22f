"""Measured cost curves are kept on disk: the same model on the same machine is measured once."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np

from actors.core.own_profile import StepTimes
from actors.engine.base import TargetSpec
from configs.schema import ClusterConfig

log = logging.getLogger(__name__)

FOLDER = Path("~/.cache/dspark-cluster/profiles")
_COLUMNS = ("batch_tokens", "num_requests", "step_time_s")


def cached_step_times(
    spec: TargetSpec,
    config: ClusterConfig,
    measure: Callable[[], StepTimes],
    folder: Path = FOLDER,
) -> StepTimes:
    """What was measured before under the same identity, else what `measure` says now.

    The identity holds the engine's own (weights, dtype, device, threads), this machine, and every setting that
    decides which points are measured. A damaged file is measured again.
    """
    path = folder.expanduser() / f"{_identity(spec, config)}.json"
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        times = tuple(np.asarray(kept[name], np.float64) for name in _COLUMNS)
        if len({len(column) for column in times}) == 1 and len(times[0]):
            return times[0], times[1], times[2]
        log.warning("%s is damaged; measuring again", path.name)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read (%s); measuring again", path.name, error)
    measured = measure()
    _keep(path, measured)
    return measured


def _keep(path: Path, measured: StepTimes) -> None:
    content = {name: column.tolist() for name, column in zip(_COLUMNS, measured, strict=True)}
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(content), encoding="utf-8")
        part.replace(path)  # two ranks may measure at the same time
    except OSError as error:
        log.warning("the cost curve could not be kept: %s", error)


def _identity(spec: TargetSpec, config: ClusterConfig) -> str:
    facts = (
        spec.identity,
        platform.node(),
        platform.machine(),
        os.cpu_count(),
        config.drafter.gamma if config.model.drafter else 0,
        config.drafter.draft_top_k,
        config.target.max_running,
        config.target.max_batch_tokens,
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
