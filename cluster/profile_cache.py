"""Measured step times are kept on disk: the same model on the same machine is measured once."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np

import kernels
from actors import engine
from actors.core.step_samples import StepSamples
from actors.engine.base import TargetSpec
from configs.schema import ClusterConfig

log = logging.getLogger(__name__)

FOLDER = Path("~/.cache/dspark-cluster/profiles")
# Whose code a step runs through: another build's times are not this one's. Neither training nor drafters are in a step.
_ENGINE, _KERNELS = (Path(str(package.__file__)).parent for package in (engine, kernels))
SOURCES = (_ENGINE, _KERNELS, _KERNELS / "device")
_COLUMNS = ("batch_tokens", "num_requests", "context_len")


def profile_path(spec: TargetSpec, config: ClusterConfig, folder: Path = FOLDER) -> Path:
    """Where the samples of this identity lie: the engine's own (weights, dtype, device, threads), this machine, the
    code that computes a step, and every setting that decides which points are measured."""
    return folder.expanduser() / f"{_identity(spec, config)}.json"


def cached_samples(
    spec: TargetSpec,
    config: ClusterConfig,
    measure: Callable[[], StepSamples],
    folder: Path = FOLDER,
    is_enough: Callable[[bool], bool] = bool,
) -> StepSamples:
    """What was measured before under the same identity, else what `measure` says now.

    Args:
        is_enough: told whether something is kept, it says whether that will do.
    """
    path = profile_path(spec, config, folder)
    kept = read_samples(path)
    if is_enough(kept is not None) and kept is not None:
        return kept
    measured = measure()
    keep_samples(path, measured)
    return measured


def read_samples(path: Path) -> StepSamples | None:
    """What is kept there; None when nothing is, or it is damaged."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        tokens, requests, context = (np.asarray(kept[name], np.int64) for name in _COLUMNS)
        times_s = np.asarray(kept["times_s"], np.float64)
        shared = kept.get("shared_s")
        shared_s = None if shared is None else np.asarray(shared, np.float64)
        at = int(kept["curve_context_len"])
        return StepSamples(tokens, requests, context, times_s, at, shared_s)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read (%s); measuring again", path.name, error)
    return None


def keep_samples(path: Path, samples: StepSamples) -> bool:
    """Write them for later starts; False when that is not possible."""
    content = {name: getattr(samples, name).tolist() for name in (*_COLUMNS, "times_s")}
    content["curve_context_len"] = samples.curve_context_len
    if samples.shared_s is not None:
        content["shared_s"] = samples.shared_s.tolist()
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(content), encoding="utf-8")
        part.replace(path)  # two ranks may measure at the same time
    except OSError as error:
        log.warning("the cost curve could not be kept: %s", error)
        return False
    return True


def code_identity(sources: tuple[Path, ...] = SOURCES) -> str:
    """A hash of the modules in these folders, without those below them, and of the version of torch."""
    digest = hashlib.sha256(version("torch").encode())
    for folder in sources:
        for path in sorted(folder.glob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _identity(spec: TargetSpec, config: ClusterConfig) -> str:
    facts = (
        spec.identity,
        code_identity(),
        platform.node(),
        platform.machine(),
        os.cpu_count(),
        config.drafter.gamma if config.model.drafter else 0,
        config.drafter.draft_top_k,
        config.target.max_running,
        config.target.max_batch_tokens,
        config.target.kv_cache_tokens,
        config.model.max_model_len,
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
