"""What the load tests ask and when, and what they make of the answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from load_tests import report, schedule
from load_tests.prompts import TENANTS, parse_mix


def entry(tenant: str = "code", **changes: object) -> report.Entry:
    facts: dict[str, object] = {
        "tenant": tenant, "at_s": 0.0, "seconds": 2.0, "ttft_s": 0.5, "tpot_s": 0.1, "max_gap_s": 0.2,
        "tokens": 20, "accepted": 6, "rejected": 2, "aborted": False, "error": None, **changes,
    }  # fmt: skip
    return report.Entry(**facts)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(TENANTS))
def test_prompts_depend_on_seed_and_number_alone(name: str) -> None:
    tenant = TENANTS[name]
    asked = [tenant.ask(1, i) for i in range(50)]
    assert asked == [tenant.ask(1, i) for i in range(50)]
    assert asked != [tenant.ask(2, i) for i in range(50)]
    assert len({prompt for prompt, _ in asked}) > 25
    assert all(tenant.max_tokens[0] <= n <= tenant.max_tokens[1] for _, n in asked)


def test_a_mix_is_shares_and_a_bad_one_names_its_part() -> None:
    assert parse_mix("code=3, chat") == {"code": 0.75, "chat": 0.25}
    for text, message in [("prose=1", "prose"), ("code=0", "code needs"), ("math=x", "math needs")]:
        with pytest.raises(ValueError, match=message):
            parse_mix(text)


@pytest.mark.parametrize("shape", sorted(schedule.SHAPES))
def test_a_shape_stays_within_its_peak_reaches_it_and_ends(shape: str) -> None:
    users = [schedule.users_at(shape, 8, t, 100.0) for t in range(100)]
    assert all(u is not None and 1 <= u <= 8 for u in users)
    assert max(u for u in users if u is not None) == 8
    assert schedule.users_at(shape, 8, 100.0, 100.0) is None
    assert schedule.rate_at(shape, 2.0, 50.0, 100.0) == 2.0 * schedule.SHAPES[shape](0.5)


def test_a_summary_counts_each_stream_once_and_failed_ones_bring_no_tokens() -> None:
    entries = [
        entry(),
        entry("chat", ttft_s=1.5),
        entry(error="boom", tokens=5),
        entry(aborted=True, tokens=0),
    ]
    summary = report.summarise(entries, seconds=10.0)
    assert (summary["streams"], summary["aborted"], summary["errors"]) == (2, 1, 1)
    assert (summary["completion_tokens"], summary["tokens_per_s"]) == (40, 4.0)
    assert summary["ttft_s"] == {"p50": 0.5, "p95": 1.5, "p99": 1.5}
    assert summary["tenants"]["chat"]["streams"] == 1
    assert summary["accepted_share"] == 0.75
    assert "boom" in summary["first_errors"][0]
    rows = report.table(summary).splitlines()
    assert [row.split()[0] for row in rows] == ["tenant", "chat", "code", "all"]


@pytest.mark.parametrize(
    ("thresholds", "message"),
    [
        (report.Thresholds(max_error_share=1, min_streams=3), "3 are needed"),
        (report.Thresholds(max_error_share=0.2), "error share 0.333"),
        (report.Thresholds(max_error_share=1, max_ttft_p95_s=0.4), "ttft_s p95 0.5"),
        (report.Thresholds(max_error_share=1, max_gap_p95_s=0.1), "max_gap_s p95 0.2"),
        (report.Thresholds(max_error_share=1, min_tokens_per_s=5.0), "tokens/s 4.0"),
    ],
)
def test_each_threshold_fails_alone(thresholds: report.Thresholds, message: str) -> None:
    summary = report.summarise([entry(), entry(), entry(error="x")], seconds=10.0)
    (failure,) = thresholds.failures(summary)
    assert message in failure
    assert report.Thresholds(max_error_share=0.5).failures(summary) == []


def test_a_run_is_written_read_back_and_drawn(tmp_path: Path) -> None:
    entries = [entry(), entry("chat", error="boom", tpot_s=None, ttft_s=None)]
    summary = report.summarise(entries, seconds=3.0)
    report.write(tmp_path, entries, summary)
    assert report.read(tmp_path) == (entries, summary)
    report.draw(entries, summary, tmp_path / "load.png")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
