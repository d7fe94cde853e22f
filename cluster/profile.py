"""`dspark profile`: what complete steps of a rank cost on this machine, kept for every later start.

The rank is measured alone, with the threads it would have when served. Ranks that share a machine slow each other
down: that is learned from served steps.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from actors.core.messages import Endpoint
from actors.core.own_profile import OwnProfile
from actors.core.sps import RankTimes
from actors.core.step_samples import StepSamples
from actors.engine.base import TargetSpec
from actors.link import Membership
from actors.peers import Seat
from cluster.commands.rank_profiles import rank_profiles
from cluster.console import CommandError, emit_json, note, say, table
from cluster.parts import ModelNotFoundError, fetch_model, target_engine
from cluster.placement import plan_placement, thread_environment
from cluster.profile_cache import keep_samples, profile_path, read_samples
from cluster.run_state import find
from configs.load import load
from configs.schema import ClusterConfig

HEADER = ["tokens", "requests", "context", "ms", "from", "to", "tokens/s"]
NOISY = 0.15  # spread of the repeats from which on the measurement is remarked upon


def profile(arguments: argparse.Namespace) -> int:
    if arguments.cluster:
        return rank_profiles(arguments)
    state = find(Path(arguments.state))
    if state is not None:
        raise CommandError(
            f"a cluster is running here at {state.endpoint} (process {state.pid}) and would spoil the measurement; "
            "end it with `dspark stop` first"
        )
    if arguments.repeats < 1:
        raise CommandError(f"--repeats {arguments.repeats}: use at least 1", exit_code=2)
    config = load(arguments.config, arguments.set)
    num_threads = plan_placement(config, os.cpu_count() or 1).targets[0].num_threads
    spec, samples, path, is_new = _samples(config, num_threads, arguments)
    own = OwnProfile(
        Endpoint("", "target", "", "", ""), spec.identity, samples.curve(), 0, times := RankTimes()
    )
    if own.problem:
        if not is_new:
            path.unlink(missing_ok=True)
        raise CommandError(f"nothing is kept: {own.problem}")
    if is_new and keep_samples(path, samples):
        note(f"kept: {path}")
    report = _report(config, spec, samples, num_threads, path)
    report["files"] = _draw(samples, times, report, arguments.out, path)
    if arguments.json:
        emit_json(report)
    else:
        say(_text(report))
    return 0


def _samples(
    config: ClusterConfig, num_threads: int, arguments: argparse.Namespace
) -> tuple[TargetSpec, StepSamples, Path, bool]:
    """The engine's facts, its samples, where they belong, and whether they were measured just now."""
    os.environ.update(thread_environment(num_threads))
    from actors.engine.step_profile import full_samples, num_measurements
    from actors.engine.target_engine import TorchTargetEngine
    from actors.engine.weights import CheckpointError

    seat = Seat("target-0", Membership.create(), num_threads=num_threads)
    try:
        fetch_model(config)
        engine = target_engine(config, seat)
    except (ModelNotFoundError, CheckpointError) as error:
        raise CommandError(str(error)) from error
    assert isinstance(engine, TorchTargetEngine)
    path = profile_path(engine.spec, config)
    kept = None if arguments.refresh else read_samples(path)
    # What a rank measures when it starts knows one context only.
    if kept is not None and kept.has_contexts:
        note(f"known from {path}; --refresh measures again")
        return engine.spec, kept, path, False
    total = num_measurements(config, arguments.repeats)
    # Redrawn in place on a terminal; in a log every redraw is a line.
    every_s = 0.2 if sys.stderr.isatty() else 15.0
    with tqdm(total=total, unit="step", leave=False, mininterval=every_s) as bar:

        def advance() -> None:
            bar.update()

        samples = full_samples(engine, config, arguments.repeats, advance)
    return engine.spec, samples, path, True


def _report(
    config: ClusterConfig, spec: TargetSpec, samples: StepSamples, num_threads: int, path: Path
) -> dict[str, Any]:
    points = [
        {
            "batch_tokens": int(samples.batch_tokens[i]),
            "num_requests": int(samples.num_requests[i]),
            "context_len": int(samples.context_len[i]),
            "median_s": float(samples.median_s[i]),
            "times_s": samples.times_s[i].tolist(),
        }
        for i in range(len(samples.batch_tokens))
    ]
    return {
        "model": spec.name,
        "identity": spec.identity,
        "dtype": spec.dtype,
        "device": spec.device,
        "numerics": spec.numerics,
        "num_threads": num_threads,
        "num_ranks": config.target.num_ranks,
        "curve_context_len": samples.curve_context_len,
        "context_cost_s": samples.context_cost_s(),
        "spread": samples.spread,
        "points": sorted(
            points, key=lambda p: (p["context_len"], p["batch_tokens"], p["num_requests"])
        ),
        "path": str(path),
    }


def _draw(
    samples: StepSamples, times: RankTimes, report: dict[str, Any], out: str | None, path: Path
) -> list[str]:
    try:
        from cluster import profile_figure  # matplotlib: an optional dependency
    except ImportError:
        note("no plot: install the extra `plots` (matplotlib)")
        return []
    assert times.curve is not None
    file = (Path(out) / f"profile-{report['identity']}.png") if out else path.with_suffix(".png")
    file.parent.mkdir(parents=True, exist_ok=True)
    title = (
        f"{report['model']}, {report['dtype']}, {report['device']}, {report['num_threads']} threads"
    )
    profile_figure.draw(samples, times.curve, title, file)
    note(f"written: {file}")
    return [str(file)]


def _text(report: dict[str, Any]) -> str:
    rows = []
    for point in report["points"]:
        low, high, median = min(point["times_s"]), max(point["times_s"]), point["median_s"]
        rows.append(
            [str(point[name]) for name in ("batch_tokens", "num_requests", "context_len")]
            + [f"{seconds * 1e3:.2f}" for seconds in (median, low, high)]
            + [f"{point['batch_tokens'] / median:.0f}"]
        )
    lines = [
        f"{report['model']} ({report['dtype']}, {report['device']}, {report['numerics']}), "
        f"{report['num_threads']} threads, identity {report['identity']}",
        table(HEADER, rows),
        f"repeats spread by ±{report['spread']:.1%} around their medians; "
        f"a thousand tokens of context cost {report['context_cost_s'] * 1e6:.3f} ms a step",
    ]
    if report["spread"] > NOISY:
        lines.append("that is noisy: is something else running? --refresh measures again")
    if report["num_ranks"] > 1:
        lines.append(
            f"measured alone; {report['num_ranks']} ranks on one machine slow each other down, which is learned "
            "while serving"
        )
    return "\n".join(lines)
