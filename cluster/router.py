"""Which rank a new stream goes to: the supervisor's table says who may, the allocator's view says who should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from actors.core.messages import LoadView, RankLoad, RankRoute, RoutingTable
from cluster.prefix_affinity import PrefixAffinity

# An older view, or a rank that has not reported for so long, says nothing about now.
MAX_VIEW_AGE_S = 10.0
# A rank that may know a prompt's beginning is preferred while a token there takes at most so many times as long ...
AFFINITY_MOST_SLOWER = 1.25
# ... and while it has at most one request more than the best rank, and one more for so many known tokens, up to four.
AFFINITY_TOKENS_A_REQUEST = 256
AFFINITY_MOST_REQUESTS = 4


class Router:
    """Orders the ready ranks by predicted time per token; evenly while no load is known. Knows no clock.

    The rank that served a prompt's beginning last comes first unless it is clearly busier than the best one: prompts
    that begin alike must not make one rank of a group hot.

    What this ingress itself has on a rank, or is just asking it to take, counts at once, before any view shows it: a
    burst would pile up on one rank otherwise.
    """

    def __init__(self) -> None:
        self.table = RoutingTable(version=-1)
        self._loads: dict[str, RankLoad] = {}
        self._view_version = -1
        self._view_at_s = float("-inf")
        self._own: Counter[str] = Counter()  # streams of this ingress by rank, asked for or running
        self._begun: Counter[str] = Counter()  # those of them that began after the view
        self._turn = 0
        self._affinity = PrefixAffinity()

    def update_table(self, table: RoutingTable) -> bool:
        """Take a newer table; False for an older or equal one."""
        if table.version <= self.table.version:
            return False
        if table.allocator != self.table.allocator:
            self._view_version = -1  # a new incarnation counts its views from the beginning
        self.table = table
        return True

    def update_load(self, view: LoadView, now_s: float) -> bool:
        """Take a newer view; False for an older or equal one."""
        if view.version <= self._view_version:
            return False
        self._view_version = view.version
        self._view_at_s = now_s
        self._loads = {load.rank: load for load in view.ranks}
        self._begun.clear()
        return True

    def begin(self, rank: str) -> None:
        """A stream asks that rank for room; balanced by `end`."""
        self._own[rank] += 1
        self._begun[rank] += 1

    def end(self, rank: str) -> None:
        """It was refused, or it has left the rank."""
        self._own[rank] -= 1

    def placed(self, rank: str, prompt_ids: Sequence[int]) -> None:
        """A stream with this prompt has got room on that rank."""
        self._affinity.note(prompt_ids, rank)

    def route(self, rank: str) -> RankRoute | None:
        return next((r for r in self.table.ranks if r.endpoint.name == rank), None)

    def candidates(
        self, now_s: float, wanted: str | None = None, prompt_ids: Sequence[int] = ()
    ) -> list[RankRoute]:
        """Ready ranks, best first; before all others the `wanted` one."""
        best = self._by_load(now_s)
        if wanted is None and best:
            wanted = self._affine(best, now_s, prompt_ids)
        return sorted(best, key=lambda route: route.endpoint.name != wanted) if wanted else best

    def _by_load(self, now_s: float) -> list[RankRoute]:
        ready = [route for route in self.table.ranks if route.state == "ready"]
        if not ready:
            return []
        self._turn += 1
        turn = self._turn % len(ready)
        rotated = ready[turn:] + ready[:turn]  # ties, and ranks without a known load, take turns
        known = self._known_s(now_s)
        if not known:
            return sorted(rotated, key=lambda r: self._own[r.endpoint.name])
        return sorted(rotated, key=lambda r: self._predicted_s(r.endpoint.name, known))

    def _affine(self, best: list[RankRoute], now_s: float, prompt_ids: Sequence[int]) -> str | None:
        """The rank to prefer for what it may know of the prompt; `best` are the ready ones, best first."""
        found = self._affinity.find(prompt_ids)
        if found is None or found[0] not in {route.endpoint.name for route in best}:
            return None
        rank, num_known = found
        fastest = best[0].endpoint.name
        more = min(1 + num_known // AFFINITY_TOKENS_A_REQUEST, AFFINITY_MOST_REQUESTS)
        if self._num_requests(rank) > self._num_requests(fastest) + more:
            return None
        known = self._known_s(now_s)
        if not known:
            return rank
        most_s = AFFINITY_MOST_SLOWER * self._predicted_s(fastest, known)
        return rank if self._predicted_s(rank, known) <= most_s else None

    def describe(self) -> list[dict[str, Any]]:
        """Every rank with its state, what is wrong with it, and its last known load, for /health."""
        described: list[dict[str, Any]] = []
        for route in self.table.ranks:
            rank: dict[str, Any] = {**summary(route)}
            rank |= {"warning": route.warning} if route.warning else {}
            rank["integrity_problems"] = list(route.integrity_problems)
            load = self._loads.get(route.endpoint.name)
            if load is not None:
                rank |= {
                    "num_running": load.num_running,
                    "num_waiting": load.num_waiting,
                    "num_free_blocks": load.num_free_blocks,
                    "num_blocks": load.num_blocks,
                }
            described.append(rank)
        return described

    def why_unready(self) -> str:
        """One sentence for /health when nobody is ready."""
        if not self.table.ranks:
            return "no target rank is known yet"
        states = [
            f"{route.endpoint.name} is {route.state}"
            + (f" ({route.reason})" if route.reason else "")
            for route in self.table.ranks
        ]
        return "no target rank is ready: " + ", ".join(states)

    def _fresh_loads(self, now_s: float) -> dict[str, RankLoad]:
        view_age_s = now_s - self._view_at_s
        if view_age_s > MAX_VIEW_AGE_S:
            return {}
        # An idle rank reports that once and then nothing: its silence is no news.
        return {
            r: load
            for r, load in self._loads.items()
            if load.num_running + load.num_waiting == 0 or load.age_s + view_age_s <= MAX_VIEW_AGE_S
        }

    def _known_s(self, now_s: float) -> dict[str, float]:
        """Predicted time per token of the ranks whose load is known."""
        return {rank: load.predicted_tpot_s for rank, load in self._fresh_loads(now_s).items()}

    def _num_seen(self, rank: str) -> int:
        load = self._loads.get(rank)
        return load.num_running + load.num_waiting if load is not None else 0

    def _num_unseen(self, rank: str) -> int:
        # The view may be too old to show what we have begun, or still show what we had before.
        return max(self._own[rank] - self._num_seen(rank), self._begun[rank])

    def _num_requests(self, rank: str) -> int:
        return self._num_seen(rank) + self._num_unseen(rank)

    def _predicted_s(self, rank: str, known: dict[str, float]) -> float:
        num_seen, num_unseen = self._num_seen(rank), self._num_unseen(rank)
        # A rank that has not reported is taken to be as fast as the others are on average.
        tpot_s = known.get(rank, sum(known.values()) / len(known))
        return tpot_s * (1 + num_unseen / (1 + num_seen))


def summary(route: RankRoute) -> dict[str, Any]:
    """A member for /health."""
    found: dict[str, Any] = {
        "name": route.endpoint.name,
        "state": route.state,
        "revision": route.revision,
    }
    return {**found, "reason": route.reason} if route.reason else found
