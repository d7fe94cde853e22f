"""`dspark bench --overhead`: what HTTP, Serve and the actors cost against the bare engine, and who takes it.

The engine alone decodes a batch in this process, while the cluster is idle; then the cluster serves as many streams of
the same length without speculation. Both are done in turns. Of the served time a token takes,

    interval between two tokens = engine alone + what a step takes longer beside the others + time between steps

the first is measured alone, the second by the rank's own clock, and the third is the rest. Who was at work in the
meantime is said by the CPU time of every process.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families
from tqdm import tqdm

from cluster.client import Chunk, EndpointClient
from cluster.console import CommandError, emit_json, note, say, table
from cluster.frontier import machine
from cluster.frontier.command import Running, opened
from cluster.frontier.drive import Server
from cluster.frontier.rates import StreamSample, WindowError, rates_of, steady_window
from cluster.frontier.workload import Request, requests_of
from configs.load import load
from configs.schema import ClusterConfig

TOKENS, REPEATS = 96, 3
SAMPLE_INTERVAL_S = 0.5
COUNTERS = ("dspark:steps_total", "dspark:step_seconds_total")
# The beginning of a process's title, and what it is called in the report; the first that fits.
ROLES = (
    ("ray::Target", "rank"),
    ("ray::Drafter", "drafter"),
    ("ray::Allocator", "allocator"),
    ("ray::Supervisor", "supervisor"),
    ("ray::ServeReplica", "ingress"),
    ("ray::Ingress", "ingress"),
    ("ray::", "Serve's controller and proxies"),
)


@dataclass(frozen=True)
class Turn:
    """One measurement of both.

    Attributes:
        bare_ms: median step of the engine alone.
        interval_ms: between two tokens of a stream, in the time when all streams were busy.
        step_ms: of the rank's engine in that time, by its own clock.
        tokens_per_s: of all streams.
        cores: CPU time a second, by role.
    """

    bare_ms: float
    interval_ms: float
    step_ms: float
    tokens_per_s: float
    cores: dict[str, float]


def bench_overhead(arguments: argparse.Namespace) -> int:
    """Measure, and print a table or the JSON object. Raises CommandError: something else runs, or a stream failed."""
    streams, tokens = arguments.streams, arguments.tokens or TOKENS
    config = _config(load(arguments.config, arguments.set), streams)
    repeats = arguments.repeats or REPEATS
    cores = machine.facts()["cores"]
    warning = machine.refuse_other_load(machine.watch(cores), cores, force=arguments.force)
    if warning:
        note(f"WARNING: {warning}")
    with opened(config) as cluster:
        turns = list(_turns(config, cluster, streams, tokens, repeats))
    report = {
        "streams": streams,
        "tokens": tokens,
        "machine": machine.facts(),
        "model": {"name": config.model.name, "numerics": config.model.numerics},
        "warnings": [warning] if warning else [],
        **report_of(turns, streams),
    }
    if arguments.json:
        emit_json(report)
    else:
        say(text_of(report))
    return 0


def _config(config: ClusterConfig, streams: int) -> ClusterConfig:
    """One rank without speculation that has room for all streams at once."""
    if config.target.num_ranks > 1:
        raise CommandError("--overhead: target.num_ranks: measure one rank", exit_code=2)
    policy = config.policy.model_copy(update={"name": "none"})
    room = max(config.target.max_running, streams)
    target = config.target.model_copy(update={"max_running": room})
    return ClusterConfig.model_validate(
        config.model_copy(update={"policy": policy, "target": target}).model_dump()
    )


# --- measuring --------------------------------------------------------------------------------------------------------


def _turns(
    config: ClusterConfig, cluster: Running, streams: int, tokens: int, repeats: int
) -> Iterator[Turn]:
    import torch

    from actors.engine.bench import decode_step_s
    from actors.engine.target_engine import load_engine

    if config.target.num_threads:
        torch.set_num_threads(config.target.num_threads)
    engine = load_engine(config)
    server = _Endless(cluster.endpoint_url, config.model.name)
    asked = [
        Request(one.kind, one.prompt, tokens, one.seed) for one in requests_of(streams, tokens)
    ]
    short = [Request(one.kind, one.prompt, 8, one.seed) for one in asked]
    server.serve(short, streams, 0.0)  # the first requests of a process meet cold caches
    for _ in tqdm(range(repeats), desc="overhead", unit="turn"):
        # The streams' contexts in the middle of their way: the prompt with its template, and half of the answer.
        bare_s = decode_step_s(engine, streams, context=64 + tokens // 2)
        with Sampler(cluster.endpoint_url) as sampler:
            samples = server.serve(asked, streams, 0.0)
        yield turn_of(samples, streams, bare_s, sampler)


class _Endless(Server):
    """Streams that end at their length only, so that all are busy for long."""

    def stream(
        self, client: EndpointClient, request: Request, temperature: float
    ) -> Iterator[Chunk]:
        messages = [{"role": "user", "content": request.prompt}]
        return client.stream_chat(
            str(self._model),
            messages,
            temperature=temperature,
            max_tokens=request.max_tokens,
            ignore_eos=True,
        )


@dataclass
class Sampler:
    """Reads CPU times and the rank's counters twice a second, beside what it measures."""

    url: str
    times: list[float] = field(default_factory=list)
    cpu: list[dict[str, float]] = field(default_factory=list)
    counters: list[dict[str, float]] = field(default_factory=list)

    def __enter__(self) -> Sampler:
        self._started, self._ends = time.perf_counter(), threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _sample(self) -> None:
        url = self.url.removesuffix("/v1") + "/metrics"
        with httpx.Client(trust_env=False, timeout=30) as client:
            while not self._ends.wait(SAMPLE_INTERVAL_S):
                counters = _counters(client.get(url).text)
                self.cpu.append(_cpu_s())
                self.counters.append(counters)
                self.times.append(time.perf_counter() - self._started)

    def rate(
        self, series: Sequence[dict[str, float]], name: str, begin: float, end: float
    ) -> float:
        """Growth a second between two times, by lines between the samples."""
        values = [sample.get(name, 0.0) for sample in series]
        at = np.interp([begin, end], self.times, values)
        return float(at[1] - at[0]) / (end - begin)


def _cpu_s() -> dict[str, float]:
    """Seconds of CPU so far, by role, of this process and all below it."""
    spent: dict[str, float] = defaultdict(float)
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        try:
            name = "client" if process == me else role_of(process.name(), process.cmdline())
            times = process.cpu_times()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        spent[name] += times.user + times.system
    return dict(spent)


def role_of(name: str, command: Sequence[str]) -> str:
    """What a process of the cluster is called in the report."""
    title = command[0] if command else name
    for beginning, role in ROLES:
        if title.startswith(beginning):
            return role
    return "HAProxy" if "haproxy" in name else "Ray"


def _counters(page: str) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in COUNTERS:
                found[sample.name] += sample.value
    return dict(found)


# --- what it says -----------------------------------------------------------------------------------------------------


def turn_of(samples: Sequence[StreamSample], streams: int, bare_s: float, sampler: Sampler) -> Turn:
    """One turn from its streams.

    Raises:
        CommandError: a stream failed, or they were never busy all at once.
    """
    try:
        rates = rates_of(samples, streams, 1)
        begin, end = steady_window(samples, streams)
    except WindowError as error:
        raise CommandError(str(error)) from error
    if rates["num_errors"]:
        raise CommandError(f"{rates['num_errors']} streams failed: {rates['error']}")
    steps_per_s, busy = (sampler.rate(sampler.counters, name, begin, end) for name in COUNTERS)
    roles = sorted({role for sample in sampler.cpu for role in sample})
    return Turn(
        bare_ms=1e3 * bare_s,
        interval_ms=1e3 * streams / rates["node_tokens_per_s"],
        step_ms=1e3 * busy / steps_per_s,
        tokens_per_s=rates["node_tokens_per_s"],
        cores={role: sampler.rate(sampler.cpu, role, begin, end) for role in roles},
    )


def report_of(turns: Sequence[Turn], streams: int) -> dict[str, Any]:
    """Medians over the turns; `overhead` is formed within each turn: 1 − served over bare tokens/s."""
    overheads = [1 - turn.bare_ms / turn.interval_ms for turn in turns]

    def middle(values: Iterator[float]) -> float:
        return round(statistics.median(values), 3)

    return {
        "bare_tokens_per_s": middle(1e3 * streams / turn.bare_ms for turn in turns),
        "served_tokens_per_s": middle(turn.tokens_per_s for turn in turns),
        "overhead": middle(iter(overheads)),
        "overhead_range": [round(min(overheads), 3), round(max(overheads), 3)],
        "interval_ms": middle(turn.interval_ms for turn in turns),
        "parts_ms": {
            "engine alone": middle(turn.bare_ms for turn in turns),
            "engine slower beside the others": middle(t.step_ms - t.bare_ms for t in turns),
            "between steps": middle(turn.interval_ms - turn.step_ms for turn in turns),
        },
        "cores": {
            role: middle(turn.cores.get(role, 0.0) for turn in turns)
            for role in sorted({role for turn in turns for role in turn.cores})
        },
    }


def text_of(report: dict[str, Any]) -> str:
    """The tables of a report."""
    low, high = report["overhead_range"]
    whole = report["interval_ms"]
    parts = [[n, f"{ms:.1f}", f"{ms / whole:.1%}"] for n, ms in report["parts_ms"].items()]
    cores = sorted(report["cores"].items(), key=lambda item: -item[1])
    return "\n\n".join(
        [
            f"{report['streams']} streams: {report['served_tokens_per_s']:.1f} tokens/s served, "
            f"{report['bare_tokens_per_s']:.1f} by the engine alone: "
            f"overhead {report['overhead']:.1%} ({low:.1%} to {high:.1%})",
            table(["of the time between two tokens", "ms", "share"], parts),
            table(["process", "cores"], [[role, f"{used:.2f}"] for role, used in cores]),
        ]
    )
