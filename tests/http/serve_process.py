"""A process with a Ray of its own: the real Serve application over one scripted rank. Driven by lines on stdin.

Serve reads its environment on import, so it cannot share a process with other tests. Commands: `aborted` prints how
many requests the rank was told to stop, `quit` ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import ray

from actors.core.messages import RankRoute, RoutingTable
from actors.link import Membership, ZmqLink
from cluster.app import run_ingress, serve_environment, stop_ingress
from cluster.model_files import text_files
from cluster.text import TextCodec
from configs.schema import ClusterConfig
from tests.http.harness import TEXT, ScriptedRank


@ray.remote(num_cpus=0)
class FakeSupervisor:
    """Answers what an ingress replica asks of the supervisor."""

    def __init__(self, membership: Membership, table: RoutingTable) -> None:
        self.membership = membership
        self.table = table

    async def join(self) -> tuple[Membership, str | None]:
        return self.membership, None

    async def routing(self, seen: int) -> RoutingTable:
        return self.table


def main(port: int, proxy: str) -> None:
    config = ClusterConfig.model_validate({"ingress": {"port": port, "proxy": proxy}})
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


def say(line: str) -> None:
    sys.stdout.write(f"> {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
