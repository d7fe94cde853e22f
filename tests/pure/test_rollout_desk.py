"""The supervisor's hands without Ray: members that stop, start again with what they are assigned, and move streams."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from actors.core.autoscale import StartPauses
from actors.core.rank_report import rank_stats
from actors.core.rollout_plan import Bounds, NobodyLeftError
from actors.link import Membership
from actors.peers import Peers
from cluster import supervisor as supervising
from cluster.rollout import RolloutError, Wish
from cluster.supervisor import Supervisor
from configs.change import FixedSettingError
from configs.schema import ClusterConfig
from tests.pure.rank_harness import make_rank
from tests.pure.test_routing import MEMBERS, describe

BOUNDS = Bounds(drain_s=0.05, room_s=0.2, start_s=2.0)


class Simulated(Supervisor):
    """Its members live in this process. `broken`: settings with which a rank does not start."""

    def __init__(self, config: ClusterConfig, **kwargs: Any) -> None:
        super().__init__(MEMBERS, Membership.create(), "127.0.0.1", "dspark", config, **kwargs)
        self.life = 1
        self.pids = dict.fromkeys((name for name, _ in MEMBERS), 1)
        self.phases = dict.fromkeys(self.pids, "ready")
        self.started = dict.fromkeys(self.pids, 1)
        self.peers = dict.fromkeys(self.pids, Peers(0))
        self.streams = {"target-0": 0, "target-1": 0}
        self.broken: ClusterConfig | None = None
        self.tpot_s = 0.01
        self.ends: list[str] = []

    async def _ask(self, name: str, method: str, timeout_s: float, *arguments: Any) -> Any:
        return getattr(self, f"_{method}_of")(name, *arguments)

    def _connect_of(self, name: str, peers: Peers) -> None:
        self.peers[name] = peers
        if self.phases[name] in ("ready", "draining"):
            self.phases[name] = "draining" if peers.is_drained else "ready"

    def _describe_of(self, name: str) -> Any:
        said = describe(name, self.phases[name], epoch=f"e{self.pids[name]}", pid=self.pids[name])
        if self.phases[name] == "failed":
            said = replace(said, detail="MemoryError: no room")
        told = self.peers[name]
        return replace(
            said,
            peers_version=told.version,
            revision=self.started[name],
            assignment=told.assignment,
        )

    def _stats_of(self, name: str) -> dict[str, Any]:
        return {**rank_stats(make_rank()), "num_running": self.streams[name]}

    def _move_streams_of(self, name: str) -> int:
        moved, self.streams[name] = self.streams[name], 0
        return moved

    def _stop_of(self, name: str) -> None:
        self.phases[name] = "stopped"

    def _foretell_of(self, _name: str, units: list[tuple[str, ...]]) -> list[Any]:
        return [(self.streams[unit[0]], self.tpot_s, 2 * self.tpot_s) for unit in units]

    def _end(self, name: str) -> None:
        """Ray starts the actor again, and it asks what it shall run."""
        self.ends.append(name)
        self.life += 1
        self.pids[name], self.peers[name] = self.life, Peers(0)
        revision = self._book.assignment.of(name)
        self.started[name] = revision.number
        self.phases[name] = "parked" if revision.is_parked else "ready"
        if revision.config == self.broken and not revision.is_parked:
            self.phases[name] = "failed"

    async def over(self) -> dict[str, Any]:
        async with asyncio.timeout(20):
            while (await self.rollout_progress())["outcome"] == "running":
                await asyncio.sleep(0.01)
        return await self.rollout_progress()

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "PING_INTERVAL_S", 0.01)


def wanted(**sections: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"model": {"dtype": "float32"}, **sections})


def cluster(**kwargs: Any) -> Simulated:
    return Simulated(wanted(), **kwargs)


async def test_ranks_come_to_the_new_settings_one_by_one_and_their_streams_move() -> None:
    made, config = cluster(), wanted(target={"max_running": 7})
    made.streams["target-0"] = 3
    await made.rollout(Wish(config, None, BOUNDS))
    with pytest.raises(RolloutError, match="under way"):
        await made.rollout(Wish(config, None, BOUNDS))
    over = await made.over()
    assert over["outcome"] == "done" and over["revision"] == 2
    assert [step["moved_streams"] for step in over["steps"]] == [3, 0]
    assert made.ends == ["target-0", "target-1"]
    assert (await made.settings())["target"]["max_running"] == 7
    assert (await made.routing()).num_places == 2 * 7, "which the shares of API keys follow"
    status = await made.status()
    assert {member["revision"] for member in status["members"]} == {2} and status["revision"] == 2
    wishes = {name: peers.assignment for name, peers in made.peers.items()}
    assert {wish.current for wish in wishes.values() if wish} == {2}, "all carry it"
    assert None not in wishes.values()


async def test_new_taps_restart_the_ranks_behind_the_drafters() -> None:
    made, config = cluster(), wanted(model={"dtype": "float32", "drafter": "/new"})
    await made.rollout(Wish(config, (1, 2), BOUNDS))
    await made.over()
    assert made.ends == ["drafter-0", "drafter-1", "target-0", "target-1"]
    same = cluster()
    await same.rollout(Wish(config, (0,), BOUNDS))
    await same.over()
    assert same.ends == ["drafter-0", "drafter-1"]


async def test_a_rank_that_does_not_start_gets_its_old_settings_and_the_rest_is_let_be() -> None:
    made, config = cluster(), wanted(target={"max_running": 7})
    made.broken = config
    await made.rollout(Wish(config, None, BOUNDS))
    over = await made.over()
    assert over["outcome"] == "failed" and "target-0 does not come up" in over["reason"]
    assert [step["phase"] for step in over["steps"]] == ["rolled back", "waiting"]
    assert made.started["target-0"] == 1 and made.pids["target-1"] == 1
    await made.until(lambda: made.phases["target-0"] == "ready")
    made.broken = None
    await made.rollout(Wish(config, None, BOUNDS))
    assert (await made.over())["outcome"] == "done"


async def test_what_cannot_be_rolled_out_changes_nothing() -> None:
    made = cluster()
    with pytest.raises(FixedSettingError):
        await made.rollout(Wish(wanted(target={"num_ranks": 3}), None, BOUNDS))
    group = cluster(groups=[("target-0", "target-1")])
    with pytest.raises(NobodyLeftError):
        await group.rollout(Wish(wanted(target={"max_running": 7}), None, BOUNDS))
    assert made.ends == group.ends == []
    assert (await made.rollout_progress())["outcome"] == "none"


async def test_a_policy_is_followed_without_a_restart() -> None:
    made = cluster()
    over = await made.rollout(Wish(wanted(policy={"name": "none"}), None, BOUNDS))
    assert over["outcome"] == "done" and made.ends == []
    assert (await made.status())["policy"] == "none"


async def test_a_policy_that_is_ordered_while_a_rollout_runs_stays_when_it_has_ended() -> None:
    made = cluster()
    made.streams["target-0"] = 3  # until they move there is time
    policy = {"explain_rounds": 5, "min_predicted_gain": 0.5}
    await made.rollout(Wish(wanted(policy=policy), None, BOUNDS))
    await made.reconfigure(wanted(policy={"name": "static_length", "static_length": 2}))
    assert (await made.over())["outcome"] == "done" and made.ends == ["target-0", "target-1"]
    policy = (await made.settings())["policy"]
    assert (policy["name"], policy["static_length"]) == ("static_length", 2)
    assert policy["explain_rounds"] == 5, "what the ranks have started with"
    orders = [peers.order for peers in made.peers.values() if peers.order is not None]
    assert {order.policy.name for order in orders} == {"static_length"}


async def test_a_rank_is_drained_by_order_and_the_last_one_never() -> None:
    made = cluster()
    assert await made.drain("target-1", True) == ["target-1"]
    assert made.phases["target-1"] == "draining", "it was told before the order was confirmed"
    for name, why in (("target-0", "no other rank"), ("drafter-0", "there is no rank")):
        with pytest.raises(RolloutError, match=why):
            await made.drain(name, True)
    with pytest.raises(NobodyLeftError):
        await made.rollout(Wish(wanted(target={"max_running": 7}), None, BOUNDS))
    await made.drain("target-1", False)
    assert made.phases["target-1"] == "ready"


async def test_a_process_that_an_earlier_supervisor_stopped_is_started_again() -> None:
    made = cluster()
    await made.routing()
    made.phases["drafter-1"] = "stopped"
    await made.until(lambda: made.ends == ["drafter-1"])
    await made.until(lambda: made.phases["drafter-1"] == "ready")


SCALING = {"enabled": True, "up_after_s": 0.0, "down_after_s": 0.05, "cooldown_s": 0.0}


async def test_a_rank_is_parked_with_little_to_do_and_starts_when_a_token_takes_too_long() -> None:
    made = Simulated(wanted(autoscale={**SCALING, "target_tpot_ms": 100}))
    made.streams["target-0"] = 2
    await made.routing()
    await made.until(lambda: made._book.members["target-1"].state == "parked")
    assert made.ends == ["target-1"] and made.started["target-1"] == -1
    states = {m["name"]: (m["state"], m["revision"]) for m in (await made.status())["members"]}
    assert states["target-1"] == ("parked", 1)
    # Settings reach a parked rank when it starts.
    config = wanted(autoscale={**SCALING, "target_tpot_ms": 100}, target={"max_running": 7})
    await made.until(lambda: not made._desk.is_busy)
    with pytest.raises(NobodyLeftError):
        await made.rollout(Wish(config, None, BOUNDS))
    await made.rollout(Wish(config, None, replace(BOUNDS, allows_pause=True)))
    assert (await made.over())["outcome"] == "done" and made.phases["target-1"] == "parked"
    made.tpot_s = 0.2
    await made.until(lambda: made.phases["target-1"] == "ready")
    assert made.started["target-1"] == 2
    assert "target is 100.0 ms" in (await made.status())["autoscale"]["why"]


@pytest.mark.parametrize("is_on", [True, False])
async def test_a_parked_rank_that_does_not_load_is_let_be_for_a_while(is_on: bool) -> None:
    made = Simulated(wanted(autoscale={**SCALING, "target_tpot_ms": 100}))
    await made.routing()
    await made.until(lambda: made.phases["target-1"] == "parked")
    await made.until(lambda: not made._desk.is_busy)
    made.broken = made._book.assignment.config
    if is_on:
        made.tpot_s = 0.2
    else:
        made.broken = wanted()
        await made.rollout(Wish(wanted(), None, BOUNDS))
    # Its start, and back to parked.
    await made.until(lambda: made.ends == ["target-1"] * 3 and not made._desk.is_busy)
    await asyncio.sleep(0.1)
    assert made.ends == ["target-1"] * 3 and made.phases["target-1"] == "parked"
    made.broken, made._scaling._pauses = None, StartPauses()  # as if the pause were over
    await made.until(lambda: made.phases["target-1"] == "ready")


async def test_it_is_off_unless_it_is_asked_for() -> None:
    made = cluster()
    await made.routing()
    await asyncio.sleep(0.1)
    assert made.ends == [] and (await made.status())["autoscale"] is None
