"""`dspark chaos`: faults at random under load, on a cluster of its own, and a verdict on every stream."""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.chaos.checker import Verdict, check
from cluster.chaos.history import read_history
from cluster.chaos.plan import KINDS, Topology, plan
from cluster.chaos.report import report, text
from cluster.console import CommandError, emit_json, listed, note, say
from configs.load import load
from configs.schema import ClusterConfig

DEFAULT_OUT = Path("~/.cache/dspark-cluster/chaos")
# What a laptop holds twice, and a cache that the streams outgrow; `--set` changes them.
SMALL = (
    "target.num_ranks=2",
    "target.kv_cache_tokens=1536",
    "target.collective_timeout_s=8",
    "drafter.num_actors=2",
    "model.max_model_len=256",
    "ingress.replay_timeout_s=180",
)
# Without these there is nothing to compare, or nobody to disturb.
NEEDED = ("link.drills=true", "model.numerics=reproducible", "ingress.api_keys=[]")


def add_options(chaos: argparse.ArgumentParser) -> None:
    chaos.description = (
        "Start a cluster, hold streams open, and kill, stop and disturb its parts at random; every stream must bring "
        "the tokens it brings undisturbed. Kinds: "
        + "; ".join(f"{kind.name} ({kind.summary})" for kind in KINDS.values())
        + ". The death of a machine is a drill of `make test-cluster`."
    )
    chaos.add_argument("--kills", type=_count, default=3, help="faults of each kind (default 3)")
    chaos.add_argument("--kinds", type=_kinds, metavar="A,B,…", help="default: all")
    chaos.add_argument("--streams", type=_count, default=16, help="held open (default 16)")
    chaos.add_argument("--seed", type=int, default=0, help="of faults and requests (default 0)")
    chaos.add_argument(
        "--seconds", type=float, default=900.0, help="then no further fault (default 900)"
    )
    chaos.add_argument(
        "--at-once", type=_count, default=3, help="faults on at the same time (default 3)"
    )
    chaos.add_argument(
        "--rest",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="without another fault after each one is over (default 0)",
    )
    chaos.add_argument(
        "--out", default=str(DEFAULT_OUT), metavar="DIR", help="histories (default %(default)s)"
    )
    chaos.add_argument(
        "--check", nargs="+", metavar="FILE", help="judge kept histories together; start nothing"
    )


def chaos(arguments: argparse.Namespace) -> int:
    paths = [Path(path) for path in arguments.check or ()]
    if not paths:
        paths = _run(arguments)
    verdict = Verdict()
    for path in paths:
        try:
            verdict.add(check(read_history(path)))
        except (OSError, ValueError) as error:
            raise CommandError(f"{path}: {error}") from error
    told = report(verdict)
    (note if arguments.json else say)(text(told, [str(path) for path in paths]))
    if arguments.json:
        emit_json({**told, "histories": [str(path) for path in paths]})
    return 0 if verdict.is_clean else 1


def _run(arguments: argparse.Namespace) -> list[Path]:
    """One storm for each topology that the kinds need; returns where their histories lie."""
    from tqdm import tqdm

    wanted = tuple(arguments.kinds or KINDS)
    topologies = dict.fromkeys(KINDS[kind].topology for kind in wanted)
    folder = Path(arguments.out).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    paths = []
    with tqdm(total=len(wanted) * arguments.kills, unit="fault", desc="chaos") as bar:
        for topology in topologies:
            kinds = tuple(kind for kind in wanted if KINDS[kind].topology == topology)
            path = folder / f"{stamp}-seed{arguments.seed}-{topology}.jsonl"
            share = len(kinds) / len(wanted)
            _storm(arguments, _config(arguments, topology), kinds, share, path, bar.update)
            paths.append(path)
    return paths


def _config(arguments: argparse.Namespace, topology: Topology) -> ClusterConfig:
    from cluster.commands.local import free_port

    ranks = load(arguments.config, [*SMALL, *arguments.set]).target.num_ranks
    forced = [*NEEDED, f"ingress.port={free_port()}"]
    forced.append(f"target.group_size={ranks if topology == 'group' else 1}")
    return load(arguments.config, [*SMALL, *arguments.set, *forced])


def _storm(
    arguments: argparse.Namespace,
    config: ClusterConfig,
    kinds: Sequence[str],
    share: float,
    path: Path,
    progress: Callable[[], object],
) -> None:
    from cluster.chaos.load import UndisturbedError
    from cluster.chaos.storm import Weather, storm  # imports Ray
    from cluster.commands.local import launched_cluster

    if config.model.drafter is None and (idle := [k for k in kinds if "drafter" in k]):
        raise CommandError(f"model.drafter is null: leave {', '.join(idle)} out of --kinds")
    # What Ray prints about processes that were killed is no news here.
    logging.getLogger("cluster.ray_session").setLevel(logging.ERROR)
    weather = Weather(
        tuple(kinds),
        arguments.kills,
        arguments.streams,
        arguments.seed,
        arguments.seconds * share,
        arguments.at_once,
        arguments.rest,
    )
    faults = plan(kinds, arguments.kills, arguments.seed)
    with launched_cluster(config) as cluster, path.open("w", encoding="utf-8") as file:
        settings = config.model_dump(mode="json")
        served = (cluster.endpoint_url, config.model.name)
        try:
            asyncio.run(storm(*served, weather, faults, settings, file, progress))
        except UndisturbedError as error:
            raise CommandError(str(error)) from error


def _count(word: str) -> int:
    count = int(word)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{word}: use 1 or more")
    return count


def _kinds(words: str) -> tuple[str, ...]:
    names = listed(words)
    unknown = [name for name in names if name not in KINDS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"{words!r}: use some of {', '.join(KINDS)}")
    return names
