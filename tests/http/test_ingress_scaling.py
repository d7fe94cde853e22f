"""Ingress replicas come and go with the load, through real Serve; no stream of one that ends is cut."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cluster.ingress_scaling import STOP_S
from tests.http.harness import TEXT
from tests.http.served import ServeProcess
from tests.http.test_serve import stream

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(280)]
NUM_STREAMS = 12


@pytest.fixture
def serve() -> Iterator[Callable[..., ServeProcess]]:
    started: list[ServeProcess] = []

    def start(proxy: str, **ingress: Any) -> ServeProcess:
        settings = json.dumps({"num_replicas": 1, "max_replicas": 2, **ingress})
        started.append(ServeProcess("tests.http.serve_process", proxy, settings))
        return started[-1]

    yield start
    for process in started:
        process.quit()


@pytest.mark.parametrize("proxy", ["haproxy", "python"])
def test_streams_of_a_replica_that_ends_come_to_their_end(serve, proxy):
    settings = {"down_after_s": 10, "target_lag_ms": 60_000, "stall_timeout_s": 240}
    served = serve(proxy, initial_replicas=2, **settings)
    served.until(lambda: served.ask("replicas") == '["RUNNING", "RUNNING"]', 30)
    served.ask("pause")
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        open_streams = [pool.submit(stream, served.url) for _ in range(NUM_STREAMS)]
        served.until(lambda: "STOPPING" in served.ask("replicas"), 60)
        time.sleep(STOP_S + 2.0)  # longer than one has where their number is fixed
        assert "STOPPING" in served.ask("replicas")
        assert not any(each.done() for each in open_streams)
        served.ask("resume")
        assert [each.result() for each in open_streams] == [(TEXT, "stop")] * NUM_STREAMS
    served.until(lambda: served.ask("replicas") == '["RUNNING"]', 30)
    assert all(json.loads(served.ask("streams")).values()), "both had some"
    assert served.ask("aborted") == "0" and stream(served.url) == (TEXT, "stop")


def test_one_more_starts_when_tokens_wait_in_the_front(serve):
    served = serve("haproxy", busy_share=0.0, up_after_s=1, target_lag_ms=0.001)
    assert served.ask("replicas") == '["RUNNING"]'
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        while served.ask("replicas") != '["RUNNING", "RUNNING"]':
            results = list(pool.map(stream, [served.url] * NUM_STREAMS))
            assert results == [(TEXT, "stop")] * NUM_STREAMS
    decision = json.loads(served.ask("decision"))
    assert decision["num_replicas"] == 2
