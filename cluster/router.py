"""Which rank a new stream goes to: the supervisor's table says who may, the allocator's view says who should."""

from __future__ import annotations

from actors.core.messages import LoadView, RankLoad, RankRoute, RoutingTable

# An older view, or a rank that has not reported for so long, says nothing about now.
MAX_VIEW_AGE_S = 10.0


class Router:
    """Orders the ready ranks by predicted time per token; round-robin while no load is known. Knows no clock.

    Between two views the router counts what it has sent itself, so that a burst does not pile up on one rank.
    """

    def __init__(self) -> None:
        self.table = RoutingTable(version=-1)
        self._loads: dict[str, RankLoad] = {}
        self._view_version = -1
        self._view_at_s = float("-inf")
        self._sent_since_view: dict[str, int] = {}
        self._turn = 0

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
        self._sent_since_view = {}
        return True

    def note_sent(self, rank: str) -> None:
        """A stream was placed there."""
        self._sent_since_view[rank] = self._sent_since_view.get(rank, 0) + 1

    def route(self, rank: str) -> RankRoute | None:
        return next((r for r in self.table.ranks if r.endpoint.name == rank), None)

    def candidates(self, now_s: float) -> list[RankRoute]:
        """Ready ranks, best first."""
        ready = [route for route in self.table.ranks if route.state == "ready"]
        if not ready:
            return []
        self._turn += 1
        turn = self._turn % len(ready)
        rotated = ready[turn:] + ready[:turn]  # ties, and ranks without a known load, take turns
        known = {rank: load.predicted_tpot_s for rank, load in self._fresh_loads(now_s).items()}
        if not known:
            return sorted(rotated, key=lambda r: self._sent_since_view.get(r.endpoint.name, 0))
        return sorted(rotated, key=lambda r: self._predicted_s(r.endpoint.name, known))

    def describe(self) -> list[dict[str, str | int | float]]:
        """Every rank with its state and last known load, for /health."""
        described: list[dict[str, str | int | float]] = []
        for route in self.table.ranks:
            rank: dict[str, str | int | float] = {"name": route.endpoint.name, "state": route.state}
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
        return {
            r: load for r, load in self._loads.items() if load.age_s + view_age_s <= MAX_VIEW_AGE_S
        }

    def _predicted_s(self, rank: str, known: dict[str, float]) -> float:
        load = self._loads.get(rank)
        num_there = load.num_running + load.num_waiting if load is not None else 0
        # A rank that has not reported is taken to be as fast as the others are on average.
        tpot_s = known.get(rank, sum(known.values()) / len(known))
        return tpot_s * (1 + self._sent_since_view.get(rank, 0) / (1 + num_there))
