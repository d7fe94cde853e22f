"""`dspark bench --ranks N`: budgets of a real cluster under uneven load, and what losing the allocator costs.

A crowd of chats runs on one rank, a few requests for code on each other one; then the load switches sides; then the
first load runs again and the allocator's process is killed in its middle. Every stream is seeded, so all three runs of
it must say the same.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.core.capacity import BudgetRecord
from cluster.client import Answer, EndpointClient, collect
from cluster.commands.local import free_port, launched_cluster
from cluster.console import CommandError, emit_json, note, say
from cluster.demo_prompts import PROMPTS
from cluster.rank_bench_report import Kill, Phase, figure, summary, text
from configs.load import load
from configs.schema import ClusterConfig

TOKENS = 64
POLL_S = 0.25
KILL_POLL_S = 0.02
CALL_TIMEOUT_S = 20.0
BACK_TIMEOUT_S = 90.0
CHAT = [prompt for kind, prompt in PROMPTS if kind in ("chat", "prose")]
CODE = [prompt for kind, prompt in PROMPTS if kind == "code"]


@dataclass(frozen=True)
class Stream:
    """One seeded request that names its rank."""

    rank: str
    prompt: str
    seed: int
    temperature: float


@dataclass
class Served:
    """What became of a stream."""

    answer: Answer = field(default_factory=Answer)
    error: str = ""
    num_chunks: int = 0


def bench_ranks(arguments: argparse.Namespace) -> int:
    if arguments.ranks < 2:
        raise CommandError(
            f"--ranks {arguments.ranks}: use at least 2, or --engine-only", exit_code=2
        )
    config = load(arguments.config, _settings(arguments))
    with launched_cluster(config) as launched:
        cluster = _Cluster(config, launched.endpoint_url, launched.namespace)
        phases = _run(cluster, arguments)
    report = summary(phases, config.policy.name)
    if arguments.out:
        path = figure(phases, Path(arguments.out))
        report["figure"] = str(path) if path else None
        note(f"written: {path}" if path else "no plot: install the extra `plots` (matplotlib)")
    (note if arguments.json else say)(text(report))
    if arguments.json:
        emit_json(report)
    return 0 if report["holds"] else 1


def _settings(arguments: argparse.Namespace) -> list[str]:
    """Defaults of the bench, then what the user set, then what the bench needs."""
    return [
        "policy.name=joint",
        f"drafter.num_actors={arguments.ranks}",
        *arguments.set,
        f"target.num_ranks={arguments.ranks}",
        f"ingress.port={free_port()}",
        "ingress.allow_rank_hint=true",
        "model.numerics=reproducible",
    ]


def loads(ranks: Sequence[str], crowd: int, few: int, crowded: int) -> list[Stream]:
    """The crowd on the rank with number `crowded`, a few on each other one; the same streams wherever they run."""
    order = [ranks[(crowded + shift) % len(ranks)] for shift in range(len(ranks))]
    chats = [
        Stream(order[0], CHAT[at % len(CHAT)], seed=at, temperature=1.0) for at in range(crowd)
    ]
    codes = [
        Stream(rank, CODE[at % len(CODE)], seed=1000 + at + few * place, temperature=0.0)
        for place, rank in enumerate(order[1:])
        for at in range(few)
    ]
    return chats + codes


def _run(cluster: _Cluster, arguments: argparse.Namespace) -> list[Phase]:
    ranks = list(cluster.config.target.rank_names)
    phases: list[Phase] = []
    for name, crowded, kills in (("before", 0, False), ("switched", 1, False), ("drill", 0, True)):
        note(
            f"{name}: {arguments.crowd} chats on {ranks[crowded]}, {arguments.few} for code elsewhere"
        )
        streams = loads(ranks, arguments.crowd, arguments.few, crowded)
        kill_after = phases[0].num_chunks // 3 if kills else None
        phases.append(cluster.serve(name, streams, arguments.tokens or TOKENS, kill_after))
    return phases


class _Cluster:
    """A launched cluster: its endpoint, its allocator and the counters of its ranks."""

    def __init__(self, config: ClusterConfig, endpoint: str, namespace: str) -> None:
        import ray

        self.config = config
        self._ray: Any = ray
        self._namespace = namespace
        self._endpoint = endpoint
        self._supervisor: Any = ray.get_actor("supervisor", namespace=namespace)
        self._epoch = ""  # of the allocator; another incarnation counts from the beginning
        self._newest = -1

    def serve(
        self, name: str, streams: Sequence[Stream], num_tokens: int, kill_after: int | None
    ) -> Phase:
        """Run all streams at once; kill the allocator once `kill_after` pieces of text have come."""
        before = self._rank_times()
        self._new_records()  # what belongs to the phase before
        served = [Served() for _ in streams]
        threads = [
            threading.Thread(target=self._follow, args=(stream, into, num_tokens), daemon=True)
            for stream, into in zip(streams, served, strict=True)
        ]
        records: list[BudgetRecord] = []
        over = threading.Event()
        recorder = threading.Thread(target=self._record, args=(records, over), daemon=True)
        pid = int(self._member("allocator")["pid"])
        kill: Kill | None = None
        started = time.perf_counter()
        for thread in (*threads, recorder):
            thread.start()
        while any(thread.is_alive() for thread in threads):
            if kill_after and kill is None and sum(s.num_chunks for s in served) >= kill_after:
                os.kill(pid, signal.SIGKILL)
                running = sum(thread.is_alive() for thread in threads)
                kill = Kill(pid, sum(s.num_chunks for s in served), running, len(records))
                note(f"killed the allocator, process {pid}, while {running} streams ran")
            time.sleep(KILL_POLL_S)
        seconds = time.perf_counter() - started
        is_back = self._await_allocator(pid) if kill else False
        over.set()
        recorder.join()
        records += self._new_records()
        after = self._rank_times()
        return Phase(
            name=name,
            crowded=streams[0].rank,
            seconds=seconds,
            records=records,
            answers=[s.answer for s in served],
            errors=[s.error for s in served if s.error],
            num_chunks=sum(s.num_chunks for s in served),
            decision_share={
                rank: (after[rank][0] - before[rank][0])
                / max(after[rank][1] - before[rank][1], 1e-9)
                for rank in after
            },
            allocator=self._stats()["allocator"],
            kill=kill,
            is_back=is_back,
        )

    def _follow(self, stream: Stream, into: Served, num_tokens: int) -> None:
        def count(_: str) -> None:
            into.num_chunks += 1

        try:
            with EndpointClient(self._endpoint) as client:
                chunks = client.stream_chat(
                    self.config.model.name,
                    [{"role": "user", "content": stream.prompt}],
                    temperature=stream.temperature,
                    seed=stream.seed,
                    max_tokens=num_tokens,
                    ignore_eos=True,
                    dspark={"rank": stream.rank},
                )
                collect(chunks, count, into.answer)
        except CommandError as error:
            into.error = str(error)

    def _record(self, into: list[BudgetRecord], over: threading.Event) -> None:
        while not over.wait(POLL_S):
            into += self._new_records()

    # --- control calls ----------------------------------------------------------------------------------------------

    def _stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self._ray.get(
            self._supervisor.stats.remote(), timeout=CALL_TIMEOUT_S
        )
        return stats

    def _rank_times(self) -> dict[str, tuple[float, float]]:
        """(seconds of decisions, seconds of steps) of every rank since its start."""
        stats = self._stats()
        ranks = self.config.target.rank_names
        return {rank: (stats[rank]["decision_s"], stats[rank]["step_s"]) for rank in ranks}

    def _member(self, name: str) -> dict[str, Any]:
        status = self._ray.get(self._supervisor.status.remote(), timeout=CALL_TIMEOUT_S)
        found: dict[str, Any] = next(m for m in status["members"] if m["name"] == name)
        return found

    def _new_records(self) -> list[BudgetRecord]:
        """Budgets published since the last call; none while the allocator is away."""
        try:
            allocator = self._ray.get_actor("allocator", namespace=self._namespace)
            epoch, records = self._ray.get(allocator.budgets.remote(), timeout=CALL_TIMEOUT_S)
        except (self._ray.exceptions.RayError, ValueError):
            return []
        newest = self._newest if epoch == self._epoch else -1
        fresh = [record for record in records if record.number > newest]
        self._epoch, self._newest = epoch, fresh[-1].number if fresh else newest
        return fresh

    def _await_allocator(self, killed_pid: int) -> bool:
        """Whether another process has taken its place."""
        deadline = time.monotonic() + BACK_TIMEOUT_S
        while time.monotonic() < deadline:
            member = self._member("allocator")
            if member["state"] == "ready" and member["pid"] != killed_pid:
                return True
            time.sleep(POLL_S)
        return False
