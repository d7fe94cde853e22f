"""`dspark bench` as a command, with scripted clusters: what is measured, written, kept, and refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.cli import main
from cluster.frontier import command, drive, machine, rates, setup
from cluster.frontier.ledger import FILE
from configs.schema import ClusterConfig
from tests.pure.frontier_endpoint import Endpoint


class Stand:
    """Stands for the clusters: one scripted endpoint, and which policy was in force when it was asked."""

    def __init__(self) -> None:
        self.endpoint = Endpoint()
        self.opened: list[ClusterConfig] = []
        self.policies: list[tuple[str, int]] = []
        self.endpoint_url, self.num_nodes = "http://x/v1", 1
        self.warnings: list[str] = []
        self.fail_after: int | None = None

    def follow(self, wanted: ClusterConfig) -> None:
        self.policies.append((wanted.policy.name, wanted.policy.static_length))
        if self.fail_after is not None and len(self.policies) > self.fail_after:
            raise KeyboardInterrupt

    @contextmanager
    def open(self, config: ClusterConfig) -> Iterator[Stand]:
        self.opened.append(config)
        yield self


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stand:
    stand = Stand()
    monkeypatch.setattr(command, "opened", stand.open)
    monkeypatch.setattr(drive.Server.__init__, "__kwdefaults__", {
        "is_peer": False, "open_client": stand.endpoint.open,
    })  # fmt: skip
    # Answers take no time here: whether two of them were ever under way together is up to the threads.
    monkeypatch.setattr(rates, "steady_window", lambda s, _: (0.0, 1.0 + max(x.last_s for x in s)))
    monkeypatch.setattr(machine, "load", lambda _: {"busy_cores": 0.1, "load_average": 0.2})
    monkeypatch.setattr(setup.platform, "node", lambda: "here")
    monkeypatch.setattr(setup, "BUNDLED", tmp_path / "models")  # where no MTP-1 drafter is
    return stand


SMALL = ["bench", "--quick", "--concurrency", "1,2", "--tokens", "4", "--json"]


def bench(tmp_path: Path, *more: str) -> int:
    return main([*SMALL, "--out", str(tmp_path / "out"), *more])


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return report


def test_the_frontier_is_measured_written_and_told(
    stand: Stand, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert bench(tmp_path) == 0
    report = told(capsys)
    assert set(report["ratio_to_best_fixed"]) == {"1", "2"} and report["parity"]["equal"]
    assert set(report["frontier"]["0"]) == {"none", "fixed-1", "fixed-3", "fixed-5", "lagged"}
    for name in ("over_mtp1", "spread", "machine", "command", "date", "order"):
        assert name in report
    assert report["repeats"] == 2 and report["holds"] is True
    assert "mtp1" in report["left_out"][0]
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {FILE, "frontier.json", "frontier.md", "frontier.png", "budget.png"}
    assert "| lagged" in (tmp_path / "out" / "frontier.md").read_text(encoding="utf-8")
    assert {name for name, _ in stand.policies} == {"none", "static_length", "lagged"}
    (config,) = stand.opened
    assert config.target.max_running >= 2 and config.model.numerics == "reproducible"


def test_a_run_that_was_broken_off_goes_on_where_it_stopped(
    stand: Stand, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand.fail_after = 12
    assert bench(tmp_path) == 130
    kept = (tmp_path / "out" / FILE).read_text().splitlines()
    assert 0 < len(kept) < 20
    stand.fail_after = None
    stand.policies.clear()
    assert bench(tmp_path) == 2  # not without being asked to
    assert bench(tmp_path, "--resume") == 0
    assert len((tmp_path / "out" / FILE).read_text().splitlines()) == 20
    num_asked = len(stand.endpoint.bodies)
    assert bench(tmp_path, "--resume") == 0
    assert len(stand.endpoint.bodies) == num_asked, "everything was there"
    assert told(capsys)["holds"] is True


def test_another_drafter_or_length_is_another_measurement(stand: Stand, tmp_path: Path) -> None:
    assert bench(tmp_path) == 0
    num_asked = len(stand.endpoint.bodies)
    assert bench(tmp_path, "--resume", "--set", "drafter.gamma=4") == 0
    assert len(stand.endpoint.bodies) > num_asked + 40


def test_mtp1_runs_in_a_cluster_of_its_own_beside_none(
    stand: Stand, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mtp"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    assert bench(tmp_path, "--mtp1", str(folder), "--policies", "none,mtp1,lagged") == 0
    ours, theirs, ours_again = stand.opened
    assert theirs.drafter.gamma == 1 and theirs.model.drafter == str(folder)
    assert ours == ours_again and ours.model.drafter == "bundled"
    report = told(capsys)
    assert set(report["over_mtp1"]) == {"1", "2"} and report["left_out"] == []
    assert set(report["spread"]["over_mtp1_without_drift"]) == {"1", "2"}


def test_texts_that_differ_between_policies_fail_the_run(
    stand: Stand, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def says(body: dict[str, Any]) -> str:
        return f"{stand.policies[-1][0]} {body['messages'][0]['content']}"

    stand.endpoint._says = says
    assert bench(tmp_path) == 1
    report = told(capsys)
    assert report["holds"] is False and report["parity"]["num_different"] > 0
    assert main([*SMALL, "--set", "model.numerics=fast"]) == 0


def test_a_peer_is_measured_in_the_same_turns_and_not_compared(
    stand: Stand, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path, "--endpoint", "vllm=http://y/v1", "--policies", "none,lagged") == 0
    report = told(capsys)
    assert set(report["frontier"]["0"]) == {"none", "lagged", "vllm"}
    cells = report["order"][0]["cells"]
    assert {cell.split("|")[0] for cell in cells[:3]} == {"none", "lagged", "vllm"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--policies", "best"], "--policies best"),
        (["--repeats", "0"], "--repeats 0"),
        (["--waves", "1"], "--waves 1"),
        (["--set", "model.drafter=null"], "nothing to compare"),
        (["--mtp1", "/nowhere"], "--mtp1 /nowhere"),
        (["--endpoint", "http://y"], "NAME="),
        (["--engine-only", "--ranks", "2"], "one of them"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    stand: Stand, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *more]) == 2
    assert message in capsys.readouterr().err and stand.opened == []


def test_other_load_is_refused_before_anything_starts(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "load", lambda _: {"busy_cores": 999.0, "load_average": 999.0})
    assert main(SMALL) == 1
    assert "--force" in capsys.readouterr().err and stand.opened == []
    assert main([*SMALL, "--force"]) == 0
    report = told(capsys)
    assert "--force" in report["warnings"][0] and report["num_disturbed"] > 0
