"""`dspark profile --cluster`: what steps cost on every machine of a cluster, as its ranks have measured it."""

from __future__ import annotations

import argparse
from typing import Any

from cluster.commands.remote import joined, there_or_here
from cluster.console import CommandError, emit_json, say, table

ASK_TIMEOUT_S = 30.0
SHOWN_BATCHES = 5  # columns of the table; all points are in the JSON object


def rank_profiles(arguments: argparse.Namespace) -> int:
    report = there_or_here(arguments, "profile", _here)
    if arguments.json:
        emit_json(report)
    else:
        say(_text(report["ranks"]))
    return 0


def _here(address: str) -> dict[str, Any]:
    import ray

    with joined(address) as found:
        if found is None:
            raise CommandError(f"{address}: nothing is deployed there")
        nodes = {member["name"]: member["node_ip"] for member in found.ask("status")["members"]}
        actors = {n: a for n, a in found.members.actors.items() if n.startswith("target")}
        asked = [actor.profile.remote() for actor in actors.values()]
        profiles = ray.get(asked, timeout=ASK_TIMEOUT_S)
    ranks = [
        _rank(name, nodes.get(name, ""), profile)
        for name, profile in zip(actors, profiles, strict=True)
        if profile is not None
    ]
    return {"ranks": sorted(ranks, key=lambda rank: rank["name"])}


def _rank(name: str, node_ip: str, profile: Any) -> dict[str, Any]:
    """A `RankProfile` as it is written; times in seconds. `own_time_s` is that of a rank in a group, else null."""
    shared_s = profile.shared_time_s
    own = None if shared_s is None else (profile.step_time_s - shared_s).tolist()
    return {
        "name": name,
        "node_ip": node_ip,
        "identity": profile.identity,
        "batch_tokens": profile.batch_tokens.tolist(),
        "num_requests": profile.num_requests.tolist(),
        "step_time_s": profile.step_time_s.tolist(),
        "draft_time_s": profile.draft_time_s.tolist(),
        "own_time_s": own,
    }


def _text(ranks: list[dict[str, Any]]) -> str:
    if not ranks:
        return "no rank has a profile yet; see `dspark status --cluster`"
    sizes = ranks[0]["batch_tokens"]
    step = max(1, len(sizes) // SHOWN_BATCHES)
    shown = sizes[::step]
    rows = [
        [rank["name"], rank["node_ip"], rank["identity"]]
        + [_milliseconds(rank, size) for size in shown]
        for rank in ranks
    ]
    header = ["rank", "machine", "identity", *(f"{size} tokens" for size in shown)]
    note = "(milliseconds of a step"
    if any(rank["own_time_s"] for rank in ranks):
        note += " of the whole group, loaded alike; in brackets what the rank itself computed for its tokens"
    return table(header, rows) + f"\n{note})"


def _milliseconds(rank: dict[str, Any], size: int) -> str:
    if size not in rank["batch_tokens"]:
        return "-"
    at = rank["batch_tokens"].index(size)
    whole = f"{rank['step_time_s'][at] * 1e3:.2f}"
    return f"{whole} ({rank['own_time_s'][at] * 1e3:.2f})" if rank["own_time_s"] else whole
