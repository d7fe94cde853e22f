"""Train a drafter, one stage a command; each can be stopped and run again. `dspark generate|train` do the same.

python -m actors.engine.training prompts  --work W
python -m actors.engine.training generate --work W --split train
python -m actors.engine.training train    --work W --kind dspark --gamma 7 --minutes 90
python -m actors.engine.training export   --work W --kind dspark --out DIR
python -m actors.engine.training evaluate --work W --drafter DIR
python -m actors.engine.training tiny-target --out DIR
python -m actors.engine.training held-out --work W --out DIR
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from actors.engine.drafters.checkpoint import load_drafter
from actors.engine.gguf_import import ensure_smollm2
from actors.engine.training import evaluate, loop, onpolicy, options, stages, tiny
from actors.engine.training.held_out import write_text
from actors.engine.training.runs import Paths, dataset, gammas, report, tables


def make_prompts(paths: Paths, _args: argparse.Namespace) -> dict[str, Any]:
    """Write both prompt lists."""
    return {**stages.built_in_prompts(paths)}


def generate(paths: Paths, args: argparse.Namespace) -> dict[str, Any]:
    """Let the target answer the prompts of one split, with features."""
    text = onpolicy.ChatText(paths.target)
    return {"tokens": stages.generate(paths, args, args.split, text, args.tokens)}


def train(paths: Paths, args: argparse.Namespace) -> dict[str, Any]:
    """Start or continue the run; the first SIGTERM or SIGINT lets it save and end."""

    def watch(trainer: loop.Trainer) -> None:
        def stop(_signal: int, _frame: object) -> None:
            trainer.stop_requested = True

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)

    return stages.train(paths, args, watch=watch)


def export(paths: Paths, args: argparse.Namespace) -> dict[str, Any]:
    """Write the drafter directory."""
    return stages.export(paths, args.out, in_eight_bits=args.eight_bits)


def measure(paths: Paths, args: argparse.Namespace) -> dict[str, Any]:
    """Measure a drafter directory on the held-out text."""
    model = load_drafter(args.drafter, *tables(paths.target))
    data = dataset(paths, "held_out", model.config.kind)
    sizes = gammas(model.config.block_size)
    result, _blocks = evaluate.evaluate(model, data, sizes, per_domain=args.per_domain)
    return report(result)


def ship(paths: Paths, args: argparse.Namespace) -> dict[str, Any]:
    """Write the held-out answers of the work folder, ids only, to `--out`."""
    roots = [paths.shards(split) for split in stages.SPLITS if split != "train"]
    written = write_text([root for root in roots if root.is_dir()], paths.target, args.out)
    return {"answers": written}


STAGES = {
    "prompts": make_prompts,
    "generate": generate,
    "train": train,
    "export": export,
    "evaluate": measure,
    "held-out": ship,
}
TINY = "tiny-target"


def main(arguments: list[str] | None = None) -> None:
    """Run one stage and write its result as one JSON line to stdout."""
    parser = argparse.ArgumentParser(prog="python -m actors.engine.training", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("stage", choices=(*STAGES, TINY))
    parser.add_argument("--work", type=Path, default=Path("work"), help="folder of the run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--target", type=Path, help="target directory (default: SmolLM2-135M)")
    parser.add_argument("--split", choices=stages.SPLITS, default="train")
    options.add_generate_options(parser)
    options.add_train_options(parser)
    parser.add_argument("--per-domain", type=int, help="held-out answers of each domain")
    parser.add_argument("--out", type=Path, help="directory to write")
    parser.add_argument("--drafter", type=Path, help="drafter directory to measure")
    parser.add_argument(
        "--eight-bits", action="store_true", help="export at half the size: int8 rows with scales"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of CPU time for a tiny target")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    if args.stage == TINY:
        done = tiny.write(args.out, args.seconds)
    else:
        target = args.target or ensure_smollm2()
        paths = Paths(args.work, target, args.run_name or args.kind, is_bundled=args.target is None)
        done = STAGES[args.stage](paths, args)
    sys.stdout.write(json.dumps(done) + "\n")


if __name__ == "__main__":
    main()
