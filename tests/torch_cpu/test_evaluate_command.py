"""`dspark evaluate` and `dspark calibrate` on a tiny target: what other tools read, files, plots, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engine.drafters.checkpoint import save_drafter
from actors.engine.drafters.config import DrafterConfig
from actors.engine.drafters.protocol import DrafterOptions
from actors.engine.drafters.serve import load_engine
from cluster.cli import main
from tests.torch_cpu.rank_engines import HIDDEN, VOCAB, write_tiny_llama
from tests.torch_cpu.tiny_drafters import every_config, random_model
from tests.torch_cpu.training_shards import shards

GAMMA = 3

pytestmark = pytest.mark.timeout(600)

NAMES = {"dspark": "vanilla", "dspark_rnn": "rnn", "dflash": "dflash", "eagle3": "eagle3", "mtp1": "mtp"}  # fmt: skip
SERIES = ("survival", "conditional", "ece_raw", "ece_calibrated", "ece_floor", "ece_floor_answers")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("work")
    (path / "target").mkdir()
    write_tiny_llama(path / "target")
    for split, at in (("held_out", 0.0), ("held_out_t1", 1.0)):
        shards(path / split, 4, VOCAB, HIDDEN, temperature=at)
    shape = {
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "draft_vocab_size": 30,
        "block_size": GAMMA,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HIDDEN // 4}
    configs: dict[str, DrafterConfig] = every_config(**shape, **heads)
    for name, config in NAMES.items():
        extra = {"training": {"steps": 4, "answer_tokens": 99}}
        save_drafter(random_model(configs[config], std=0.1), path / name, extra)
    deep = replace(configs["dflash"], num_hidden_layers=3)
    save_drafter(random_model(deep, std=0.1), path / "dflash_3", extra)
    save_drafter(
        random_model(configs["vanilla"], std=0.1),
        path / "longer",
        {"training": {"steps": 5, "answer_tokens": 99}},
    )
    return path


def run(work: Path, *arguments: object) -> int:
    return main(
        [*map(str, arguments), "--set", f"model.path={work / 'target'}", "--work", str(work)]
    )


def report_of(text: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(text.splitlines()[-1])
    return report


def test_the_report_has_what_other_tools_read(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = {name: name for name in NAMES}
    folders |= {"dspark": "longer", "equal": "dspark", "dflash_3": "dflash_3"}
    named = [f"--drafter={name}={work / folder}" for name, folder in folders.items()]
    assert run(work, "evaluate", "--json", "--no-latency", "--limit", 2, *named) == 0
    report = report_of(capsys.readouterr().out)
    assert set(report["drafters"]) == set(folders)
    for name in NAMES:
        entry = report["drafters"][name]
        gamma = 1 if name == "mtp1" else GAMMA
        for at in (entry, entry["temperature_0"], entry["temperature_1"]):
            assert 1 <= at["acceptance_length"] <= gamma + 1
            assert set(at["by_domain"]) == {"code", "math"}
            assert all(len(at[key]) == gamma for key in SERIES)
        steps = 5 if name == "dspark" else 4
        assert (entry["gamma"], entry["steps"], entry["answer_tokens"]) == (gamma, steps, 99)
        assert entry["acceptance_length"] == entry["temperature_1"]["acceptance_length"]
        lengths = entry["temperature_0"]["by_domain"].values()
        assert entry["temperature_0"]["acceptance_length"] == pytest.approx(
            sum(lengths) / 2, abs=1e-3
        )
    equal = report["equal_data"]
    assert (equal["steps"], equal["answer_tokens"]) == (4, 99)
    assert equal["drafters"]["dspark"] == {"entry": "equal", "num_layers": 2}
    for at in ("temperature_0", "temperature_1"):
        pairs = {f"dspark/{n}" for n in (*NAMES, "dflash_3") if n != "dspark"}
        assert set(equal[at]) == pairs
        for pair, found in equal[at].items():
            other = report["drafters"][pair.removeprefix("dspark/")][at]["acceptance_length"]
            own = report["drafters"]["equal"][at]["acceptance_length"]
            assert found["ratio"] == pytest.approx(own / other, abs=2e-3)
            assert found["low"] <= found["ratio"] <= found["high"]
    assert report["depth"]["dflash_3"]["num_layers"] == 3
    own = report["drafters"]["equal"]["acceptance_length"]
    assert report["depth"]["dspark"] == {"num_layers": 2, "acceptance_length": own}
    assert report["temperature"] == 1


def test_the_cost_of_a_draft_is_measured_by_block_length_and_drawn(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--json", "--temperature", 0, "--limit", 2, "--out", tmp_path]
    named = [f"--drafter={name}={work / name}" for name in ("dspark", "dflash")]
    assert run(work, "evaluate", *arguments, *named, "--only=dspark") == 0
    report = report_of(capsys.readouterr().out)
    assert set(report["drafters"]) == {"dspark"}
    entry = report["drafters"]["dspark"]
    lengths = entry["latency"]["draft_ms_by_gamma"]
    assert set(lengths) == {str(n) for n in (GAMMA, 4, 8, 12, 16)}
    assert entry["draft_ms"] == lengths[str(GAMMA)] > 0
    shares = entry["latency"]["draft_share_of_round"].values()
    assert all(0 < share < 1 for share in shares)
    growth = entry["latency"]["round_growth"]
    assert (growth["from"], growth["to"]) == (4, 16)
    assert growth["low"] <= growth["share"] <= growth["high"]
    assert (report["temperature"], entry["temperature"]) == (0, 0)
    assert json.loads((tmp_path / "evaluation.json").read_text()) == report
    pytest.importorskip("matplotlib")
    names = {"positions", "acceptance", "thresholds", "reliability", "latency"}
    assert {p.stem for p in tmp_path.glob("*.png")} == names


def test_tables_for_people(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--limit", 3, "--temperature", 0, "--no-latency"]
    assert run(work, "evaluate", f"--drafter=mine={work / 'dspark'}", *arguments) == 0
    out = capsys.readouterr().out
    assert "temperature 0" in out
    assert "temperature 1" not in out
    assert "mine" in out
    assert "macro over code, math" in out


def test_calibration_is_written_and_served(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = work / "dspark"
    assert run(work, "calibrate", "--json", "--drafter", drafter, "--out", tmp_path) == 0
    report = report_of(capsys.readouterr().out)
    assert set(report["tables"]) == {"greedy", "rejection", "coupled"}
    for entry in report["tables"].values():
        assert len(entry["ece_unseen"]) == len(entry["ece_floor"]) == GAMMA
        assert len(entry["ece_floor_answers"]) == len(entry["bends"]) == GAMMA
    options = DrafterOptions("served", dtype=torch.float32)
    engine = load_engine(drafter, work / "target", options)
    assert engine.spec.num_refused_calibrations == 0
    pytest.importorskip("matplotlib")
    assert {p.stem for p in tmp_path.glob("*.png")} == {
        "reliability-greedy",
        "reliability-rejection",
        "reliability-coupled",
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["evaluate", "--drafter", "dspark"], "write NAME=DIR"),
        (["evaluate", "--limit", "0"], "use at least 1"),
        (["evaluate"], "no drafter"),
        (["evaluate", "--drafter", "a=dflash", "--only", "b"], "--only b: there is a"),
        (["calibrate", "--drafter", "dflash"], "no confidence head"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    work: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [a.replace("dflash", str(work / "dflash")) for a in arguments]
    assert run(work, *given) != 0
    assert says in capsys.readouterr().err


def test_without_held_out_text_the_remedy_is_named(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["evaluate", f"--drafter=a={work / 'dspark'}", "--work", str(tmp_path)]
    assert main([*arguments, "--set", f"model.path={work / 'target'}"]) == 1
    assert "--work" in capsys.readouterr().err
