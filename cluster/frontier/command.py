"""`dspark bench`: runs the plan, keeps what it measures, writes what it found."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from cluster.commands.local import launched_cluster
from cluster.commands.signals import interruptible
from cluster.console import CommandError, emit_json, note, say
from cluster.frontier import machine
from cluster.frontier.drive import Server
from cluster.frontier.ledger import Ledger, identity_of
from cluster.frontier.plan import Cell, Session, seconds_left
from cluster.frontier.rates import WindowError, rates_of
from cluster.frontier.report import summary
from cluster.frontier.setup import Setup, setup_of
from cluster.frontier.tables import markdown
from configs.schema import ClusterConfig

CALL_TIMEOUT_S = 60.0
ORDER_ATTEMPTS = 5
WARM_UP_STREAMS, WARM_UP_TOKENS = 4, 16


class Running(Protocol):
    """A cluster that is measured."""

    endpoint_url: str
    num_nodes: int
    warnings: list[str]

    def follow(self, wanted: ClusterConfig) -> None:
        """From now on it decides by the policy of `wanted`."""


def bench_frontier(arguments: argparse.Namespace) -> int:
    setup = setup_of(arguments)
    out = Path(arguments.out) if arguments.out else None
    ledger = Ledger(out, identity_of(setup.facts), resume=arguments.resume)
    cells = [cell for session in setup.sessions for cell in session.cells]
    num_kept = sum(setup.key(cell) in ledger.rows for cell in cells)
    for line in setup.left_out:
        note(f"left out: {line}")
    if out is None:
        note("nothing is kept: with --out DIR a run that is broken off can --resume")
    elif arguments.resume:
        note(f"{num_kept} of {len(cells)} measurements are there already")
    if ledger.num_foreign:
        note(
            f"{ledger.num_foreign} others are of another model, configuration or machine: not used"
        )
    run = Run(setup, ledger)
    if num_kept < len(cells):
        cores = machine.facts()["cores"]
        warning = machine.refuse_other_load(machine.watch(cores), cores, force=arguments.force)
        if warning:
            note(f"WARNING: {warning}")
            run.warnings.append(warning)
        with interruptible():
            run.all()
    report = report_of(setup, ledger, run.warnings)
    _write(report, out)
    (note if arguments.json else say)(markdown(report))
    if arguments.json:
        emit_json(report)
    return 0 if report["holds"] else 1


class Run:
    """The cells that are not measured yet, in the order of the plan.

    Args:
        opens: starts a cluster for a session, for tests.
    """

    def __init__(self, setup: Setup, ledger: Ledger, opens: Any = None) -> None:
        self.warnings: list[str] = []
        self._setup = setup
        self._ledger = ledger
        self._opens = opens or opened
        self._seconds: list[tuple[int, float]] = []  # of each cell, with its concurrency
        self._cores = machine.facts()["cores"]

    def all(self) -> None:
        for session in self._setup.sessions:
            todo = [cell for cell in session.cells if not self._has(cell)]
            if not todo:
                continue
            if all(self._setup.contender(cell.label).is_peer for cell in todo):
                self._measure_all(todo, None)
                continue
            with self._opens(self._setup.configs[session.cluster]) as cluster:
                self.warnings += [w for w in cluster.warnings if w not in self.warnings]
                self._measure_all(todo, cluster)

    def _has(self, cell: Cell) -> bool:
        return self._setup.key(cell) in self._ledger.rows

    def _measure_all(self, cells: Sequence[Cell], cluster: Running | None) -> None:
        cells_of_all = [cell for session in self._setup.sessions for cell in session.cells]
        num_done = sum(map(self._has, cells_of_all))
        self._warm_up(cells, cluster)
        with tqdm(total=len(cells_of_all), initial=num_done, unit="cell", file=sys.stderr) as bar:
            for cell in cells:
                bar.set_description(self._eta(cells_of_all))
                bar.set_postfix_str(f"{cell.label}, {cell.concurrency} streams")
                started = time.perf_counter()
                row = self._measure(cell, cluster)
                self._seconds.append((cell.concurrency, time.perf_counter() - started))
                self._ledger.add(self._setup.key(cell), row)
                for line in _worries(row):
                    bar.write(line, sys.stderr)
                if row["num_errors"] == row["num_requests"]:
                    raise CommandError(f"{cell.label}: every stream failed: {row['error']}")
                bar.update()

    def _eta(self, cells: Sequence[Cell]) -> str:
        left = [cell.concurrency for cell in cells if not self._has(cell)]
        seconds = seconds_left(self._seconds, left, self._setup.num_requests)
        return "frontier" if seconds is None else f"about {seconds / 60:.0f} min left"

    def _warm_up(self, cells: Sequence[Cell], cluster: Running | None) -> None:
        """Everybody who is measured serves a little first: the first requests of a process meet cold caches."""
        for label in dict.fromkeys(cell.label for cell in cells):
            self._serve_a_little(label, self._server(label, cluster), 2 * WARM_UP_STREAMS)

    def _serve_a_little(self, label: str, server: Server, num_requests: int) -> None:
        requests = self._setup.requests[:num_requests]
        short = [type(one)(one.kind, one.prompt, WARM_UP_TOKENS, one.seed) for one in requests]
        samples = server.serve(short, WARM_UP_STREAMS, 0.0)
        errors = [sample.error for sample in samples if sample.error]
        if errors:
            raise CommandError(f"{label}: {errors[0]}")

    def _server(self, label: str, cluster: Running | None) -> Server:
        """With the contender's policy in force."""
        contender = self._setup.contender(label)
        if contender.endpoint is not None:
            return Server(contender.endpoint, is_peer=True)
        assert cluster is not None
        wanted = self._setup.wanted[label]
        cluster.follow(wanted)
        return Server(cluster.endpoint_url, wanted.model.name)

    def _measure(self, cell: Cell, cluster: Running | None) -> dict[str, Any]:
        server = self._server(cell.label, cluster)
        requests = self._setup.requests[: self._setup.num_requests[cell.concurrency]]
        # Whom the contender before did not use has slept since: a drafter, and what of it was in memory and caches.
        self._serve_a_little(cell.label, server, WARM_UP_STREAMS)
        before = machine.load(machine.CELL_SAMPLE_S)
        samples = server.serve(requests, cell.concurrency, cell.temperature)
        is_peer = self._setup.contender(cell.label).is_peer
        num_nodes = 1 if is_peer or cluster is None else cluster.num_nodes
        try:
            rates = rates_of(samples, cell.concurrency, num_nodes)
        except WindowError as error:
            raise CommandError(f"{cell.label}: {error}") from error
        return {
            **asdict(cell),
            **rates,
            "load_before": before,
            "is_disturbed": machine.is_disturbed(before, self._cores),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
        }


def _worries(row: dict[str, Any]) -> Iterator[str]:
    """What somebody who watches should know at once of a measurement."""
    if row["num_errors"]:
        yield f"{row['label']}: {row['num_errors']} errors: {row['error']}"
    if row["is_disturbed"]:
        busy = row["load_before"]["busy_cores"]
        yield f"WARNING: {row['label']}: {busy:g} cores were busy with something else just before"


class _Cluster:
    """A cluster launched by this process."""

    def __init__(self, endpoint_url: str, namespace: str) -> None:
        import ray

        self.endpoint_url = endpoint_url
        self._ray: Any = ray
        self._supervisor: Any = ray.get_actor("supervisor", namespace=namespace)
        self.num_nodes = self._count_nodes()
        self.warnings = self._broken_promises()

    def follow(self, wanted: ClusterConfig) -> None:
        late: list[str] = []
        for _ in range(ORDER_ATTEMPTS):
            late = self._ask(self._supervisor.reconfigure.remote(wanted))["late"]
            if not late:
                return
        raise CommandError(f"{', '.join(late)} did not take over policy {wanted.policy.name}")

    def _count_nodes(self) -> int:
        members = self._ask(self._supervisor.status.remote())["members"]
        return len({member["node_ip"] for member in members if member["role"] == "target"})

    def _broken_promises(self) -> list[str]:
        """What the ranks say that does not hold on this machine."""
        ranks = self._ask(self._supervisor.routing.remote()).ranks
        return [f"{rank.endpoint.name}: {rank.warning}" for rank in ranks if rank.warning]

    def _ask(self, call: Any) -> Any:
        try:
            return self._ray.get(call, timeout=CALL_TIMEOUT_S)
        except self._ray.exceptions.RayError as error:
            raise CommandError(f"supervisor: {error}") from error


@contextmanager
def opened(config: ClusterConfig) -> Iterator[Running]:
    """A cluster for one session."""
    with launched_cluster(config) as launched:
        yield _Cluster(launched.endpoint_url, launched.namespace)


def report_of(setup: Setup, ledger: Ledger, warnings: Sequence[str]) -> dict[str, Any]:
    """The whole report: what was measured, and all that must be known to read it."""
    model = setup.configs["ours"].model
    cells = [cell for session in setup.sessions for cell in session.cells]
    rows = [ledger.rows[key] for cell in cells if (key := setup.key(cell)) in ledger.rows]
    found = summary(rows, setup.contenders, is_reproducible=model.numerics == "reproducible")
    return {
        "command": f"dspark {shlex.join(sys.argv[1:])}",
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "machine": machine.facts(),
        "model": {
            "name": model.name,
            "dtype": model.dtype,
            "numerics": model.numerics,
            "gamma": setup.configs["ours"].drafter.gamma,
            "num_ranks": setup.configs["ours"].target.num_ranks,
        },
        **setup.options,
        "num_requests": {str(count): number for count, number in setup.num_requests.items()},
        "order": [_order(session) for session in setup.sessions],
        "left_out": list(setup.left_out),
        "warnings": list(warnings),
        **found,
    }


def _order(session: Session) -> dict[str, Any]:
    return {"cluster": session.cluster, "cells": [cell.key for cell in session.cells]}


def _write(report: dict[str, Any], out: Path | None) -> None:
    if out is None:
        return
    (out / "frontier.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    (out / "frontier.md").write_text(markdown(report), encoding="utf-8")
    try:
        from cluster.frontier import figures
    except ImportError:
        note("no plots: install the extra `plots` (matplotlib)")
        figures_written: list[Path] = []
    else:
        figures_written = figures.draw(report, out)
    for path in (out / "frontier.json", out / "frontier.md", *figures_written):
        note(f"written: {path}")
