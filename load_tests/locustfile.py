"""Streaming users for Locust: `locust -f load_tests/locustfile.py --headless --host http://127.0.0.1:8000 …`.

Beside Locust's own line for the HTTP exchange, each stream fires `TTFT`, `TPOT` and `gap` (milliseconds) and `tokens`
(its length column holds tokens). Closed loop by default: every user asks again when its answer is complete.
`--open-rate` makes the loop open: arrivals are Poisson at that rate, whatever the answers do.
Locust patches the process on import, so nothing else imports this file.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import gevent
from locust import HttpUser, LoadTestShape, constant, events, task
from locust.exception import StopUser

from load_tests import report, schedule
from load_tests.prompts import TENANTS, parse_mix
from load_tests.sse import BrokenStreamError, EventReader, StreamRecord

MAX_OUTSTANDING = 2048  # of the open loop; beyond, arrivals are counted as refused here
ABORT_AFTER_PIECES = (1, 24)


@events.init_command_line_parser.add_listener
def _options(parser: Any) -> None:
    parser.add_argument("--model", default="", help="model name; default: the first one served")
    parser.add_argument("--mix", default="code=1,chat=1,math=1", help="share of each tenant")
    parser.add_argument("--load-shape", default="constant", choices=sorted(schedule.SHAPES))
    parser.add_argument("--peak", type=int, default=4, help="most users at once (closed loop)")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of the run")
    parser.add_argument(
        "--open-rate", type=float, default=0.0, help="arrivals a second; 0 = closed loop"
    )
    parser.add_argument(
        "--abort-share", type=float, default=0.0, help="streams the client breaks off"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="of prompts, mix, arrivals and requests"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", default="", help="folder for records, summary and picture")
    parser.add_argument("--check", action="store_true", help="fail when a threshold does not hold")
    parser.add_argument("--max-error-share", type=float, default=0.0)
    parser.add_argument("--max-ttft-p95-s", type=float)
    parser.add_argument("--max-gap-p95-s", type=float)
    parser.add_argument("--min-tokens-per-s", type=float)
    parser.add_argument("--min-streams", type=int, default=1)


class Run:
    """What all users of this process share."""

    def __init__(self) -> None:
        self.entries: list[report.Entry] = []
        self.began_s = time.monotonic()
        self.model = ""
        self._next = 0
        self._lock = threading.Lock()

    def take_number(self) -> int:
        """Number of the next request: with the seed it decides everything about it."""
        with self._lock:
            self._next += 1
            return self._next


RUN = Run()


@events.test_start.add_listener
def _start(environment: Any, **_: Any) -> None:
    parse_mix(environment.parsed_options.mix)
    RUN.__init__()  # type: ignore[misc]


class StreamingUser(HttpUser):
    """Asks, reads the stream to its end, asks again."""

    wait_time = constant(0)

    def on_start(self) -> None:
        options = self.environment.parsed_options
        if not RUN.model:
            RUN.model = options.model or self.client.get("/v1/models").json()["data"][0]["id"]

    @task
    def ask(self) -> None:
        rate = self.environment.parsed_options.open_rate
        if not rate:
            self._stream(RUN.take_number())
            return
        self._arrive(rate)
        raise StopUser

    def _arrive(self, peak_rate: float) -> None:
        """Open loop: this one user only starts streams, at Poisson times."""
        options = self.environment.parsed_options
        rng, streams = random.Random(f"arrivals-{options.seed}"), gevent.pool.Pool(MAX_OUTSTANDING)
        while (elapsed := time.monotonic() - RUN.began_s) < options.seconds:
            rate = schedule.rate_at(options.load_shape, peak_rate, elapsed, options.seconds)
            if rate <= 0:
                gevent.sleep(0.1)
                continue
            gevent.sleep(rng.expovariate(rate))
            streams.spawn(self._stream, RUN.take_number())
        streams.join()

    def _stream(self, number: int) -> None:
        options = self.environment.parsed_options
        rng = random.Random(f"{options.seed}-{number}")
        mix = parse_mix(options.mix)
        tenant = TENANTS[rng.choices(list(mix), list(mix.values()))[0]]
        abort_after = None
        if rng.random() < options.abort_share:
            abort_after = rng.randint(*ABORT_AFTER_PIECES)
        prompt, max_tokens = tenant.ask(options.seed, number)
        body = {
            "model": RUN.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.temperature > 0:
            body["seed"] = number
        record = StreamRecord(tenant.name, time.monotonic())
        error = self._read(body, record, abort_after)
        RUN.entries.append(report.Entry.of(record, RUN.began_s, time.monotonic(), error))
        if error is None:
            self._fire(record)

    def _read(
        self, body: dict[str, Any], record: StreamRecord, abort_after: int | None
    ) -> str | None:
        """Fill `record`; return what went wrong."""
        reader = EventReader()
        with self.client.post(
            "/v1/chat/completions", json=body, stream=True, name=record.tenant, catch_response=True
        ) as response:
            try:
                if response.status_code != 200:
                    raise BrokenStreamError(f"{response.status_code}: {response.text[:200]}")
                for data in response.iter_content(chunk_size=None):
                    for event in reader.feed(data):
                        record.take(event, time.monotonic())
                    if abort_after is not None and len(record.pieces) >= abort_after:
                        record.aborted = not record.done
                        break
                record.close()
            except (BrokenStreamError, OSError, ValueError) as error:
                response.failure(str(error))
                return f"{type(error).__name__}: {error}"
            response.success()
        return None

    def _fire(self, record: StreamRecord) -> None:
        times = {"TTFT": record.ttft_s, "TPOT": record.tpot_s}
        if record.tpot_s is not None:
            times["gap"] = record.max_gap_s
        for kind, seconds in times.items():
            if seconds is not None:
                self._event(kind, record.tenant, seconds * 1000, 0)
        if record.completion_tokens is not None:
            self._event("tokens", record.tenant, 0.0, record.completion_tokens)

    def _event(self, kind: str, name: str, milliseconds: float, length: int) -> None:
        self.environment.events.request.fire(
            request_type=kind, name=name, response_time=milliseconds, response_length=length,
            exception=None, context={},
        )  # fmt: skip


class Schedule(LoadTestShape):
    """Follows `--load-shape` up to `--peak` users for `--seconds`."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        options = self.runner.environment.parsed_options
        elapsed = self.get_run_time()
        if options.open_rate:
            return None if elapsed >= options.seconds else (1, 1.0)
        users = schedule.users_at(options.load_shape, options.peak, elapsed, options.seconds)
        return None if users is None else (users, 100.0)


@events.quitting.add_listener
def _finish(environment: Any, **_: Any) -> None:
    options, entries = environment.parsed_options, list(RUN.entries)
    summary = report.summarise(entries, time.monotonic() - RUN.began_s)
    print(report.table(summary))
    if options.out:
        report.write(Path(options.out), entries, summary)
        report.draw(entries, summary, Path(options.out) / report.PICTURE)
        print(f"records, summary and picture in {options.out}")
    environment.process_exit_code = 0
    if options.check:
        thresholds = report.Thresholds(
            options.max_error_share, options.max_ttft_p95_s, options.max_gap_p95_s,
            options.min_tokens_per_s, options.min_streams,
        )  # fmt: skip
        failures = thresholds.failures(summary)
        for failure in failures:
            print(f"CHECK FAILED: {failure}")
        environment.process_exit_code = 1 if failures else 0
        if not failures:
            print("CHECK PASSED")
