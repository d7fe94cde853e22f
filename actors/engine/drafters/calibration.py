"""Calibration tables of a confidence head: one for each acceptance rule and temperature, on the drafter's device.

What is accepted depends on how tokens are drawn, so one map of confidences cannot be right for greedy and sampled
requests at once. A request uses the table of its rule whose temperature is nearest to its own.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.core.calibration import CalibrationError, ConfidenceMap
from actors.core.sampling import RULE_COUPLED, RULE_GREEDY, RULE_REJECTION
from actors.engine.weights import Checkpoint, CheckpointError, read_config, telling_bytes
from kernels.markov_sample import DraftSampling

log = logging.getLogger(__name__)

CALIBRATION_FILE = "calibration.json"
RULES = {"greedy": RULE_GREEDY, "rejection": RULE_REJECTION, "coupled": RULE_COUPLED}
# A table of another rule is taken only where the own rule has none: rules lie further apart than temperatures.
OTHER_RULE = 100.0


@dataclass(frozen=True)
class Table:
    """The map for one acceptance rule at one temperature."""

    rule: str
    temperature: float
    map: ConfidenceMap


class ConfidenceTables:
    """Calibrated confidences of requests of any rule and temperature, without a branch on their values.

    Attributes:
        num_refused: 1 when a file was there that belongs to another target or drafter, else 0.
    """

    def __init__(self, tables: Sequence[Table], num_refused: int = 0) -> None:
        """Take at least one table."""
        self.num_refused = num_refused
        self._rules = torch.tensor([RULES[t.rule] for t in tables])
        self._at = torch.tensor([t.temperature for t in tables])
        maps = [t.map for t in tables]
        most = max(m.knots.shape[1] for m in maps)  # a knot without a bend changes nothing
        pads = [((0, 0), (0, most - m.knots.shape[1])) for m in maps]
        self._shifts = torch.from_numpy(np.stack([m.shifts for m in maps])).float()
        self._temperatures = torch.from_numpy(np.stack([m.temperatures for m in maps])).float()
        self._knots, self._bends = (
            torch.from_numpy(
                np.stack([np.pad(a, p) for a, p in zip(arrays, pads, strict=True)])
            ).float()
            for arrays in ([m.knots for m in maps], [m.bends for m in maps])
        )  # [T, gamma, K]

    @classmethod
    def identity(cls, gamma: int, num_refused: int = 0) -> ConfidenceTables:
        """Leave confidences as the head gives them."""
        return cls([Table("greedy", 0.0, ConfidenceMap.identity(gamma))], num_refused)

    def fitting(self, gamma: int, device: torch.device) -> ConfidenceTables:
        """Return these tables for the first `gamma` slots, on `device`."""
        return self._of_slots(torch.arange(gamma), device)

    def reaching(self, gamma: int) -> ConfidenceTables:
        """Return these tables for `gamma` slots; those beyond what was fitted are like the last one."""
        slots = torch.arange(gamma).clamp(max=self._shifts.shape[1] - 1)
        return self._of_slots(slots, self._shifts.device)

    def _of_slots(self, slots: Tensor, device: torch.device) -> ConfidenceTables:
        made = object.__new__(ConfidenceTables)
        made.num_refused = self.num_refused
        made._rules, made._at = self._rules.to(device), self._at.to(device)
        for name in ("_shifts", "_temperatures", "_knots", "_bends"):
            values = getattr(self, name)
            setattr(made, name, values[:, slots.to(values.device)].to(device))
        return made

    def chosen(self, sampling: DraftSampling) -> Tensor:
        """Return the index [N] of the table for each request."""
        apart = (sampling.temperature[:, None] - self._at).abs()
        apart = apart + OTHER_RULE * (sampling.rule[:, None] != self._rules)
        return apart.argmin(-1)

    def confidences(self, logits: Tensor, sampling: DraftSampling) -> Tensor:
        """Return calibrated conditional confidences [N, gamma] for confidence logits [N, gamma]."""
        return self._curves(logits, self.chosen(sampling))

    def of_slot(self, slot: int, logits: Tensor, table: Tensor) -> Tensor:
        """Return calibrated confidences [N] of one slot for logits [N], by the `chosen` tables [N]."""
        return self._curves(logits, (table, slot))

    def _curves(self, logits: Tensor, at: Tensor | tuple[Tensor, int]) -> Tensor:
        bent = ((logits[..., None] - self._knots[at]).relu() * self._bends[at]).sum(-1)
        return torch.sigmoid((logits + self._shifts[at]) / self._temperatures[at] + bent)


def read_tables(drafter_dir: Path, target_dir: Path, block_size: int) -> ConfidenceTables:
    """Return the tables of `calibration.json`; the identity without the file.

    A file fitted for other weights, of target or drafter, is refused: logged, counted in `num_refused`, and
    confidences stay as the head gives them. Older files load too: those without knots as straight lines, and those from
    before there were identities, which hold one list of temperatures for everything.
    Raises CheckpointError for a file that cannot be read or has another number of slots.
    """
    path = drafter_dir / CALIBRATION_FILE
    if not path.is_file():
        return ConfidenceTables.identity(block_size)
    raw = json.loads(path.read_text(encoding="utf-8"))
    tables = _parse(path, raw, block_size)
    identities = (
        ("drafter", drafter_identity, drafter_dir),
        ("target", target_identity, target_dir),
    )
    for name, of, folder in identities:
        if name in raw and raw[name] != (identity := of(folder)):
            log.warning(
                "%s was fitted for another %s (%s, this one is %s): confidences stay uncalibrated; "
                "run `dspark calibrate`",
                path, name, raw[name], identity,
            )  # fmt: skip
            return ConfidenceTables.identity(block_size, num_refused=1)
    return ConfidenceTables(tables)


def write_tables(
    drafter_dir: Path, target_dir: Path, tables: Sequence[tuple[Table, dict[str, Any]]]
) -> Path:
    """Write `calibration.json` with the identities of both models; each table comes with what was measured of it."""
    entries = [
        {
            "rule": table.rule,
            "temperature": table.temperature,
            "shifts": [round(float(v), 4) for v in table.map.shifts],
            "temperatures": [round(float(v), 4) for v in table.map.temperatures],
            "knots": np.round(table.map.knots, 4).tolist(),
            "bends": np.round(table.map.bends, 4).tolist(),
            **measured,
        }
        for table, measured in tables
    ]
    whole = {
        "target": target_identity(target_dir),
        "drafter": drafter_identity(drafter_dir),
        "tables": entries,
    }
    path = drafter_dir / CALIBRATION_FILE
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return path


def copy_tables(drafter_dir: Path, out_dir: Path) -> None:
    """Take the tables along with a drafter that was written again, with equal weights, to `out_dir`."""
    path = drafter_dir / CALIBRATION_FILE
    if not path.is_file():
        return
    raw = json.loads(path.read_text(encoding="utf-8"))
    if raw.get("drafter") == drafter_identity(drafter_dir):
        raw["drafter"] = drafter_identity(out_dir)
    (out_dir / path.name).write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


def drafter_identity(drafter_dir: Path) -> str:
    """Return a hash of a drafter's weights (see `telling_bytes`)."""
    digest = hashlib.sha256()
    for part in telling_bytes(drafter_dir):
        digest.update(part)
    return digest.hexdigest()[:16]


def target_identity(target_dir: Path) -> str:
    """Return a hash of a target's final norm and of what its first and last attention put out.

    An upcycled model shares these with its dense one, and its outputs too: what was calibrated for one holds for both.
    """
    checkpoint = Checkpoint(target_dir)
    last = int(read_config(target_dir)["num_hidden_layers"]) - 1
    digest = hashlib.sha256()
    for name in ("norm", "layers.0.self_attn.o_proj", f"layers.{last}.self_attn.o_proj"):
        tensor = checkpoint[f"model.{name}.weight"]
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _parse(path: Path, raw: dict[str, Any], block_size: int) -> list[Table]:
    entries = raw.get("tables") if isinstance(raw, dict) else None
    if entries is None and isinstance(raw, dict):
        entries = [{"rule": "greedy", "temperature": 0.0, **raw}]
    if not isinstance(entries, list) or not entries:
        raise CheckpointError(f"{path}: 'tables' must list at least one; calibrate again")
    return [_table(path, entry, block_size) for entry in entries]


def _table(path: Path, entry: dict[str, Any], block_size: int) -> Table:
    temperatures, shifts = entry.get("temperatures"), entry.get("shifts", [0.0] * block_size)
    for values in (temperatures, shifts):
        if (
            not isinstance(values, list)
            or len(values) != block_size
            or not all(isinstance(v, int | float) for v in values)
        ):
            raise CheckpointError(
                f"{path}: 'temperatures' and 'shifts' must list {block_size} numbers; calibrate again"
            )
    if entry.get("rule") not in RULES:
        raise CheckpointError(
            f"{path}: rule={entry.get('rule')!r}: use one of {', '.join(RULES)}; calibrate again"
        )
    straight: list[list[float]] = [[] for _ in range(block_size)]
    try:
        arrays = (
            np.array(values, np.float64)
            for values in (
                shifts,
                temperatures,
                entry.get("knots", straight),
                entry.get("bends", straight),
            )
        )
        found = ConfidenceMap(*arrays)
    except (CalibrationError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    return Table(entry["rule"], float(entry["temperature"]), found)
