"""What a server costs against its engine: from samples to the report."""

from __future__ import annotations

import pytest

from cluster.console import CommandError
from cluster.frontier.rates import StreamSample
from cluster.overhead import Sampler, report_of, role_of, text_of, turn_of

STREAMS = 4


def sampler() -> Sampler:
    """Ten seconds: 5 steps a second of 150 ms, the rank takes 1.5 cores and the client a quarter of one."""
    times = [float(second) for second in range(11)]
    return Sampler(
        "http://127.0.0.1:1/v1",
        times,
        [{"rank": 1.5 * t, "client": 0.25 * t} for t in times],
        [{"dspark:steps_total": 5 * t, "dspark:step_seconds_total": 0.75 * t} for t in times],
    )


def samples(error: str = "") -> list[StreamSample]:
    """All busy from second 2 to second 8, each with five tokens a second."""
    return [
        StreamSample(i, 0.0, 2.0, 8.0, 31, error=error if i == 1 else "") for i in range(STREAMS)
    ]


def test_the_time_between_two_tokens_is_split_without_a_rest() -> None:
    turn = turn_of(samples(), STREAMS, 0.12, sampler())
    assert turn.tokens_per_s == pytest.approx(20)
    assert turn.interval_ms == pytest.approx(200)
    assert turn.step_ms == pytest.approx(150)
    assert turn.cores == pytest.approx({"rank": 1.5, "client": 0.25})
    report = report_of([turn], STREAMS)
    assert report["overhead"] == pytest.approx(1 - 120 / 200)
    assert sum(report["parts_ms"].values()) == pytest.approx(report["interval_ms"])
    assert report["parts_ms"] == pytest.approx(
        {"engine alone": 120, "engine slower beside the others": 30, "between steps": 50}
    )


def test_the_overhead_is_formed_within_each_turn() -> None:
    """A machine that slows down between two turns is no overhead."""
    turn = turn_of(samples(), STREAMS, 0.18, sampler())
    slower = type(turn)(360.0, 400.0, 380.0, 10.0, turn.cores)
    report = report_of([turn, slower], STREAMS)
    assert report["overhead"] == pytest.approx(0.1)
    assert report["overhead_range"] == pytest.approx([0.1, 0.1])
    assert "overhead 10.0% (10.0% to 10.0%)" in text_of(report | {"streams": STREAMS})


def test_a_stream_that_failed_makes_the_turn_worthless() -> None:
    with pytest.raises(CommandError, match="1 streams failed: cut"):
        turn_of(samples("cut"), STREAMS, 0.1, sampler())


def test_streams_that_were_never_all_busy_are_refused() -> None:
    short, late = StreamSample(0, 0.0, 1.0, 2.0, 9), StreamSample(1, 0.0, 3.0, 4.0, 9)
    with pytest.raises(CommandError, match="busy at once"):
        turn_of([short, late], 2, 0.1, sampler())


@pytest.mark.parametrize(
    ("name", "command", "role"),
    [
        ("ray::TargetActor.run", ["ray::TargetActor.run"], "rank"),
        ("ray::ServeReplica", ["ray::ServeReplica:app:Ingress"], "ingress"),
        ("ray::ServeController", ["ray::ServeController"], "Serve's controller and proxies"),
        ("haproxy", ["/x/haproxy", "-dS"], "HAProxy"),
        ("raylet", ["/x/raylet", "--raylet_socket_name=y"], "Ray"),
    ],
)
def test_every_process_has_a_name_in_the_report(name: str, command: list[str], role: str) -> None:
    assert role_of(name, command) == role
