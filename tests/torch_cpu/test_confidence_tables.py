"""Calibration tables while serving: the one that fits a request, files of another model, files of before."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.core.calibration import ConfidenceMap
from actors.core.sampling import SamplingBatch, SamplingParams
from actors.engine.drafters.calibration import (
    ConfidenceTables,
    Table,
    copy_tables,
    read_tables,
    write_tables,
)
from actors.engine.drafters.checkpoint import save_drafter
from actors.engine.weights import CheckpointError
from kernels.markov_sample import DraftSampling
from tests.torch_cpu.rank_engines import write_tiny_llama
from tests.torch_cpu.tiny_drafters import random_model, tiny_config

GAMMA = 5
REQUESTS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=0.9, seed=4),
]


def table(rule: str, temperature: float, shift: float) -> Table:
    return Table(
        rule, temperature, ConfidenceMap.straight(np.full(GAMMA, shift), np.full(GAMMA, 2.0))
    )


TABLES = [table("greedy", 0.0, 1.0), table("rejection", 1.0, 2.0), table("rejection", 0.5, 3.0)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    write_tiny_llama(path)
    return path


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    save_drafter(random_model(tiny_config()), tmp_path / "drafter")
    return tmp_path / "drafter"


def sampling(params: list[SamplingParams]) -> DraftSampling:
    return DraftSampling.of(SamplingBatch.of(params))


def test_a_request_gets_the_nearest_table_of_its_rule() -> None:
    chosen = ConfidenceTables(TABLES).chosen(sampling(REQUESTS))
    # Seeded requests have no table here: the nearest temperature of another rule serves.
    assert chosen.tolist() == [0, 1, 2, 1]


def test_confidences_are_those_of_the_map() -> None:
    logits = torch.randn(4, GAMMA)
    found = ConfidenceTables(TABLES).confidences(logits, sampling(REQUESTS))
    for row, shift in enumerate((1.0, 2.0, 3.0, 2.0)):
        torch.testing.assert_close(found[row], torch.sigmoid((logits[row] + shift) / 2.0))
    cut = ConfidenceTables(TABLES).fitting(3, torch.device("cpu"))
    torch.testing.assert_close(cut.confidences(logits[:, :3], sampling(REQUESTS)), found[:, :3])


def bent_table() -> Table:
    rng = np.random.default_rng(0)
    knots, bends = np.sort(rng.normal(size=(GAMMA, 3)), axis=1), rng.random((GAMMA, 3)) - 0.1
    curve = ConfidenceMap(rng.normal(size=GAMMA), np.full(GAMMA, 0.8), knots, bends)
    return Table("coupled", 1.0, curve)


def test_curves_beside_straight_lines_are_those_of_their_maps() -> None:
    bent = bent_table()
    logits = torch.randn(4, GAMMA)
    found = ConfidenceTables([*TABLES, bent]).confidences(logits, sampling(REQUESTS))
    straight = ConfidenceTables(TABLES).confidences(logits, sampling(REQUESTS))
    torch.testing.assert_close(found[:3], straight[:3])
    torch.testing.assert_close(found[3:], torch.from_numpy(bent.map.apply(logits[3:].numpy())))
    cut = ConfidenceTables([*TABLES, bent]).fitting(3, torch.device("cpu"))
    torch.testing.assert_close(cut.confidences(logits[:, :3], sampling(REQUESTS)), found[:, :3])


@pytest.mark.parametrize("extra", [[], [bent_table()]])
def test_tables_are_read_as_written(drafter: Path, target: Path, extra: list[Table]) -> None:
    tables = TABLES + extra
    write_tables(drafter, target, [(each, {"num_rounds": 7}) for each in tables])
    logits = torch.randn(4, GAMMA)
    read = read_tables(drafter, target, GAMMA)
    assert read.num_refused == 0
    torch.testing.assert_close(
        read.confidences(logits, sampling(REQUESTS)),
        ConfidenceTables(tables).confidences(logits, sampling(REQUESTS)),
        atol=1e-4,  # written with four digits
        rtol=0,
    )
    assert json.loads((drafter / "calibration.json").read_text())["tables"][0]["num_rounds"] == 7


@pytest.mark.parametrize("whose", ["drafter", "target"])
def test_a_calibration_of_other_weights_is_refused_and_counted(
    drafter: Path, target: Path, whose: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tables(drafter, target, [(TABLES[0], {})])
    path.write_text(json.dumps({**json.loads(path.read_text()), whose: "0123456789abcdef"}))
    with caplog.at_level(logging.WARNING):
        read = read_tables(drafter, target, GAMMA)
    assert read.num_refused == 1
    assert f"fitted for another {whose}" in caplog.text
    assert "dspark calibrate" in caplog.text
    logits = torch.randn(4, GAMMA)
    torch.testing.assert_close(read.confidences(logits, sampling(REQUESTS)), logits.sigmoid())


def test_files_from_before_identities_and_no_file_at_all(drafter: Path, target: Path) -> None:
    logits = torch.randn(4, GAMMA)
    plain = read_tables(drafter, target, GAMMA)
    torch.testing.assert_close(plain.confidences(logits, sampling(REQUESTS)), logits.sigmoid())
    (drafter / "calibration.json").write_text('{"temperatures": [1.5, 0.5, 1, 1, 1]}')
    old = read_tables(drafter, target, GAMMA)
    scaled = logits / torch.tensor([1.5, 0.5, 1, 1, 1])
    torch.testing.assert_close(old.confidences(logits, sampling(REQUESTS)), scaled.sigmoid())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"temperatures": [1.5, 0.5]}', "must list 5 numbers"),
        ('{"tables": []}', "at least one"),
        ('{"tables": [{"rule": "best", "temperatures": [1, 1, 1, 1, 1]}]}', "rule='best'"),
        ('{"temperatures": [1, 1, 1, 1, 0]}', "above 0"),
        ('{"temperatures": [1, 1, 1, 1, 1], "knots": [[0]]}', "knots"),
        (
            '{"temperatures": [1, 1, 1, 1, 1], "knots": [[0], [1, 2], [], [], []]}',
            "calibration.json",
        ),
        ('{"temperatures": [1, 1, 1, 1, 1], "bends": 3}', "bends"),
    ],
)
def test_unusable_files_are_refused(drafter: Path, target: Path, text: str, says: str) -> None:
    (drafter / "calibration.json").write_text(text)
    with pytest.raises(CheckpointError, match=says):
        read_tables(drafter, target, GAMMA)


def test_a_drafter_written_again_takes_its_tables_along(
    drafter: Path, target: Path, tmp_path: Path
) -> None:
    write_tables(drafter, target, [(TABLES[0], {})])
    again = tmp_path / "again"
    save_drafter(random_model(tiny_config(markov_rank=4)), again)  # another file
    copy_tables(drafter, again)
    assert read_tables(again, target, GAMMA).num_refused == 0
