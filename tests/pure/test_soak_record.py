"""What a long run keeps of a server's metrics, and what it makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from load_tests.record import Sample, draw, growth_mb, sample_of, tokens_per_s

PAGE = """\
# TYPE dspark:member_memory_bytes gauge
dspark:member_memory_bytes{member="target-0",role="target"} 2.097152e+06
dspark:member_memory_bytes{member="ingress-0",role="ingress"} 1.048576e+06
# TYPE dspark:committed_tokens_total counter
dspark:committed_tokens_total{rank="target-0"} 50
# TYPE dspark:recoveries_total counter
dspark:recoveries_total{member="target-0",role="target"} 1
# TYPE dspark:idle_problems_total counter
dspark:idle_problems_total{rank="target-0"} 2
# TYPE dspark:kv_blocks gauge
dspark:kv_blocks{rank="target-0"} 40
# TYPE dspark:kv_free_blocks gauge
dspark:kv_free_blocks{rank="target-0"} 31
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m",engine="ingress-0"} 3
vllm:num_requests_running{model_name="m",engine="ingress-1"} 4
"""


def run(memory_mb: list[float], restarts: float = 0.0) -> list[Sample]:
    return [
        Sample(5.0 * i, {"target-0": mb}, restarts={"target-0": restarts})
        for i, mb in enumerate(memory_mb)
    ]


def test_a_sample_has_every_process() -> None:
    sample = sample_of(PAGE, 1.5)
    assert sample.memory_mb == {"target-0": 2.0, "ingress-0": 1.0}
    assert sample.used_blocks == {"target-0": 9.0}
    assert sample.committed_tokens == {"target-0": 50.0}
    assert sample.restarts == {"target-0": 1.0}
    assert (sample.open_streams, sample.idle_problems, sample.at_s) == (7.0, 2.0, 1.5)


def test_a_rank_that_starts_again_counts_from_zero() -> None:
    counts = (100.0, 150.0, 20.0)
    samples = [
        Sample(2.0 * i, committed_tokens={"target-0": count}) for i, count in enumerate(counts)
    ]
    assert tokens_per_s(samples) == [25.0, 10.0]


def test_growth_is_that_of_the_second_half() -> None:
    filling = [100.0 + 10 * i for i in range(10)]
    assert growth_mb(run(filling + [200.0] * 10)) == {"target-0": 0.0}
    leaking = [100.0 + i for i in range(20)]
    assert growth_mb(run(leaking))["target-0"] == pytest.approx(8.0)


def test_a_process_that_was_restarted_says_nothing_of_leaks() -> None:
    assert growth_mb(run([100.0] * 20, restarts=1.0)) == {}
    assert growth_mb([]) == {}


def test_the_picture_is_drawn_with_members_that_come_and_go(tmp_path: Path) -> None:
    samples = [*run([100.0] * 5), Sample(30.0, {"drafter-0": 5.0}, restarts={"target-0": 1.0})]
    draw(samples, tmp_path / "soak.png")
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")
