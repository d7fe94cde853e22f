"""`python -m actors.engine.bench`: combinations of policy, batch, numerics and CUDA graphs, measured one by one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from typing import Any, get_args

import torch

from actors.core.local_policy import PolicyName
from actors.engine.bench import BENCH_CONTEXT, run
from actors.engine.round_bench import NEW_TOKENS, Figures, bench_of
from actors.engine.weights import CheckpointError
from configs.load import ConfigError, load

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
EXAMPLES = """on a GPU, one line each:
  python -m actors.engine.bench --config single-node-gpu --batch 1 16 64 256 --json
  python -m actors.engine.bench --config single-node-gpu --batch 1 16 64 256 --policy none lagged --graphs on off
  python -m actors.engine.bench --config single-node-gpu --batch 1 16 64 256 --numerics reproducible fast
  python -m actors.engine.bench --config single-node-gpu --batch 1 256 --policy --breakdown
on a CPU:
  python -m actors.engine.bench --batch 1 4 16
Every combination of policy, graphs, numerics and batch is one row; several of each may be named."""


def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    """Every combination asked for, and what was measured on."""
    rows: list[Figures] = []
    report: dict[str, Any] = {"figures": rows, "engine": []}
    for numerics, graphs in product(options.numerics or [None], options.graphs):
        chosen = [*options.set, *([f"model.numerics={numerics}"] if numerics else [])]
        config = load(options.config, [*chosen, f"target.max_running={max(options.batch)}"])
        if config.target.num_threads:
            torch.set_num_threads(config.target.num_threads)
        captures = graphs == "on"
        if options.breakdown or not options.policy:
            report["engine"].append(
                run(config, options.batch, _note, captures=captures, context=options.context)
            )
        if options.policy:
            bench = bench_of(config, captures=captures)
            for policy, batch in product(options.policy, options.batch):
                found = bench.measure(policy, batch, options.new_tokens)
                rows.append(Figures(batch, policy, config.model.numerics, bench.replays, **found))
                _note(_line(rows[-1]))
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return report | {"device": name, "figures": [asdict(row) for row in rows]}


def _line(row: Figures) -> str:
    return ", ".join(f"{name} {value}" for name, value in asdict(row).items())


def _note(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, with notes on standard error; status 2 for a setting that does not fit."""
    parser = argparse.ArgumentParser(
        prog="python -m actors.engine.bench",
        description="Tokens per second of target and drafter in this process, without Ray and HTTP.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", default="laptop-cpu", help="preset or file (laptop-cpu)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 256], help="requests")
    parser.add_argument(
        "--policy",
        nargs="*",
        choices=POLICIES,
        default=list(POLICIES),
        help="default: all; none named: the target alone",
    )
    parser.add_argument(
        "--graphs",
        nargs="+",
        choices=("on", "off"),
        default=["on"],
        help="CUDA graphs; a CPU has none",
    )
    parser.add_argument(
        "--numerics",
        nargs="+",
        choices=("reproducible", "fast"),
        help="default: the configured one",
    )
    parser.add_argument(
        "--context", type=int, default=BENCH_CONTEXT, help="of the target alone, tokens (128)"
    )
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="a request (96)")
    parser.add_argument(
        "--breakdown", action="store_true", help="where a plain step's time goes, too"
    )
    parser.add_argument("--json", action="store_true", help="one object on standard output")
    options = parser.parse_args(arguments)
    try:
        report = measure_all(options)
    except (CheckpointError, ConfigError) as error:
        _note(str(error))
        return 2
    if options.json:
        sys.stdout.write(json.dumps(report) + "\n")
    return 0
