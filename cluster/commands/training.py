"""`dspark generate` and `dspark train`: from a target and prompts to a drafter directory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.engine.training import options
from cluster.commands.signals import interruptible, on_signal
from cluster.console import CommandError, emit_json, say
from configs.load import load

if TYPE_CHECKING:
    from actors.engine.training.runs import Paths

BUNDLED = "smollm2-135m"
SPLITS = ("train", "held_out")


def add_generate_options(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='one {"text": …, "domain": …, "temperature": …} a line (default: built-in ones)',
    )
    parser.add_argument(
        "--held-out-share",
        type=float,
        default=0.1,
        help="of one's own prompts, kept for measuring (default 0.1)",
    )
    parser.add_argument(
        "--split", choices=("both", *SPLITS), default="both", help="answer these (default both)"
    )
    parser.add_argument("--taps", type=int, nargs="+", metavar="LAYER", help="as for `train`")
    options.add_generate_options(parser)


def add_train_options(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument(
        "--trainers",
        type=int,
        default=1,
        help="processes that share every step, on Ray; 1: in this process, without Ray (default)",
    )
    parser.add_argument(
        "--export", type=Path, metavar="DIR", help="then write the drafter there, calibrated"
    )
    options.add_train_options(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    options.add_work(parser)
    parser.add_argument("--target", metavar="MODEL", help="as model.path, which is the default")


def generate(arguments: argparse.Namespace) -> int:
    """Write the target's answers to prompts, with features, below --work."""
    if not 0 <= arguments.held_out_share < 1:
        raise CommandError(
            f"--held-out-share {arguments.held_out_share}: use 0 to 1, 1 excluded", exit_code=2
        )
    paths = _paths(arguments, "")
    written: dict[str, Any] = {}
    with _named_errors():
        import torch

        from actors.engine.training import stages

        torch.set_num_threads(arguments.threads)
        counts = _prompt_lists(paths, arguments)
        text = _ServedText(paths.target)
        for split in SPLITS if arguments.split == "both" else (arguments.split,):
            most = arguments.tokens
            if arguments.split == "both" and split == "held_out":
                most = min(most, stages.HELD_OUT_TOKENS)
            with interruptible():
                written[split] = stages.generate(paths, arguments, split, text, most)
    report = {"work": str(paths.work), "prompts": counts, "tokens": written}
    if arguments.json:
        emit_json(report)
    else:
        for split, count in written.items():
            say(f"{split}: {count} answer tokens more in {paths.shards(split)}")
    return 0


def train(arguments: argparse.Namespace) -> int:
    """Start or continue a run; with --export, write the drafter at its end."""
    if arguments.trainers < 1:
        raise CommandError(f"--trainers {arguments.trainers}: use at least 1", exit_code=2)
    if arguments.sequences < arguments.trainers:
        raise CommandError(
            f"--sequences {arguments.sequences}: give each of --trainers {arguments.trainers} one",
            exit_code=2,
        )
    for name in ("online", "warm_start"):  # a trainer may run in another folder
        if getattr(arguments, name) is not None:
            setattr(arguments, name, getattr(arguments, name).expanduser().resolve())
    paths = _paths(arguments, arguments.run_name or arguments.kind)
    with _named_errors():
        import torch

        from actors.engine.training import stages

        torch.set_num_threads(arguments.threads)
        if arguments.trainers == 1:
            report = stages.train(paths, arguments, watch=_stop_on_signal)
        else:
            report = _on_ray(paths, arguments)
        if arguments.export:
            report |= stages.export(paths, arguments.export)
    if arguments.json:
        emit_json(report)
        return 0
    say(f"step {report['step']}: log, curves and checkpoint in {paths.run}")
    if arguments.export:
        for domain, lengths in report.get("acceptance_length", {}).items():
            say(f"  {domain}: " + ", ".join(f"{n} {v}" for n, v in lengths.items()))
        where = "" if paths.is_bundled else f"--set model.path={paths.target} "
        say(f"serve it with: dspark serve {where}--set model.drafter={arguments.export}")
    return 0


def _on_ray(paths: Paths, arguments: argparse.Namespace) -> dict[str, Any]:
    from cluster.training_run import TrainingRun, train_on_ray

    run = TrainingRun(paths, arguments, arguments.trainers)
    on_signal(run.stop)
    return train_on_ray(run)


def _stop_on_signal(trainer: Any) -> None:
    def stop() -> None:
        trainer.stop_requested = True

    on_signal(stop)


def _paths(arguments: argparse.Namespace, run_name: str) -> Paths:
    config = load(arguments.config, arguments.set)
    with _named_errors():
        from actors.engine.checkpoint import find_model
        from actors.engine.training.runs import Paths

        name = arguments.target or config.model.path
        target = find_model(name).resolve()
    work = arguments.work.expanduser().resolve()
    work.mkdir(parents=True, exist_ok=True)
    return Paths(work, target, run_name, is_bundled=name == BUNDLED)


def _prompt_lists(paths: Paths, arguments: argparse.Namespace) -> dict[str, int]:
    """Write the lists, or keep those that are there already."""
    from actors.engine.training import prompts, stages

    if arguments.prompts:
        return stages.user_prompts(paths, arguments.prompts, arguments.held_out_share)
    if all(paths.prompts(split).is_file() for split in SPLITS):
        return {split: len(prompts.read(paths.prompts(split))) for split in SPLITS}
    try:
        return stages.built_in_prompts(paths)
    except ModuleNotFoundError as error:
        raise CommandError(
            f"the built-in prompts need a package ({error}); or give your own with --prompts FILE"
        ) from error


class _ServedText:
    """Prompts as the server writes them: the checkpoint's own chat template, or the plain text without one."""

    def __init__(self, target: Path) -> None:
        from cluster.text import TextCodec

        self._codec = TextCodec.from_directory(target)

    def encode(self, text: str) -> list[int]:
        if not self._codec.has_chat_template:
            return self._codec.encode(text, add_special_tokens=True)
        turns = [{"role": "user", "content": text}]
        return self._codec.encode(self._codec.render_chat(turns), add_special_tokens=False)


@contextmanager
def _named_errors() -> Iterator[None]:
    """What the stages raise about files and options becomes one line."""
    from actors.engine.weights import CheckpointError
    from cluster.text import ModelFilesError

    try:
        yield
    except (CheckpointError, FileNotFoundError, ModelFilesError, ValueError) as error:
        raise CommandError(str(error)) from error
