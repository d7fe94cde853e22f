"""What `dspark evaluate` and `dspark calibrate` work on: the drafters there are, and held-out text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.engine.checkpoint import BUNDLED_MODELS_DIR, find_model
from actors.engine.drafters.checkpoint import load_drafter
from actors.engine.drafters.config import DrafterConfig
from actors.engine.training import evaluation, latency
from actors.engine.training.dataset import OnPolicyDataset
from actors.engine.training.evaluation import Candidate
from actors.engine.training.held_out import TEXT, read_text, with_features
from actors.engine.training.runs import Paths, restore, tables
from actors.engine.weights import Checkpoint, CheckpointError, read_config

HELD_OUT = "held_out"  # beside the bundled drafters
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
        """Return the drafters to compare: `named` ones, then runs in `work`, then bundled ones.

        A name that is taken already gets the place it comes from behind it.
        """
        found = [self.load(folder, name) for name, folder in named]
        if self.work is not None:
            runs = sorted(self.work.glob("run-*/checkpoint.pt"))
            found += [self._run(path) for path in runs]
        if self.bundled_dir is not None:
            folders = sorted(p.parent for p in self.bundled_dir.glob("*/model.safetensors"))
            found += [self.load(folder) for folder in folders if (folder / "config.json").is_file()]
        unique: dict[str, Candidate] = {}
        for candidate in found:
            name = candidate.name
            if name in unique:
                name = f"{name}@{Path(candidate.where).name}"
            unique.setdefault(name, Candidate(**{**vars(candidate), "name": name}))
        return list(unique.values())

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
    for candidate in candidates:
        config = candidate.model.config
        progress(f"{candidate.name}: {candidate.where}")
        taps = shared if config.kind == "mtp" else config.target_layer_ids
        measured = {
            at: evaluation.measure(
                candidate, scene.held_out(config, at, taps), at, head, scene.limit
            )
            for at in temperatures
        }
        speed: dict[str, Any] = {"draft_ms": None}
        if with_latency:
            found = latency.measure(candidate.model, scene.target_dir).report()
            speed = {
                "draft_ms": found["draft_ms_by_gamma"][str(config.block_size)],
                "latency": found,
            }
        drafters[candidate.name] = {
            **candidate.facts(),
            **measured[max(temperatures)],
            **speed,
            **{f"temperature_{at:g}": found for at, found in measured.items()},
        }
    return {
        "temperature": max(temperatures),
        **_compared(drafters, temperatures),
        "drafters": drafters,
    }


def _compared(drafters: dict[str, dict[str, Any]], temperatures: Sequence[float]) -> dict[str, Any]:
    layers = {name: entry["num_layers"] for name, entry in drafters.items()}
    lengths = {
        at: {n: entry[f"temperature_{at:g}"]["acceptance_length"] for n, entry in drafters.items()}
        for at in temperatures
    }
    return {
        "ratios": evaluation.ratios(lengths[max(temperatures)]),
        "ratios_by_temperature": {
            f"temperature_{at:g}": evaluation.ratios(own) for at, own in lengths.items()
        },
        "depth": evaluation.depth(layers, lengths[max(temperatures)]),
    }


def write_report(report: dict[str, Any], out: Path) -> Path:
    """Write `evaluation.json` into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "evaluation.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return path
