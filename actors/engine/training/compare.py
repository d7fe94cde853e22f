"""What `dspark evaluate` and `dspark calibrate` work on: the drafters there are, and held-out text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.engine.checkpoint import BUNDLED_MODELS_DIR, find_model
from actors.engine.drafters.calibration import read_tables
from actors.engine.drafters.checkpoint import load_drafter
from actors.engine.drafters.config import DrafterConfig
from actors.engine.training import equal_data, evaluation, latency
from actors.engine.training.dataset import OnPolicyDataset
from actors.engine.training.evaluation import Candidate
from actors.engine.training.held_out import TEXT, read_text, with_features
from actors.engine.training.runs import Paths, restore, tables
from actors.engine.weights import Checkpoint, CheckpointError, read_config

HELD_OUT = "held_out"  # beside the bundled drafters
COMPARED = "compared"  # drafters that ship to be compared with, all trained alike; not part of an installed wheel
SPLITS = {0.0: "held_out", 1.0: "held_out_t1"}


@dataclass(frozen=True)
class Scene:
    """A target, where its drafters lie, and where its held-out text is.

    Args:
        target_dir: the target's directory.
        bundled_dir: `configs/models/NAME`, None for a target that is not bundled.
        work: folder of training runs, None without.
        limit: held-out answers of each domain, None for all.
    """

    target_dir: Path
    bundled_dir: Path | None = None
    work: Path | None = None
    limit: int | None = None

    @classmethod
    def of(cls, model_path: str, work: Path | None, limit: int | None) -> Scene:
        """Find the model as `model.path` names it; raises CheckpointError when it is not there."""
        bundled = BUNDLED_MODELS_DIR / model_path
        known = "/" not in model_path and bundled.is_dir()
        return cls(find_model(model_path), bundled if known else None, work, limit)

    def tables(self) -> tuple[Tensor, Tensor]:
        """Return the target's embedding and output head."""
        return tables(self.target_dir)

    def has_text(self, temperature: float) -> bool:
        """Return whether there is held-out text of a temperature."""
        own = self._own_text(temperature)
        shipped = self._shipped_text()
        return own is not None or (
            shipped is not None and any(a.temperature == temperature for a in read_text(shipped))
        )

    def _own_text(self, temperature: float) -> Path | None:
        """The work folder's shards of a temperature; None without any."""
        root = None if self.work is None else self.work / SPLITS[temperature]
        return root if root is not None and any(root.glob("shard-*.json")) else None

    def _shipped_text(self) -> Path | None:
        """The text beside the bundled drafters; None without any."""
        folder = None if self.bundled_dir is None else self.bundled_dir / HELD_OUT
        return folder if folder is not None and (folder / TEXT).is_file() else None

    def candidates(self, named: Sequence[tuple[str | None, Path]] = ()) -> list[Candidate]:
        """Return the drafters to compare: `named` ones, runs in `work`, bundled ones, those trained alike.

        A name that is taken already gets the place it comes from behind it.
        """
        found = [self.load(folder, name) for name, folder in named]
        if self.work is not None:
            runs = sorted(self.work.glob("run-*/checkpoint.pt"))
            found += [self._run(path) for path in runs]
        if self.bundled_dir is not None:
            found += [self.load(folder) for folder in _drafters_in(self.bundled_dir)]
        found += [self.load(folder) for folder in self.compared()]
        unique: dict[str, Candidate] = {}
        for candidate in found:
            name, where = candidate.name, Path(candidate.where)
            if name in unique:
                place = COMPARED if where.parent.name == COMPARED else where.name
                name = f"{name}@{place}"
            unique.setdefault(name, replace(candidate, name=name))
        return list(unique.values())

    def compared(self) -> list[Path]:
        """Return the drafters trained alike that ship with the model; none in an installed wheel."""
        return [] if self.bundled_dir is None else _drafters_in(self.bundled_dir / COMPARED)

    @property
    def lacks_compared(self) -> bool:
        """Whether there is held-out text of the model but none of the drafters to compare on it."""
        return self._shipped_text() is not None and not self.compared()

    def load(self, drafter_dir: Path, name: str | None = None) -> Candidate:
        """Load a drafter directory; raises CheckpointError for one that does not fit the target."""
        model = load_drafter(drafter_dir, *self.tables())
        training = read_config(drafter_dir).get("training") or {}
        return Candidate(
            name or evaluation.name_of(model.config),
            str(drafter_dir),
            model,
            training.get("steps"),
            training.get("answer_tokens"),
        )

    def _run(self, checkpoint: Path) -> Candidate:
        assert self.work is not None
        state = torch.load(checkpoint)
        model = restore(Paths(self.work, self.target_dir, ""), state)
        tokens = None
        if (self.work / "train").is_dir():
            tokens = OnPolicyDataset(self.work / "train", state.get("shards")).num_answer_tokens
        where = str(checkpoint.parent)
        name = evaluation.name_of(model.config)
        return Candidate(name, where, model, int(state["step"]), tokens)

    def held_out(
        self, config: DrafterConfig, temperature: float, taps: tuple[int, ...]
    ) -> OnPolicyDataset:
        """Return the text of one temperature, with features for drafters that read `taps`.

        The work folder's own, where it has some; else the text beside the bundled drafters, whose features are computed
        once and kept. Raises CheckpointError when there is neither, or features of another width.
        """
        final_norm = (
            Checkpoint(self.target_dir)["model.norm.weight"] if config.kind == "mtp" else None
        )
        root = self._own_text(temperature)
        if root is None:
            shipped = self._shipped_text()
            if shipped is None:
                raise CheckpointError(
                    f"no held-out text at temperature {temperature:g} of {self.target_dir}; generate some (split "
                    f"{SPLITS[temperature]}) and name its folder with --work"
                )
            root = with_features(shipped, self.target_dir, taps, per_domain=self.limit)
        data = OnPolicyDataset(root, final_norm=final_norm)
        width = data.features(data.read(data.records[0])).shape[1]
        if width != config.feature_dim:
            raise CheckpointError(
                f"{root} holds features {width} wide, this drafter reads layers {config.target_layer_ids} "
                f"({config.feature_dim} wide); generate held-out text with its taps"
            )
        return data


def compare(
    scene: Scene,
    candidates: Sequence[Candidate],
    temperatures: Sequence[float],
    *,
    with_latency: bool = True,
    progress: Callable[[str], None] = lambda _text: None,
) -> dict[str, Any]:
    """Return the report of `dspark evaluate`.

    Keys of a drafter at the top are of temperature 1 where it was asked for, else of 0; `temperature_0` and
    `temperature_1` hold both. Raises CheckpointError, or ValueError when there is too little text.
    """
    head = scene.tables()[1]
    shared = next(
        (c.model.config.target_layer_ids for c in candidates if c.model.config.kind != "mtp"), (0,)
    )
    drafters: dict[str, dict[str, Any]] = {}
    entrants = []
    for candidate in candidates:
        config = candidate.model.config
        progress(f"{candidate.name}: {candidate.where}")
        taps = shared if config.kind == "mtp" else config.target_layer_ids
        measured, rounds = {}, {}
        for at in temperatures:
            data = scene.held_out(config, at, taps)
            measured[at], rounds[at] = evaluation.measure(candidate, data, at, head, scene.limit)
        drafters[candidate.name] = {
            **candidate.facts(),
            **measured[max(temperatures)],
            **(_speed(candidate, scene, data) if with_latency else {"draft_ms": None}),
            **{f"temperature_{at:g}": found for at, found in measured.items()},
        }
        plain, layers = evaluation.name_of(config), config.num_hidden_layers
        entrants.append(
            equal_data.Entrant(candidate.name, plain, layers, candidate.trained_on, rounds)
        )
    alike = {name: entrant.name for name, entrant in equal_data.alike(entrants).items()}
    layers_of = {name: entry["num_layers"] for name, entry in drafters.items()}
    lengths = {name: entry["acceptance_length"] for name, entry in drafters.items()}
    return {
        "temperature": max(temperatures),
        "equal_data": equal_data.report(entrants),
        "depth": evaluation.depth(alike, layers_of, lengths),
        "drafters": drafters,
    }


def _speed(candidate: Candidate, scene: Scene, text: OnPolicyDataset) -> dict[str, Any]:
    size, where = candidate.model.config.block_size, Path(candidate.where)
    tables = read_tables(where, scene.target_dir, size) if where.is_dir() else None
    found = latency.measure(candidate.model, scene.target_dir, text=text, tables=tables).report()
    own = str(candidate.model.config.block_size)
    return {"draft_ms": found["draft_ms_by_gamma"][own], "latency": found}


def _drafters_in(folder: Path) -> list[Path]:
    """Return the drafter directories right below `folder`, in order of their names."""
    weights = sorted(folder.glob("*/model.safetensors"))
    return [path.parent for path in weights if (path.parent / "config.json").is_file()]


def write_report(report: dict[str, Any], out: Path) -> Path:
    """Write `evaluation.json` into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "evaluation.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return path
