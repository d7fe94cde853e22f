"""`dspark bench` against endpoints that are scripted: the closed loop, what is kept, what a machine is."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from cluster.console import CommandError
from cluster.frontier import machine
from cluster.frontier.drive import Server
from cluster.frontier.ledger import FILE, Ledger
from cluster.frontier.workload import requests_of
from tests.pure.frontier_endpoint import Endpoint

REQUESTS = requests_of(12, tokens=16)


def test_the_list_is_served_in_its_order_and_counted_from_usage() -> None:
    endpoint = Endpoint()
    samples = Server("http://x/v1", "ours", open_client=endpoint.open).serve(REQUESTS, 1, 0.0)
    assert [sample.index for sample in samples] == list(range(12))
    assert [body["messages"][0]["content"] for body in endpoint.bodies] == [
        r.prompt for r in REQUESTS
    ]
    assert [sample.completion_tokens for sample in samples] == [r.max_tokens for r in REQUESTS]
    assert (samples[0].num_rounds, samples[0].num_scheduled, samples[0].num_accepted) == (4, 12, 6)
    assert all(s.sent_s <= s.first_s <= s.last_s for s in samples)
    body = endpoint.bodies[0]
    assert body["dspark"] == {"speculation": True} and "seed" not in body
    assert body["stream_options"] == {"include_usage": True}


def test_sampled_requests_are_seeded_and_the_same_text_has_the_same_digest() -> None:
    endpoint = Endpoint()
    server = Server("http://x/v1", "ours", open_client=endpoint.open)
    first, again = server.serve(REQUESTS, 3, 1.0), server.serve(REQUESTS, 1, 1.0)
    assert {body["seed"] for body in endpoint.bodies} == {r.seed for r in REQUESTS}
    assert [s.digest for s in first] == [s.digest for s in again]
    odd = Endpoint(says=lambda _: "something else")
    other = Server("http://x/v1", "ours", open_client=odd.open).serve(REQUESTS, 1, 1.0)
    assert other[0].digest != first[0].digest


def test_a_peer_gets_nothing_of_ours_and_its_own_model_name() -> None:
    endpoint = Endpoint()
    endpoint.counts = None
    for url, path in (
        ("http://x/v1", "/v1/chat/completions"),
        ("http://x/v1/chat/completions", "/v1/chat/completions"),
        ("http://x/v1/completions", "/v1/completions"),
    ):
        server = Server(url, is_peer=True, open_client=endpoint.open)
        (sample,) = server.serve(REQUESTS[:1], 1, 0.0)
        assert sample.error == "" and sample.completion_tokens == REQUESTS[0].max_tokens
        assert sample.num_rounds == 0
        assert endpoint.paths[-1] == path
        assert endpoint.bodies[-1]["model"] == "theirs" and "dspark" not in endpoint.bodies[-1]
    assert endpoint.bodies[-1]["prompt"] == REQUESTS[0].prompt


def test_so_many_streams_are_in_flight_and_no_more() -> None:
    together = threading.Barrier(4, timeout=30)

    def meet(_: dict[str, Any]) -> str:
        together.wait()  # only passes when all four are there at once
        return ""

    endpoint = Endpoint(says=meet)
    Server("http://x/v1", "ours", open_client=endpoint.open).serve(REQUESTS, 4, 0.0)
    assert endpoint.most_at_once == 4


def test_a_stream_without_usage_or_with_a_refusal_is_an_error_of_its_request() -> None:
    silent = Endpoint()
    silent.with_usage = False
    (sample,) = Server("http://x/v1", "m", open_client=silent.open).serve(REQUESTS[:1], 1, 0.0)
    assert "usage" in sample.error

    def broken(_: dict[str, Any]) -> str:
        raise RuntimeError("boom")

    samples = Server("http://x/v1", "m", open_client=Endpoint(broken).open).serve(
        REQUESTS[:3], 2, 0
    )
    assert all("boom" in sample.error for sample in samples) and len(samples) == 3


# --- the ledger -------------------------------------------------------------------------------------------------------


def test_cells_are_kept_as_they_come_and_found_again(tmp_path: Path) -> None:
    first = Ledger(tmp_path, "id", resume=False)
    first.add("a", {"num_errors": 0, "value": 1})
    first.add("bad", {"num_errors": 2})
    again = Ledger(tmp_path, "id", resume=True)
    assert set(again.rows) == {"a"} and again.rows["a"]["value"] == 1
    other = Ledger(tmp_path, "another model", resume=True)
    assert other.rows == {} and other.num_foreign == 2


def test_a_line_that_was_cut_is_dropped_and_the_next_one_stays_whole(tmp_path: Path) -> None:
    Ledger(tmp_path, "id", resume=False).add("a", {"num_errors": 0})
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"identity": "id", "key": "b", "num_er')
    torn = Ledger(tmp_path, "id", resume=True)
    assert set(torn.rows) == {"a"}
    torn.add("c", {"num_errors": 0})
    assert set(Ledger(tmp_path, "id", resume=True).rows) == {"a", "c"}


def test_measured_cells_are_not_mixed_by_accident(tmp_path: Path) -> None:
    Ledger(tmp_path, "id", resume=False).add("a", {"num_errors": 0})
    with pytest.raises(CommandError, match="--resume"):
        Ledger(tmp_path, "id", resume=False)


# --- the machine ------------------------------------------------------------------------------------------------------


def test_a_busy_machine_is_refused_or_noted() -> None:
    quiet, busy = ({"busy_cores": b, "load_average": b} for b in (0.4, 1.6))
    assert machine.refuse_other_load(quiet, 2, force=False) == ""
    with pytest.raises(CommandError, match="--force"):
        machine.refuse_other_load(busy, 2, force=False)
    assert "1.6 of 2 cores" in machine.refuse_other_load(busy, 2, force=True)
    assert machine.is_disturbed(busy, 2) and not machine.is_disturbed(quiet, 2)
    assert machine.facts()["cores"] >= 1 and machine.load(0.01)["busy_cores"] >= 0


@pytest.mark.parametrize(
    ("samples", "is_refused"),
    [
        ([(0.1, 0.3)], False),
        ([(1.8, 0.3)], True),  # it has just begun
        ([(0.1, 3.2), (0.1, 2.5)], False),  # the work of the last minute is over
        ([(0.1, 3.2), (1.4, 2.5)], True),  # it comes and goes
    ],
)
def test_work_that_is_over_does_not_stop_a_measurement(
    monkeypatch: pytest.MonkeyPatch, samples: list[tuple[float, float]], is_refused: bool
) -> None:
    left = iter(samples)

    def load(sample_s: float) -> dict[str, float]:
        busy, average = next(left)
        return {"busy_cores": busy, "load_average": average}

    monkeypatch.setattr(machine, "load", load)
    seen = machine.watch(2)
    assert next(left, None) is None, "the longer look is taken only where the load average is high"
    with pytest.raises(CommandError) if is_refused else nullcontext():
        assert machine.refuse_other_load(seen, 2, force=False) == ""


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"avx2", "avx512f", "avx512_bf16"}, "avx512_bf16"),
        ({"avx2"}, "avx2"),
        ({"avx2", "avx512f"}, "avx512f"),
        (set(), "other"),
    ],
)
def test_a_cpu_is_known_by_how_it_multiplies(flags: set[str], expected: str) -> None:
    assert machine.flag_class(flags) == expected
