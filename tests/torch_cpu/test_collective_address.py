"""On a machine with several addresses, ranks of a group meet on the one they are told."""

from __future__ import annotations

import psutil
import torch

from actors.engine.collective import DistributedCollective, all_gather, open_store
from tests.torch_cpu.thread_ranks import ThreadCollective, on_ranks


def test_ranks_talk_over_the_address_they_are_given() -> None:
    """And not over the one that the name of the machine stands for."""
    store, address = open_store("127.0.0.1")
    own = "127.0.0.2"

    def rank(thread: ThreadCollective) -> set[str]:
        joined = DistributedCollective.join(
            address, 1, thread.rank, 2, 20.0, 20.0, "cpu", own_host=own
        )
        all_gather(joined, torch.zeros(1))
        connections = psutil.Process().net_connections("tcp")
        addresses = {connection.laddr.ip for connection in connections}
        return {
            ip for ip in addresses if ip != "::" and not ip.endswith("127.0.0.1")
        }  # the store's

    assert on_ranks(2, rank)[0] == [{own}, {own}]
    del store
