"""The options of `dspark bench`."""

from __future__ import annotations

import argparse

from cluster.console import listed


def add_options(bench: argparse.ArgumentParser) -> None:
    """The frontier by default; `--engine-only`, `--ranks` and `--overhead` measure something else."""
    bench.description = (
        "Measure the serving frontier: tokens/s of a user against tokens/s of the node, for every policy under the "
        "same load. With --engine-only the target alone, with --ranks budgets under uneven load."
    )
    _add_frontier(bench.add_argument_group("the frontier"))
    bench.add_argument(
        "--tokens", type=int, help="of each stream (default 64; --quick 32); mean of the frontier's"
    )
    bench.add_argument("--out", default="", metavar="DIR", help="folder for cells, tables, plots")
    other = bench.add_argument_group("something else")
    other.add_argument(
        "--engine-only", action="store_true", help="the target alone, in this process"
    )
    other.add_argument(
        "--overhead", action="store_true", help="HTTP, Serve and actors against the bare engine"
    )
    other.add_argument("--streams", type=int, default=32, help="of --overhead (default 32)")
    other.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16], help="default 1 4 16")
    other.add_argument(
        "--context", type=int, default=128, help="of --engine-only: tokens before (default 128)"
    )
    other.add_argument("--ranks", type=int, default=0, help="budgets of so many uneven ranks")
    other.add_argument("--crowd", type=int, default=8, help="chats on one rank (default 8)")
    other.add_argument("--few", type=int, default=2, help="streams on each other (default 2)")


def _add_frontier(frontier: argparse._ArgumentGroup) -> None:
    frontier.add_argument(
        "--quick", action="store_true", help="a part of it, in about ten minutes on two slow cores"
    )
    frontier.add_argument(
        "--policies",
        type=listed,
        metavar="A,B,…",
        help="none, fixed (every length), fixed-2, fixed-max, mtp1, threshold, lagged, joint (default: all)",
    )
    frontier.add_argument(
        "--concurrency",
        type=_counts,
        metavar="N,N,…",
        help="streams in flight (default 1,2,4,8,16,32,64)",
    )
    frontier.add_argument("--repeats", type=int, metavar="N", help="of every cell (default 3)")
    frontier.add_argument(
        "--temperatures", type=_numbers, metavar="T,T,…", help="default 0,1; above 0 seeded"
    )
    frontier.add_argument(
        "--waves", type=int, default=3, help="requests each stream serves (default 3)"
    )
    frontier.add_argument("--seed", type=int, default=0, help="of prompts and order (default 0)")
    frontier.add_argument(
        "--mtp1", metavar="DIR", help="MTP-1 drafter (default: mtp1/ beside the bundled one)"
    )
    frontier.add_argument(
        "--endpoint",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="a peer's OpenAI-compatible server (…/v1, or …/v1/completions); may be repeated",
    )
    frontier.add_argument("--resume", action="store_true", help="keep the cells that DIR holds")
    frontier.add_argument(
        "--force", action="store_true", help="measure although something else runs here"
    )


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(sorted({int(part) for part in listed(text)}))
    if not counts or counts[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: use numbers of streams, such as 1,4,16")
    return counts


def _numbers(text: str) -> tuple[float, ...]:
    numbers = tuple(sorted({float(part) for part in listed(text)}))
    if not numbers or numbers[0] < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: use temperatures, such as 0,1")
    return numbers
