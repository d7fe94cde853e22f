"""docs/train.md from top to bottom, with small numbers: each command as the page has it, until serving would begin."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from actors.engine.drafters import config as drafter_config
from actors.engine.training import stages
from actors.engine.training.__main__ import main as module
from actors.engine.training.losses import WEIGHTINGS
from actors.engine.training.options import KINDS, MARKOV_HEADS
from actors.engine.training.options import WEIGHTINGS as OFFERED
from actors.link import Membership
from actors.peers import Seat
from cluster.cli import main as dspark
from cluster.parts import drafter_engine, target_engine
from configs.load import load
from tests.torch_cpu.family_checkpoints import write_checkpoint

PAGE = Path(__file__).resolve().parents[2] / "docs" / "train.md"
SMALLER = {
    "--seconds": "0.3",
    "--max-answer-len": "12",
    "--steps": "6",
    "--minutes": "5",
}


def commands() -> list[list[str]]:
    """The words of every command of the page's first block, without the interpreter."""
    block = PAGE.read_text(encoding="utf-8").split("```")[1]
    lines = [shlex.split(line)[1:] for line in block.strip().splitlines()]
    for words in lines:
        for option, value in SMALLER.items():
            if option in words:
                words[words.index(option) + 1] = value
    return lines


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_leads_from_nothing_to_a_drafter_that_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    tiny, generate, train, serve, demo = commands()
    assert tiny[:2] == ["-m", "actors.engine.training"]
    module(tiny[2:])
    assert json.loads(capsys.readouterr().out)["steps"] >= 1
    prompts = Path("my-model/prompts.jsonl").read_text(encoding="utf-8").splitlines()
    Path("my-model/prompts.jsonl").write_text("\n".join(prompts[:24]), encoding="utf-8")
    assert dspark([*generate, "--held-out-share", "0.3", "--json"]) == 0
    written = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sum(written["prompts"].values()) == 24
    assert all(count > 0 for count in written["tokens"].values())
    assert dspark([*generate, "--held-out-share", "0.3", "--json"]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["tokens"] == {"train": 0, "held_out": 0}
    assert dspark([*train, "--validate-every", "3", "--json"]) == 0
    trained = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (trained["step"], trained["drafter"]) == (6, "my-drafter")
    assert trained["acceptance_length"]["macro"]["gamma_5"] >= 1
    names = {path.name for path in Path("my-drafter").iterdir()}
    assert names >= {"config.json", "model.safetensors", "calibration.json", "training.png"}

    assert (serve[0], demo[0]) == ("serve", "demo")
    settings = load("laptop-cpu", [word for word in serve if "=" in word])
    seat = Seat("drafter-0", Membership.create())
    engine, target = drafter_engine(settings, seat), target_engine(settings, seat)
    assert engine.spec.tap_layer_ids == target.spec.tap_layer_ids
    assert engine.spec.gamma == settings.drafter.gamma == 5


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"text": ""}', "1: needs"),
        ("hello", "1: no JSON"),
        ('{"text": "a", "temperature": 9}', "temperature=9"),
    ],
)
def test_a_bad_prompt_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, named: str
) -> None:
    (tmp_path / "p.jsonl").write_text(line + "\n", encoding="utf-8")
    target = write_checkpoint(tmp_path / "m", "Qwen3ForCausalLM")
    asked = ["--work", tmp_path / "w", "--target", target, "--prompts", tmp_path / "p.jsonl"]
    assert dspark(["generate", *map(str, asked)]) == 1
    assert named in capsys.readouterr().err


def test_more_trainers_than_answers_a_step_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--work", str(tmp_path), "--trainers", "3", "--sequences", "2"]
    assert dspark(words) == 2
    assert "--sequences 2" in capsys.readouterr().err


def test_taps_spread_over_the_depth_as_the_papers_do() -> None:
    assert stages.spread(36) == (1, 9, 17, 25, 33)
    assert stages.spread(40) == (1, 10, 19, 28, 37)
    assert stages.spread(4) == (0, 1, 2)
    assert stages.spread(1) == (0,)


def test_the_command_offers_every_kind_head_and_weighting() -> None:
    assert KINDS == drafter_config.KINDS
    assert MARKOV_HEADS == drafter_config.MARKOV_HEADS
    assert OFFERED == WEIGHTINGS
