"""Trainers that share a step: the steps of one trainer, the same weights everywhere, and they stop together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from actors.engine.training.loop import Trainer
from actors.engine.training.parallel import Peers
from tests.torch_cpu.test_training_kinds import dataset, trainer
from tests.torch_cpu.thread_ranks import ThreadCollective, on_ranks
from tests.torch_cpu.training_shards import shards

STEPS = 5


def alone(root: Path, name: str, size: int, steps: int = STEPS) -> list[Trainer]:
    """As many equal trainers; made one after the other, for their weights come from the one global generator."""
    return [trainer(name, dataset(root, name), steps) for _ in range(size)]


def join(own: Trainer, collective: ThreadCollective) -> Trainer:
    return Trainer(own.model, own.data, own.options, peers=Peers(collective))


@pytest.mark.parametrize("name", ["vanilla", "rnn", "eagle3"])
@pytest.mark.parametrize("size", [2, 3])
def test_trainers_make_the_steps_of_one(tmp_path: Path, name: str, size: int) -> None:
    root = shards(tmp_path / "s")
    one_alone, *others = alone(root, name, size + 1)
    expected = [one_alone.train_step() for _ in range(STEPS)]

    def work(collective: ThreadCollective) -> tuple[Trainer, list[float]]:
        own = join(others[collective.rank], collective)
        return own, [own.train_step().loss for _ in range(STEPS)]

    made, _ = on_ranks(size, work)
    for own, losses in made:
        assert losses == pytest.approx([entry.loss for entry in expected], rel=1e-4)
        assert own.latest is not None
        assert own.latest.agree == pytest.approx(expected[-1].agree, abs=1e-3)
        for (key, one), other, same in zip(
            one_alone.model.named_parameters(),
            own.model.parameters(),
            made[0][0].model.parameters(),
            strict=True,
        ):
            torch.testing.assert_close(other, one, atol=2e-4, rtol=1e-3, msg=key)
            assert torch.equal(other, same), f"{key} differs between trainers"


def test_the_first_trainer_writes_and_all_stop_when_one_asks(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = alone(shards(tmp_path / "s"), "vanilla", 2, steps=40)

    def work(collective: ThreadCollective) -> int:
        own = join(made[collective.rank], collective)
        own.stop_requested = collective.rank == 1
        own.run(tmp_path / f"run-{collective.rank}")
        return own.step

    steps, _ = on_ranks(2, work)
    assert steps == [1, 1]  # the step in which one asked is the last of both
    log = (tmp_path / "run-0" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == [1]
    assert (tmp_path / "run-0" / "checkpoint.pt").is_file()
    assert not (tmp_path / "run-1").exists()


def test_all_trainers_begin_with_the_weights_of_the_first(tmp_path: Path) -> None:
    made = alone(shards(tmp_path / "s"), "vanilla", 2)

    def work(collective: ThreadCollective) -> list[torch.Tensor]:
        own = made[collective.rank]
        with torch.no_grad():
            for parameter in own.model.parameters():
                parameter.add_(collective.rank)
        Peers(collective).share(own.model)
        return [p.detach() for p in own.model.parameters()]

    (first, second), _ = on_ranks(2, work)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_step_with_fewer_answers_than_trainers_is_refused() -> None:
    def work(collective: ThreadCollective) -> None:
        with pytest.raises(ValueError, match="--sequences"):
            Peers(collective).part([1])

    on_ranks(2, work)
