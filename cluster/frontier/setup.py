"""From the options of `dspark bench` to what is measured: configurations, contenders, requests, identity."""

from __future__ import annotations

import argparse
import hashlib
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cluster.commands.local import free_port
from cluster.console import CommandError
from cluster.frontier import machine
from cluster.frontier.ledger import identity_of
from cluster.frontier.plan import (
    ALL_POLICIES,
    MTP1,
    Cell,
    Contender,
    PlanError,
    Session,
    contenders_of,
    quick_policies,
    sessions_of,
)
from cluster.frontier.workload import Request, num_requests, requests_of
from cluster.model_files import BUNDLED, text_files
from configs.load import load
from configs.recipe import read_recipe
from configs.schema import NGRAM_DRAFTER, ClusterConfig

TOKENS, QUICK_TOKENS = 64, 32
COUNTS, QUICK_COUNTS = (1, 2, 4, 8, 16, 32, 64), (1, 4, 16)
REPEATS, QUICK_REPEATS = 3, 2
TEMPERATURES, QUICK_TEMPERATURES = (0.0, 1.0), (0.0,)
HASHED_BYTES = 2**26  # larger files are known by their size


@dataclass(frozen=True)
class Setup:
    """A run that can begin.

    Attributes:
        configs: of the two clusters: ours, and MTP-1's where there is one.
        wanted: the configuration with which a contender of ours is measured.
        facts: what all cells must share to be compared.
        marks: what the cells of a cluster must share beyond that.
        left_out: contenders that were asked for and cannot be measured, each with the reason.
    """

    configs: Mapping[str, ClusterConfig]
    contenders: tuple[Contender, ...]
    wanted: Mapping[str, ClusterConfig]
    sessions: tuple[Session, ...]
    requests: tuple[Request, ...]
    num_requests: Mapping[int, int]
    options: Mapping[str, Any]
    facts: Mapping[str, Any]
    marks: Mapping[str, str]
    left_out: tuple[str, ...]

    def contender(self, label: str) -> Contender:
        return next(known for known in self.contenders if known.label == label)

    def key(self, cell: Cell) -> str:
        """Of a cell on disk. What is special to the contender stands here: others stay valid when it changes."""
        contender = self.contender(cell.label)
        mark = self.marks.get(contender.cluster, "")
        return f"{cell.key}|{contender.endpoint or dict(contender.policy)}|{mark}"


def setup_of(arguments: argparse.Namespace) -> Setup:
    """Raises CommandError or ConfigError for what cannot be measured."""
    quick = arguments.quick
    counts = arguments.concurrency or (QUICK_COUNTS if quick else COUNTS)
    temperatures = arguments.temperatures or (QUICK_TEMPERATURES if quick else TEMPERATURES)
    repeats = arguments.repeats if arguments.repeats is not None else _repeats(quick)
    tokens = arguments.tokens if arguments.tokens is not None else _tokens(quick)
    for name, value, least in (
        ("repeats", repeats, 1), ("tokens", tokens, 2), ("waves", arguments.waves, 2),
    ):  # fmt: skip
        if value < least:
            raise CommandError(f"--{name} {value}: use at least {least}", exit_code=2)
    configs, left_out = _configs(arguments, max(counts))
    ours = configs["ours"]
    gamma = ours.drafter.gamma
    names = arguments.policies or (quick_policies(gamma) if quick else ALL_POLICIES)
    if MTP1 not in configs:
        left_out = [line for line in left_out if MTP1 in names]
        names = [name for name in names if name != MTP1]
    try:
        contenders = contenders_of(names, gamma, arguments.endpoint)
    except PlanError as error:
        raise CommandError(str(error), exit_code=2) from error
    per_cell = {count: num_requests(count, arguments.waves) for count in counts}
    options = {
        "repeats": repeats,
        "tokens": tokens,
        "waves": arguments.waves,
        "seed": arguments.seed,
        "concurrency": list(counts),
        "temperatures": list(temperatures),
    }
    return Setup(
        configs=configs,
        contenders=contenders,
        wanted=_wanted(contenders, configs),
        sessions=tuple(sessions_of(contenders, counts, temperatures, repeats, arguments.seed)),
        requests=requests_of(max(per_cell.values()), tokens, arguments.seed),
        num_requests=per_cell,
        options=options,
        facts=_facts(ours, options),
        marks={MTP1: identity_of(_cluster_facts(configs[MTP1]))} if MTP1 in configs else {},
        left_out=tuple(left_out),
    )


def _repeats(quick: bool) -> int:
    return QUICK_REPEATS if quick else REPEATS


def _tokens(quick: bool) -> int:
    return QUICK_TOKENS if quick else TOKENS


def _configs(
    arguments: argparse.Namespace, most_streams: int
) -> tuple[dict[str, ClusterConfig], list[str]]:
    """Configurations by cluster, and why MTP-1's is missing."""
    given = load(arguments.config, arguments.set)
    if given.model.drafter is None:
        raise CommandError("model.drafter is null: there is nothing to compare", exit_code=2)
    # Every stream has a place: a queue on the rank would blur what the concurrency means.
    ranks = given.target.num_ranks
    places = max(given.target.max_running, min(most_streams, 2 * math.ceil(most_streams / ranks)))
    settings = [
        *arguments.set,
        f"target.max_running={places}",
        f"ingress.port={free_port()}",
        "ingress.api_keys=[]",
    ]
    configs = {"ours": load(arguments.config, settings)}
    folder = _mtp1_folder(arguments.mtp1, given.model.path)
    if folder is None:
        where = f"configs/models/{_dense(given.model.path)}/mtp1/"
        return configs, [f"mtp1, there is no such drafter in {where}; name one with --mtp1 DIR"]
    one = [
        f"model.drafter={folder}", "drafter.gamma=1", "policy.name=static_length", "policy.static_length=1",
    ]  # fmt: skip
    configs[MTP1] = load(arguments.config, [*settings, *one])
    return configs, []


def _dense(model_path: str) -> str:
    """An upcycled model's drafters are those of the dense one."""
    recipe = read_recipe(model_path)
    return recipe.dense if recipe is not None else model_path


def _mtp1_folder(given: str | None, model_path: str) -> Path | None:
    """Raises CommandError when a directory was named and holds no drafter."""
    folder = Path(given).expanduser() if given else BUNDLED / _dense(model_path) / "mtp1"
    if (folder / "config.json").is_file():
        return folder
    if given:
        raise CommandError(f"--mtp1 {given}: no config.json of a drafter there", exit_code=2)
    return None


def _wanted(
    contenders: Sequence[Contender], configs: Mapping[str, ClusterConfig]
) -> dict[str, ClusterConfig]:
    wanted = {}
    for contender in contenders:
        if contender.is_peer:
            continue
        values = configs[contender.cluster].model_dump()
        values["policy"] |= contender.policy
        try:
            wanted[contender.label] = ClusterConfig.model_validate(values)
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise CommandError(f"{contender.label} cannot be measured: {problem}") from error
    return wanted


def _facts(config: ClusterConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """Two cells with the same facts may stand in one table, whatever commit measured them."""
    return {
        "cluster": _cluster_facts(config),
        "machine": {**machine.facts(), "node": platform.node()},
        **{name: options[name] for name in ("tokens", "waves", "seed")},
    }


def _cluster_facts(config: ClusterConfig) -> dict[str, Any]:
    values = config.model_dump(exclude={"ingress": {"port"}, "telemetry": True})
    return {**values, "files": _files(config)}


def _files(config: ClusterConfig) -> dict[str, str]:
    """What the model and its drafter consist of."""
    folders = {"model": text_files(config.model.path)}
    drafter = config.model.drafter
    if drafter == "bundled":
        folders["drafter"] = BUNDLED / _dense(config.model.path) / "drafter"
    elif drafter not in (None, NGRAM_DRAFTER):
        folders["drafter"] = Path(str(drafter)).expanduser()
    found = {}
    for name, folder in folders.items():
        for path in sorted(folder.glob("*")) if folder.is_dir() else ():
            if path.suffix in (".json", ".safetensors", ".gguf"):
                found[f"{name}/{path.name}"] = _known_by(path)
    return found


def _known_by(path: Path) -> str:
    size = path.stat().st_size
    if size > HASHED_BYTES:
        return f"{size} bytes"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
