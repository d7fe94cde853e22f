"""`dspark bench`: the serving frontier; or the target alone, budgets by rank, what the server costs."""

from __future__ import annotations

import argparse
from typing import Any

from cluster.console import CommandError, emit_json, note, say, table
from configs.load import load


def bench(arguments: argparse.Namespace) -> int:
    if sum(map(bool, (arguments.engine_only, arguments.ranks, arguments.overhead))) > 1:
        raise CommandError(
            "--engine-only, --ranks N or --overhead: measure one of them", exit_code=2
        )
    if arguments.overhead:
        from cluster.overhead import bench_overhead

        return bench_overhead(arguments)
    if arguments.ranks:
        from cluster.rank_bench import bench_ranks  # imports Ray

        return bench_ranks(arguments)
    if not arguments.engine_only:
        from cluster.frontier.command import bench_frontier

        return bench_frontier(arguments)
    if min(arguments.batch) < 1:
        raise CommandError(f"--batch {min(arguments.batch)}: use at least 1", exit_code=2)
    config = load(arguments.config, arguments.set)
    from actors.engine import bench as engine_bench  # imports torch: only when it is measured

    report: dict[str, Any] = dict(
        engine_bench.run(config, arguments.batch, progress=note, context=arguments.context)
    )
    if arguments.json:
        emit_json(report)
    else:
        rows = [[size, f"{rate:.1f}"] for size, rate in report["tokens_per_s"].items()]
        say(table(["batch", "tokens/s"], rows))
        for size, parts in report.get("breakdown_ms", {}).items():
            shares = ", ".join(f"{name} {ms:.1f}" for name, ms in parts.items())
            say(f"a step at batch {size}, in ms: {shares}")
    return 0
