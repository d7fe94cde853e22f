"""`dspark bench`: windows, rates, ratios and their spread."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.frontier.plan import BRACKET, contenders_of
from cluster.frontier.rates import StreamSample, WindowError, rates_of, steady_window
from cluster.frontier.report import summary
from cluster.frontier.statistics import Matched, at_throughput, best, paired, spread_of
from tests.pure.frontier_cells import row


def stream(index: int, sent: float, first: float, last: float, tokens: int = 11) -> StreamSample:
    return StreamSample(index, sent, first, last, tokens, 5, 15, 6, digest=str(index))


# Two slots: 0 and 1 begin together, 2 follows 0, 3 follows 1 and is the last that is sent.
LOOP = [
    stream(0, 0.0, 1.0, 6.0),
    stream(1, 0.0, 2.0, 7.0),
    stream(2, 6.0, 6.5, 9.5, tokens=4),
    stream(3, 7.0, 7.5, 17.5),
]


def test_only_the_time_in_which_every_slot_is_busy_counts() -> None:
    assert steady_window(LOOP, 2) == (2.0, 9.5)
    rates = rates_of(LOOP, 2, num_nodes=1)
    # Of stream 0 the tokens after 2.0 (8 of 11), all of 1 but its first, all of 2, of 3 the first 3.
    assert rates["node_tokens_per_s"] == pytest.approx((8 + 10 + 4 + 3) / 7.5)
    assert rates_of(LOOP, 2, num_nodes=2)["node_tokens_per_s"] == pytest.approx(25 / 15)
    assert rates["window_s"] == 7.5 and rates["seconds"] == 17.5
    assert rates["completion_tokens"] == 37


def test_a_user_sees_tokens_after_the_first_and_streams_of_the_drain_do_not_count() -> None:
    assert LOOP[0].user_tokens_per_s == pytest.approx(2.0)
    assert LOOP[3].share_within(2.0, 9.5) == pytest.approx(0.2)
    assert rates_of(LOOP, 2, 1)["user_tokens_per_s"] == pytest.approx(2.0)  # 2, 2 and 1; not 3's
    assert replace(LOOP[0], completion_tokens=1).user_tokens_per_s is None
    assert replace(LOOP[0], completion_tokens=0).tokens_until(99.0) == 0.0


def test_waits_acceptance_and_budgets_come_from_what_the_server_counts() -> None:
    rates = rates_of(LOOP, 2, 1)
    assert rates["ttft_s"] == pytest.approx(0.75) and rates["ttft_p95_s"] == pytest.approx(2.0)
    assert rates["acceptance_length"] == pytest.approx(1 + 6 / 5)
    assert rates["scheduled_per_round"] == pytest.approx(3.0)
    assert rates["digests"] == ["0", "1", "2", "3"]
    foreign = [replace(s, num_rounds=0, num_scheduled=0, num_accepted=0) for s in LOOP]
    assert rates_of(foreign, 2, 1)["acceptance_length"] is None


def test_a_single_stream_is_steady_from_its_first_token_to_its_end() -> None:
    one = [stream(0, 0.0, 1.0, 3.0), stream(1, 3.0, 4.0, 6.0)]
    assert steady_window(one, 1) == (1.0, 6.0)


def test_slots_that_were_never_busy_together_give_no_rate() -> None:
    with pytest.raises(WindowError, match="--waves"):
        rates_of([stream(0, 0.0, 1.0, 2.0), stream(1, 0.0, 3.0, 4.0)], 2, 1)
    with pytest.raises(WindowError):
        rates_of(LOOP, 5, 1)


def test_an_error_leaves_no_rates_that_could_flatter() -> None:
    broken = [*LOOP[:3], replace(LOOP[3], error="cut", completion_tokens=0)]
    rates = rates_of(broken, 2, 1)
    assert (rates["num_errors"], rates["error"]) == (1, "cut") and "node_tokens_per_s" not in rates


def test_a_spread_is_half_the_distance_of_the_extremes() -> None:
    known = spread_of([3.0, 1.0, 2.0, None])
    assert known is not None and (known.median, known.spread) == (2.0, 1.0)
    assert known.as_json() == {"median": 2.0, "spread": 1.0, "repeats": [3.0, 1.0, 2.0]}
    assert spread_of([None]) is None


def test_ratios_are_formed_within_a_repeat() -> None:
    """The machine slows by half from the first to the last repeat: the ratio does not notice."""
    ratio = paired({0: 12.0, 1: 9.0, 2: 6.0, 3: 1.0}, {0: 10.0, 1: 7.5, 2: 5.0})
    assert ratio is not None and ratio.repeats == pytest.approx((1.2, 1.2, 1.2))
    assert paired({0: 1.0}, {1: 1.0}) is None
    assert best({"a": {0: 1.0, 1: 9.0}, "b": {0: 4.0, 1: 7.0}, "c": {}}) == "b"
    assert best({}) is None


CURVE = [(10.0, 10.0), (40.0, 8.0), (60.0, 4.0), (55.0, 3.0)]  # the last is beaten on both axes


def test_a_frontier_is_read_between_its_points_and_not_beyond_its_end() -> None:
    assert at_throughput(CURVE, 40.0) == Matched(8.0)
    assert at_throughput(CURVE, 50.0) == Matched(6.0)
    assert at_throughput(CURVE, 10.0) == Matched(10.0)
    assert at_throughput(CURVE, 5.0) == Matched(10.0, is_bound=True)
    assert at_throughput(CURVE, 60.1) is None and at_throughput([], 1.0) is None


def measured() -> list[dict[str, Any]]:
    """Three repeats at two loads; the last repeat runs on a machine of half the speed."""
    rows = []
    for repeat, speed in enumerate((1.0, 1.0, 0.5)):
        for label, alone, crowd in (
            ("none", 10.0, 100.0), ("fixed-1", 14.0, 90.0), ("fixed-2", 18.0, 60.0), ("lagged", 18.0, 105.0),
            (BRACKET, 5.0, 50.0), ("mtp1", 6.0, 60.0),
        ):  # fmt: skip
            rows.append(row(label, 1, repeat, alone * speed))
            rows.append(row(label, 16, repeat, crowd * speed))
    return rows


CONTENDERS = contenders_of(["none", "fixed", "mtp1", "lagged"], 2)


def test_lagged_is_compared_with_the_best_fixed_length_of_each_load() -> None:
    report = summary(measured(), CONTENDERS, is_reproducible=True)
    assert report["ratio_to_best_fixed"] == {"1": 1.0, "16": 1.05}
    assert report["by_temperature"]["0"]["best_fixed"] == {"1": "fixed-2", "16": "none"}
    assert report["spread"]["ratio_to_best_fixed"] == {"1": 0.0, "16": 0.0}
    point = report["frontier"]["0"]["lagged"]["16"]["node_tokens_per_s"]
    assert (point["median"], point["spread"]) == (105.0, 26.25) and len(point["repeats"]) == 3


def test_mtp1_is_compared_at_the_same_load_without_drift_and_at_the_same_throughput() -> None:
    of = summary(measured(), CONTENDERS, is_reproducible=True)["by_temperature"]["0"]
    assert of["over_mtp1"] == {"1": 3.0, "16": 1.75}
    # `none` was twice as slow in MTP-1's cluster: half of the gain is the machine's.
    assert of["over_mtp1_without_drift"] == {"1": 1.5, "16": 0.875}
    alone, crowd = of["over_mtp1_at_matched_throughput"]
    assert alone["is_lower_bound"] and alone["ratio"] == pytest.approx(18 / 6)
    between = 18 + (60 - 18) / (105 - 18) * (105 / 16 - 18)
    assert crowd["ratio"] == pytest.approx(between / (60 / 16), abs=1e-3)
    assert (crowd["spread"], crowd["num_repeats"], crowd["is_lower_bound"]) == (0.0, 3, False)


def test_without_mtp1_there_is_nothing_over_it() -> None:
    rows = [one for one in measured() if one["label"] not in ("mtp1", BRACKET)]
    report = summary(rows, CONTENDERS, is_reproducible=True)
    assert report["over_mtp1"] == {} and report["ratio_to_best_fixed"]
    assert report["by_temperature"]["0"]["over_mtp1_at_matched_throughput"] == []


def test_ratios_of_the_report_are_those_of_the_lowest_temperature() -> None:
    rows = measured() + [
        {**one, "temperature": 1.0, "node_tokens_per_s": 7.0} for one in measured()
    ]
    report = summary(rows, CONTENDERS, is_reproducible=True)
    assert report["ratios_at_temperature"] == 0.0 and set(report["frontier"]) == {"0", "1"}
    assert report["by_temperature"]["1"]["ratio_to_best_fixed"]["16"] == 1.0
    assert report["ratio_to_best_fixed"]["16"] == 1.05


def test_one_text_that_differs_breaks_the_run_where_equality_is_promised() -> None:
    odd = row("lagged", 16, digests=["a", "x", "c", "d"])
    rows = [row("none", 1), odd, row("none", 1, temperature=1.0, digests=["p", "q", "r"])]
    report = summary(rows, CONTENDERS, is_reproducible=True)
    assert not report["holds"] and not report["parity"]["equal"]
    assert report["parity"]["num_different"] == 1 and report["parity"]["num_requests"] == 7
    assert "request 1" in report["parity"]["different"][0]
    assert summary(rows, CONTENDERS, is_reproducible=False)["holds"]


def test_texts_of_peers_are_not_compared() -> None:
    contenders = contenders_of(["none"], 2, ["vllm=http://x/v1"])
    rows = [row("none", 1), row("vllm", 1, digests=["other"], acceptance_length=None)]
    report = summary(rows, contenders, is_reproducible=True)
    assert report["holds"] and report["frontier"]["0"]["vllm"]["1"]["acceptance_length"] is None


def test_any_error_fails_the_run_and_is_named() -> None:
    bad = {**row("lagged", 4), "num_errors": 1, "error": "cut"}
    report = summary([row("none", 4), bad], CONTENDERS, is_reproducible=True)
    assert not report["holds"] and report["error_share"] == pytest.approx(1 / 6)
    assert report["errors"][0]["label"] == "lagged" and report["errors"][0]["error"] == "cut"
    assert "lagged" not in report["frontier"]["0"]
