"""What `dspark chaos` says without a cluster: its options, and the verdict on kept histories."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cluster.chaos.plan import KINDS
from cluster.cli import main
from tests.pure.test_chaos_checker import chunk, sound


@pytest.fixture
def kept(tmp_path: Path) -> list[str]:
    """Two histories: a sound one, and one in which a token is missing."""
    broken = sound()
    chunk(broken, 0).pop()
    paths = []
    for name, events in (("sound", sound()), ("broken", broken)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(event) + "\n" for event in events))
        paths.append(str(path))
    return paths


def test_a_sound_history_is_a_pass_and_status_zero(
    kept: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chaos", "--check", kept[0]]) == 0
    assert "\nPASS: 2 faults" in capsys.readouterr().out


def test_a_lost_token_in_one_of_several_histories_is_status_one(
    kept: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chaos", "--json", "--check", *kept]) == 1
    printed = capsys.readouterr()
    told = json.loads(printed.out.splitlines()[-1])
    assert (told["kills"], told["lost_tokens"], told["leaks"]) == (4, 1, 0)
    assert {"median", "max"} <= set(told["recovery_s"]) and told["histories"] == kept
    assert "FAIL" in printed.err


def test_a_file_that_is_no_history_is_refused_by_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"at_s": 1}\n')
    assert main(["chaos", "--check", str(path)]) == 1
    assert f"{path}: line 1 is no event" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--kinds", "rank,node"], ["--kills", "0"], ["--streams=-1"]])
def test_bad_options_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["chaos", *options])
    assert "use" in capsys.readouterr().err


def test_faults_of_a_drafter_need_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["--set", "model.drafter=null", "--out", str(tmp_path)]
    assert main(["chaos", *options]) == 1
    assert "leave drafter, pause-drafter out of --kinds" in capsys.readouterr().err


def test_the_help_names_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["chaos", "--help"])
    shown = " ".join(re.sub(r"-\n\s*", "-", capsys.readouterr().out).split())
    assert all(f"{kind} (" in shown for kind in KINDS)
