"""A process with a Ray of its own: the real Serve application over one scripted rank. Driven by lines on stdin.

Serve reads its environment on import, so it cannot share a process with other tests. Arguments: the port, the proxy,
and more settings of the ingress as JSON.

Commands: `aborted` prints how many requests the rank was told to stop, `pause` has it stop after three tokens of each
stream until `resume`; `replicas` prints the states of the ingress replicas, `streams` the most streams each of them has
had, `decision` what was decided last of their number, these as JSON; `kill` ends them as a crash would, and prints how
many; `quit` ends.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import ray

from actors.core.messages import RankRoute, RoutingTable
from actors.link import Membership, ZmqLink
from cluster import ingress_scaling
from cluster.app import run_ingress, serve_environment, stop_ingress
from cluster.model_files import text_files
from cluster.text import TextCodec
from configs.ingress import IngressConfig
from configs.schema import ClusterConfig
from tests.http.harness import TEXT, ScriptedRank


@ray.remote(num_cpus=0)
class FakeSupervisor:
    """Answers what an ingress replica asks of the supervisor."""

    def __init__(self, membership: Membership, table: RoutingTable) -> None:
        self.membership = membership
        self.table = table
        self.most_streams: dict[str, int] = {}
        self.decision: dict[str, Any] = {}

    async def join(self) -> tuple[Membership, str | None]:
        return self.membership, None

    async def routing(self, seen: int) -> RoutingTable:
        return self.table

    async def publish(self, ingress: str, front: dict[str, Any]) -> None:
        self.most_streams[ingress] = max(self.most_streams.get(ingress, 0), front["num_streams"])

    async def note_ingress(self, decision: dict[str, Any]) -> None:
        self.decision = decision

    async def noted(self) -> tuple[dict[str, int], dict[str, Any]]:
        return self.most_streams, self.decision


def main(port: int, proxy: str, more: str = "{}") -> None:
    ingress = {"port": port, "proxy": proxy, **json.loads(more)}
    bend_scaling(ingress.pop("initial_replicas", None), ingress.pop("busy_share", None))
    config = ClusterConfig.model_validate({"ingress": ingress})
    os.environ.update(serve_environment(config.ingress))
    ray.init(
        address="local",
        num_cpus=2,
        namespace="dspark",
        include_dashboard=False,
        log_to_driver=False,
    )
    membership = Membership.create()
    codec = TextCodec.from_directory(text_files(config.model.path))
    script = codec.encode(TEXT, add_special_tokens=False) + list(codec.eos_token_ids)
    rank = ScriptedRank(
        ZmqLink("target-0", "target", membership, ray.util.get_node_ip_address()), script
    )
    rank.step_s, rank.tokens_a_step = 0.1, 1
    table = RoutingTable(1, (RankRoute(rank.endpoint, "ready"),))
    supervisor = FakeSupervisor.options(name="supervisor").remote(membership, table)
    try:
        say(f"READY {run_ingress(config)}")
        commands: dict[str, Callable[[], object]] = {
            "aborted": lambda: len({abort.request_id for abort in rank.aborted}),
            "kill": kill_replicas,
            "pause": lambda: setattr(rank, "num_tokens_before_pause", 3),
            "resume": lambda: setattr(rank, "num_tokens_before_pause", None),
            "replicas": lambda: json.dumps(replica_states()),
            "streams": lambda: json.dumps(ray.get(supervisor.noted.remote())[0]),
            "decision": lambda: json.dumps(ray.get(supervisor.noted.remote())[1]),
        }
        for line in sys.stdin:
            if line.strip() == "quit":
                break
            say(str(commands[line.strip()]()))
    finally:
        stop_ingress()
        ray.kill(supervisor)
        rank.kill()
        ray.shutdown()
    say("STOPPED")


def bend_scaling(initial_replicas: int | None, busy_share: float | None) -> None:
    """What no setting says: how many replicas there are at first, and how busy a loop is before one more starts."""
    given = ingress_scaling.autoscaling

    def bent(ingress: IngressConfig) -> Any:
        made = given(ingress)
        if busy_share is not None:
            made.policy.policy_kwargs["busy_share"] = busy_share
        return made.model_copy(update={"initial_replicas": initial_replicas})

    ingress_scaling.autoscaling = bent


def kill_replicas() -> int:
    named = ray.util.list_named_actors(all_namespaces=True)
    replicas = [a for a in named if a["name"].startswith("SERVE_REPLICA::dspark#Ingress")]
    for replica in replicas:
        ray.kill(ray.get_actor(**replica))
    return len(replicas)


def replica_states() -> list[str]:
    from ray import serve

    counts = serve.status().applications["dspark"].deployments["Ingress"].replica_states
    return [state for state, count in counts.items() for _ in range(count)]


def say(line: str) -> None:
    sys.stdout.write(f"> {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
