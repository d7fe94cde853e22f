"""Ratios of drafters trained alike: who enters, what the ratio is, what its interval says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.engine.drafters.checkpoint import save_drafter
from actors.engine.training.compare import Scene
from actors.engine.training.equal_data import AnswerRounds, Entrant, alike, ratio, report
from actors.engine.training.replay import Blocks
from cluster.commands.evaluate import _equal_data
from tests.torch_cpu.rank_engines import HIDDEN, VOCAB, write_tiny_llama
from tests.torch_cpu.tiny_drafters import every_config, random_model


def rounds(committed: dict[str, float], each: float = 10.0) -> AnswerRounds:
    """Answers called DOMAIN-NUMBER."""
    domains = {answer: answer.split("-")[0] for answer in committed}
    return AnswerRounds(domains, committed, dict.fromkeys(committed, each))


def many(length: float, noise: float, seed: int, count: int = 40) -> AnswerRounds:
    rng = np.random.default_rng(seed)
    names = [f"{domain}-{i}" for domain in ("code", "math") for i in range(count)]
    return rounds({name: 10 * (length + noise * rng.normal()) for name in names})


def entrant(name: str, plain: str, trained_on: tuple[int, int] | None, layers: int = 2) -> Entrant:
    return Entrant(name, plain, layers, trained_on, {0.0: many(2.0, 0.1, 1)})


def test_an_answer_is_counted_as_the_whole_text_is() -> None:
    accept = np.array([[1.0, 1.0], [1.0, 0.5], [0.0, 0.0], [0.25, 0.0]])
    inside = np.ones((4, 2), bool)
    logits = np.zeros((4, 2), np.float32)
    blocks = Blocks(accept, accept > 0.5, inside, logits, "code", "code-7")
    own = AnswerRounds.of([blocks])
    assert own.domains == {"code-7": "code"}
    assert own.committed == {"code-7": 4}
    assert own.rounds == {"code-7": 2.0}  # at anchor 0, which accepts two, and at anchor 3


def test_a_ratio_is_of_macro_means_and_prose_does_not_enter() -> None:
    over = rounds({"code-0": 20, "code-1": 40, "math-0": 40, "math-1": 40, "prose-0": 990})
    under = rounds({"code-0": 10, "code-1": 20, "math-0": 20, "math-1": 20, "prose-0": 10})
    found = ratio(over, under)
    assert found == {"ratio": 2.0, "low": 2.0, "high": 2.0}  # paired: twice on every answer
    uneven = rounds({"code-0": 15, "code-1": 15, "math-0": 45})
    assert ratio(uneven, under)["ratio"] == pytest.approx((1.5 + 4.5) / (1.5 + 2.0), abs=1e-4)


def test_the_interval_covers_the_truth_and_narrows_with_answers() -> None:
    widths, covered = {}, 0
    for count in (10, 160):
        found = [ratio(many(2.2, 0.4, s, count), many(2.0, 0.4, 99 + s, count)) for s in range(20)]
        widths[count] = np.mean([f["high"] - f["low"] for f in found])
        covered += sum(f["low"] <= 1.1 <= f["high"] for f in found)
    assert covered >= 33  # of 40; 38 are expected
    assert 2.5 < widths[10] / widths[160] < 6  # 4, the root of 16


def test_one_answer_of_a_domain_makes_no_interval() -> None:
    over = rounds({"code-0": 20, "code-1": 40, "math-0": 40})
    under = rounds({"code-0": 10, "code-1": 20, "math-0": 20})
    assert ratio(over, under) == {"ratio": 2.0, "low": None, "high": None}
    shown = {"answer_tokens": 9, "steps": 1, "temperature_0": {"dspark/x": ratio(over, under)}}
    assert _equal_data(shown).splitlines()[-1].split() == ["dspark/x", "2.000"]


def test_answers_are_paired_by_name_whatever_their_order() -> None:
    over, under = many(2.2, 0.4, 1), many(2.0, 0.4, 2)
    answers = list(under.committed)[::-1]
    turned = AnswerRounds(
        *(
            {answer: side[answer] for answer in answers}
            for side in (under.domains, under.committed, under.rounds)
        )
    )
    assert ratio(over, turned) == ratio(over, under)


def test_only_drafters_trained_alike_are_compared() -> None:
    young, old = (640, 100), (5000, 900)
    every = [
        entrant("dspark", "dspark", old),
        entrant("dspark@compared", "dspark", young),
        entrant("dflash@run-deep", "dflash", young, 4),
        entrant("dflash", "dflash", young),
        entrant("unknown", "eagle3", None),
        entrant("eagle3", "eagle3", (640, 101)),
    ]
    named = {name: e.name for name, e in alike(every).items()}
    assert named == {
        "dspark": "dspark@compared",
        "dflash": "dflash",
        "dflash@run-deep": "dflash@run-deep",
    }
    found = report(every)
    assert found is not None
    assert (found["steps"], found["answer_tokens"]) == young
    assert set(found["temperature_0"]) == {"dspark/dflash", "dspark/dflash@run-deep"}
    assert found["drafters"]["dflash@run-deep"] == {"entry": "dflash@run-deep", "num_layers": 4}


@pytest.mark.parametrize(
    "every",
    [
        [],
        [entrant("dspark", "dspark", (1, 1))],
        [entrant("dspark", "dspark", None), entrant("dflash", "dflash", None)],
        [entrant("dflash", "dflash", (1, 1)), entrant("eagle3", "eagle3", (1, 1))],
        [entrant("dspark", "dspark", (2, 1)), entrant("eagle3", "eagle3", (1, 1))],
    ],
)
def test_without_two_trained_alike_there_is_no_ratio(every: list[Entrant]) -> None:
    assert report(every) is None


def test_drafters_that_ship_to_be_compared_come_after_the_bundled_one(tmp_path: Path) -> None:
    bundled = tmp_path / "bundled"
    (tmp_path / "target").mkdir()
    write_tiny_llama(tmp_path / "target")
    shape: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "draft_vocab_size": 30,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HIDDEN // 4,
    }
    configs = every_config(**shape)
    for folder, kind in {
        "drafter": "vanilla",
        "compared/a": "vanilla",
        "compared/b": "rnn",
    }.items():
        eight = folder != "drafter"
        save_drafter(random_model(configs[kind]), bundled / folder, in_eight_bits=eight)
    scene = Scene(tmp_path / "target", bundled)
    named = {c.name: Path(c.where).relative_to(bundled) for c in scene.candidates()}
    assert named == {
        "dspark": Path("drafter"),
        "dspark@compared": Path("compared/a"),
        "dspark_rnn": Path("compared/b"),
    }
