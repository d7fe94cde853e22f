"""What a server says of itself in the course of a long run: read from its metrics, kept line by line, drawn.

Everything that should stay flat is on one page: memory of every process, tokens a second, cache blocks in use, open
streams; restarts are marked.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from load_tests.endpoint import root_of

INTERVAL_S = 5.0
MEGABYTE = 1 << 20


@dataclass
class Sample:
    """At one time. Names are those of the server's processes."""

    at_s: float
    memory_mb: dict[str, float] = field(default_factory=dict)
    used_blocks: dict[str, float] = field(default_factory=dict)
    committed_tokens: dict[str, float] = field(default_factory=dict)  # since the process started
    restarts: dict[str, float] = field(default_factory=dict)
    open_streams: float = 0.0
    idle_problems: float = 0.0


class Record:
    """Reads `/metrics` again and again until it is stopped.

    Args:
        client: whose base address is the server's `/v1`.
        out: folder that gets a line for each sample, at once.
    """

    def __init__(self, client: httpx.AsyncClient, out: Path) -> None:
        self._client = client
        self._url = root_of(str(client.base_url)) + "/metrics"
        self._file = out / "samples.jsonl"
        self._started = time.monotonic()
        self.samples: list[Sample] = []
        self.num_missed = 0  # the server did not answer

    async def run(self) -> None:
        self._file.write_text("", encoding="utf-8")
        while True:
            try:
                page = (await self._client.get(self._url)).raise_for_status().text
                sample = sample_of(page, time.monotonic() - self._started)
            except (
                httpx.HTTPError,
                ValueError,
                KeyError,
            ):  # it is down, or says what we cannot read
                self.num_missed += 1
            else:
                self.samples.append(sample)
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(sample)) + "\n")
            await asyncio.sleep(INTERVAL_S)


def sample_of(page: str, at_s: float) -> Sample:
    """One sample from a page of metrics."""
    sample = Sample(at_s)
    blocks: dict[str, float] = {}
    free: dict[str, float] = {}
    by_member = {
        "dspark:recoveries_total": ("member", sample.restarts),
        "dspark:committed_tokens_total": ("rank", sample.committed_tokens),
        "dspark:kv_blocks": ("rank", blocks),
        "dspark:kv_free_blocks": ("rank", free),
    }
    for family in text_string_to_metric_families(page):
        for each in family.samples:
            if each.name == "dspark:member_memory_bytes":
                sample.memory_mb[each.labels["member"]] = each.value / MEGABYTE
            elif each.name == "vllm:num_requests_running":
                sample.open_streams += each.value
            elif each.name == "dspark:idle_problems_total":
                sample.idle_problems += each.value
            elif each.name in by_member:
                label, values = by_member[each.name]
                values[each.labels[label]] = each.value
    sample.used_blocks = {name: count - free[name] for name, count in blocks.items()}
    return sample


def tokens_per_s(samples: Sequence[Sample]) -> list[float]:
    """Between each sample and the one before; a process that has started again counts from 0."""
    rates = []
    for before, after in itertools.pairwise(samples):
        grown = 0.0
        for rank, count in after.committed_tokens.items():
            earlier = before.committed_tokens.get(rank, 0.0)
            grown += count - earlier if count >= earlier else count
        rates.append(grown / (after.at_s - before.at_s))
    return rates


def growth_mb(samples: Sequence[Sample]) -> dict[str, float]:
    """By process that was never restarted: memory at the end over that of the middle, means of a tenth each.

    The first half is left out: caches, allocators and arenas fill in the beginning.
    """
    length = max(1, len(samples) // 10)
    middle, end = samples[len(samples) // 2 :][:length], samples[-length:]
    restarted = {n for n, count in samples[-1].restarts.items() if count} if samples else set()

    def mean(part: Sequence[Sample], name: str) -> float:
        return sum(sample.memory_mb[name] for sample in part) / len(part)

    names = [n for n in (samples[-1].memory_mb if samples else ()) if n not in restarted]
    everywhere = [n for n in names if all(n in s.memory_mb for s in (*middle, *end))]
    return {name: round(mean(end, name) - mean(middle, name), 1) for name in everywhere}


def draw(samples: Sequence[Sample], path: Path) -> None:
    """All of it over time, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    minutes = [sample.at_s / 60 for sample in samples]
    figure, axes = plt.subplots(4, 1, figsize=(9, 10), sharex=True, constrained_layout=True)
    _plot_each(axes[0], minutes, [sample.memory_mb for sample in samples])
    axes[0].set_ylabel("resident memory, MB")
    axes[1].plot(minutes[1:], tokens_per_s(samples))
    axes[1].set_ylabel("tokens/s")
    _plot_each(axes[2], minutes, [sample.used_blocks for sample in samples])
    axes[2].set_ylabel("KV blocks held")
    axes[3].plot(minutes, [sample.open_streams for sample in samples], label="open streams")
    axes[3].plot(minutes, [sample.idle_problems for sample in samples], label="integrity problems")
    axes[3].legend(fontsize=8)
    axes[3].set_xlabel("minutes")
    for axis in axes:
        axis.set_ylim(bottom=0)
        for minute in _restart_minutes(samples):
            axis.axvline(minute, color="grey", alpha=0.3, linewidth=1)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _plot_each(axis: Any, minutes: Sequence[float], values: Sequence[dict[str, float]]) -> None:
    """A line for each process; it is interrupted where the process said nothing."""
    names = sorted({name for each in values for name in each})
    for name in names:
        axis.plot(minutes, [each.get(name, float("nan")) for each in values], label=name)
    if names:
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)


def _restart_minutes(samples: Sequence[Sample]) -> list[float]:
    counts = [sum(sample.restarts.values()) for sample in samples]
    return [samples[i].at_s / 60 for i in range(1, len(samples)) if counts[i] > counts[i - 1]]


def summary(record: Record) -> dict[str, Any]:
    """What the report says of it."""
    samples = record.samples
    last = samples[-1] if samples else Sample(0.0)
    return {
        "samples": len(samples),
        "missed_samples": record.num_missed,
        "restarts": int(sum(last.restarts.values())),
        "memory_growth_mb": growth_mb(samples),
        "integrity_problems": int(last.idle_problems),
    }
