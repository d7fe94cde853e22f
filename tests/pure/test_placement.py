"""Bundles and threads of the actors."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.placement import no_room, plan_placement, plan_threads
from configs.schema import ClusterConfig


def config(num_ranks: int, num_drafters: int, **target: Any) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "target": {"num_ranks": num_ranks, **target},
            "drafter": {"num_actors": num_drafters},
        }
    )


@pytest.mark.parametrize(
    ("cores", "num_ranks", "num_drafters", "expected"),
    [
        (2, 1, 1, (2, 2)),  # they take turns
        (2, 2, 2, (1, 1)),
        (8, 1, 1, (8, 8)),
        (8, 2, 4, (4, 2)),
        (2, 4, 4, (1, 1)),  # never none
    ],
)
def test_threads_share_the_cores_of_a_node(
    cores: int, num_ranks: int, num_drafters: int, expected: tuple[int, int]
) -> None:
    assert plan_threads(config(num_ranks, num_drafters), cores) == expected


def test_ranks_on_several_nodes_do_not_share_cores() -> None:
    assert plan_threads(config(4, 4), cores_per_node=16, num_nodes=4) == (16, 16)


def test_configured_threads_win() -> None:
    assert plan_threads(config(2, 2, num_threads=3), cores_per_node=2)[0] == 3


def test_each_rank_has_a_bundle_with_its_drafters_beside_it() -> None:
    placement = plan_placement(config(2, 3, num_cpus=1.0), cores_per_node=8)
    assert placement.bundles == ({"CPU": 2.0}, {"CPU": 1.5})
    assert [slot.bundle for slot in placement.targets] == [0, 1]
    assert [(slot.name, slot.bundle) for slot in placement.drafters] == [
        ("drafter-0", 0),
        ("drafter-1", 1),
        ("drafter-2", 0),
    ]
    assert placement.num_cpus == 3.5 and placement.num_gpus == 0


def test_without_a_drafter_there_is_no_drafter_actor() -> None:
    plain = ClusterConfig.model_validate({"model": {"drafter": None}})
    assert plan_placement(plain, cores_per_node=2).drafters == ()


def test_gpus_are_reserved_in_the_bundle() -> None:
    gpu = ClusterConfig.model_validate(
        {"target": {"num_gpus": 0.7}, "drafter": {"num_gpus": 0.3}, "model": {"device": "cuda"}}
    )
    assert plan_placement(gpu, cores_per_node=4).bundles[0]["GPU"] == pytest.approx(1.0)


def test_no_bundle_is_empty() -> None:
    free = ClusterConfig.model_validate({"target": {"num_cpus": 0}, "drafter": {"num_cpus": 0}})
    assert all(plan_placement(free, cores_per_node=2).bundles)


def test_neighbouring_ranks_make_a_group() -> None:
    groups = plan_placement(config(4, 1, group_size=2), 8).groups
    assert groups == (("target-0", "target-1"), ("target-2", "target-3"))
    assert plan_placement(config(4, 1), 8).groups == ()


def test_a_group_is_placed_as_one_and_apart_from_the_others() -> None:
    placement = plan_placement(config(4, 4, group_size=2), 8)
    assert placement.strategy == "PACK"
    assert placement.pools == (range(2), range(2, 4))
    assert [placement.place_of(slot) for slot in placement.targets] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert placement.place_of(placement.drafters[2]) == (1, 0)


def test_ranks_on_their_own_are_spread_over_the_machines() -> None:
    placement = plan_placement(config(3, 3), 8)
    assert placement.strategy == "SPREAD"
    assert placement.pools == (range(3),)
    assert placement.place_of(placement.targets[2]) == (0, 2)


def test_ranks_go_where_the_nodes_are_marked_for_them() -> None:
    placement = plan_placement(config(2, 1, node_resource="gpu_node"), 8)
    assert all(0 < bundle["gpu_node"] < 0.01 for bundle in placement.bundles)


def test_what_is_short_is_what_the_remedy_names() -> None:
    gpu = ClusterConfig.model_validate(
        {"target": {"num_gpus": 0.7}, "drafter": {"num_gpus": 0.3}, "model": {"device": "cuda"}}
    )
    assert "--config laptop-cpu" in no_room(plan_placement(gpu, 4), {"CPU": 8.0})
    assert "target.num_cpus" in no_room(plan_placement(gpu, 4), {"CPU": 0.5, "GPU": 1.0})
