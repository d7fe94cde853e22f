"""What the live page shows: an observation as one document, with what it means in words."""

from __future__ import annotations

from typing import Any

from actors.core.prefix_scheduler import UNLIMITED
from cluster.explanations import Explanation
from cluster.observation import Observation

FULL_KV = 0.95  # share of blocks in use from which a rank hardly takes anything new


def state(observation: Observation, model: str) -> dict[str, Any]:
    """What `/dashboard/state` answers."""
    fronts = observation.fronts
    stats = observation.stats
    return {
        "model": model,
        "at_s": observation.at_s if observation.members else None,
        "num_failed_looks": observation.num_failed_looks,
        "ranks": [
            _rank(member, stats.get(member["name"]), observation.stale_s.get(member["name"], 0.0))
            for member in observation.members
            if member["role"] == "target"
        ],
        "others": [
            _other(member, stats.get(member["name"]))
            for member in observation.members
            if member["role"] != "target"
        ],
        "streams": [stream for _, front in sorted(fronts.items()) for stream in front["streams"]],
        "num_streams": sum(front["num_streams"] for front in fronts.values()),
        "decisions": [
            decision
            for name, of_rank in observation.of_role("target")
            if of_rank["last_step"] is not None
            for decision in decisions(name, of_rank["last_step"])
        ],
    }


def _rank(member: dict[str, Any], stats: dict[str, Any] | None, stale_s: float) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "name": member["name"],
        "state": member["state"],
        "num_restarts": member["num_restarts"],
        "stale_s": stale_s,
    }
    if stats is None:
        return shown | {"load": "unknown", "why": member["reason"] or "it has not answered yet"}
    load, why = pressure(stats)
    if member["state"] != "ready":
        load, why = "unknown", f"{member['state']}: {member['reason']}".rstrip(": ")
    kept = ("num_running", "max_running", "num_waiting", "num_blocks", "num_free_blocks")
    counted = ("num_committed", "num_steps", "num_late", "num_unasked", "acceptance_length")
    return shown | {
        "load": load,
        "why": why,
        **{name: stats[name] for name in (*kept, *counted, "step_time_s", "is_idle")},
        "predicted_s": stats["clock"]["last_predicted_s"],
        "acceptance": stats["acceptance"],
        "calibration": stats["calibration"],
        "curve": stats["curve"],
        "step": _step(stats["last_step"]),
    }


def _step(step: dict[str, Any] | None) -> dict[str, Any] | None:
    if step is None:
        return None
    most = step["max_draft_tokens"]
    wanted = ("min_survival", "rule", "num_requests", "num_scheduled", "batch_tokens")
    return {
        **{name: step[name] for name in wanted},
        "max_draft_tokens": None if most >= UNLIMITED else most,
    }


def pressure(stats: dict[str, Any]) -> tuple[str, str]:
    """How full a rank is (idle, busy, saturated), and why one says so."""
    running, places, waiting = stats["num_running"], stats["max_running"], stats["num_waiting"]
    in_use = 1.0 - stats["num_free_blocks"] / stats["num_blocks"]
    if waiting:
        return "saturated", f"{_requests(waiting)} waiting: {running} of {places} places are taken"
    if in_use >= FULL_KV:
        return "saturated", f"{in_use:.0%} of its KV cache is in use"
    if running >= places:
        return "saturated", f"all {places} places are taken"
    if running:
        return "busy", f"{running} of {places} places are taken, nobody waits"
    return "idle", "nothing runs here"


def _requests(count: int) -> str:
    return f"{count} request{'s' if count > 1 else ''}"


def decisions(rank: str, step: dict[str, Any]) -> list[dict[str, Any]]:
    """The rounds of a step, each with why it was verified as far as it was."""
    return [
        {**each, "rank": rank, "step": step["step"], "why": why(each, step)}
        for each in step["rounds"]
    ]


def rounds_of(explanation: Explanation) -> list[dict[str, Any]]:
    """The rounds of an answer's first choice, each with why it was verified as far as it was."""
    return [
        {
            **each.model_dump(),
            "rank": segment.rank,
            "has_block": each.num_proposed > 0,
            "why": why(each.model_dump(), each.model_dump()),
        }
        for segment in explanation.choices[0].segments
        for each in segment.rounds
    ]


def why(each: dict[str, Any], step: dict[str, Any]) -> str:
    """Why this many draft tokens of a round were verified, in one sentence."""
    length, survivals = each["num_scheduled"], each["survivals"]
    gamma, price, most = len(survivals), step["min_survival"], step["max_draft_tokens"]
    nexts = f"token {length + 1} survives with {survivals[length]:.0%}" if length < gamma else ""
    sentences = {
        "none": f"The whole block of {gamma}.",
        "price": f"{nexts}, less than the price λ = {price:.0%}.",
        "cold": f"{nexts}, less than the {price:.0%} a rank asks that has seen no survivals yet.",
        "budget": f"{nexts}; the step's budget K = {most} went to likelier tokens.",
        "room": f"{nexts}; the step had no room for more tokens.",
        "length": "The answer may not grow further than that.",
        "blocks": "Its KV blocks had no room for more, and none were free.",
        "policy_length": f"The policy verifies at most {length} tokens of a request.",
        "undrafted": f"The drafter stopped after {length}: what follows was not worth drafting.",
        "unasked": "No block was asked for: at this load drafting does not pay.",
        "late": "Its block came too late.",
        "fallback": "There was no block for it.",
        "off": "Speculation is off for this request.",
    }
    sentence = sentences.get(each["cut_by"], f"Cut by {each['cut_by']}.")
    if each["explored"]:
        return (
            f"Verified beyond its budget, to see what becomes of such tokens: {length} of {gamma}."
        )
    return sentence[:1].upper() + sentence[1:]


def _other(member: dict[str, Any], stats: dict[str, Any] | None) -> dict[str, Any]:
    shown = {name: member[name] for name in ("name", "role", "state", "reason", "num_restarts")}
    wanted = ("num_blocks", "num_batches", "draft_time_s", "open_requests", "num_budgets")
    return shown | {name: stats[name] for name in wanted if stats and name in stats}
