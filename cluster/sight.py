"""What the supervisor sees of a member, as a rollout needs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actors.core.rollout import Sight
from cluster.routing import Member, RouteBook


def sight_of(member: Member, book: RouteBook, stats: Mapping[str, Any] | None) -> Sight:
    """`stats`: of a rank, as it gave them just now; None: it was not asked, or does not say."""
    last = member.last
    incarnation = f"{last.node_ip}/{last.pid}" if last else ""
    if last is not None and last.phase == "parked":
        return Sight(True, True, incarnation, last.revision)
    counts: dict[str, Any] = {"num_streams": None if member.role == "target" else 0}
    if stats is not None:
        num_streams = stats["num_running"] + stats["num_waiting"] + stats["num_reservations"]
        most = stats["max_running"] + stats["max_waiting"]
        takes = not book.is_drained(member.name)
        counts = {
            "num_streams": num_streams,
            "num_used_blocks": stats["num_blocks"] - stats["num_free_blocks"],
            "num_free_blocks": stats["num_free_blocks"] if takes else 0,
            "num_places": max(0, most - num_streams) if takes else 0,
        }
    return Sight(
        is_up=member.is_usable,
        is_told=last is not None and last.peers_version == book.version,
        incarnation=incarnation,
        revision=last.revision if last else 0,
        failure=member.last_failure,
        why="" if member.is_usable else member.reason or member.state,
        **counts,
    )
