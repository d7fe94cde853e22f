"""Train a drafter, one stage a command; each can be stopped and run again.

python -m actors.engine.training prompts  --work W
python -m actors.engine.training generate --work W --split train
python -m actors.engine.training train    --work W --kind dspark --gamma 7 --minutes 90
python -m actors.engine.training export   --work W --kind dspark --out DIR
python -m actors.engine.training evaluate --work W --drafter DIR
python -m actors.engine.training held-out --work W --out DIR
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from actors.engine.drafters.checkpoint import load_drafter, save_drafter
from actors.engine.drafters.config import KINDS, MARKOV_HEADS
from actors.engine.drafters.model import DraftModel
from actors.engine.gguf_import import ensure_smollm2
from actors.engine.training import curves, evaluate, initialise, loop, onpolicy, prompts
from actors.engine.training.calibrate import calibrate_drafter
from actors.engine.training.dataset import OnPolicyDataset
from actors.engine.training.evaluation import has_head
from actors.engine.training.frozen_target import FrozenTarget
from actors.engine.training.held_out import write_text
from actors.engine.training.losses import WEIGHTINGS, weights_for
from actors.engine.training.runs import (
    Paths,
    compute_dtype,
    dataset,
    gammas,
    held_out,
    new_model,
    report,
    restore,
    tables,
    warm_model,
)
from actors.engine.weights import CheckpointError, read_config

TAPS = (2, 10, 18, 24, 28)
DRAFT_VOCAB_SIZE = 8192
MASK_TOKEN_ID = 16  # <empty_output>: reserved, never part of a chat
TRAIN_PROMPTS: dict[prompts.Domain, int] = {"code": 6000, "math": 4800, "chat": 6400}
HELD_OUT_PROMPTS: dict[prompts.Domain, int] = {"code": 64, "math": 64, "chat": 64, "prose": 64}
SPLITS = ("train", "held_out", "held_out_t1")  # the last: held-out prompts at temperature 1
HELD_OUT_PROMPT_LEN = 320  # HumanEval stubs are long


def make_prompts(paths: Paths, _args: argparse.Namespace) -> dict[str, Any]:
    """Write the prompt lists."""
    train = prompts.build("train", TRAIN_PROMPTS)
    held_out = prompts.build("held_out", HELD_OUT_PROMPTS)
    prompts.write(train, paths.prompts("train"))
    prompts.write(held_out, paths.prompts("held_out"))
    prompts.write(prompts.at_temperature(held_out, 1.0), paths.prompts("held_out_t1"))
    return {"train": len(train), "held_out": len(held_out)}


def generate(paths: Paths, args: argparse.Namespace) -> dict[str, Any]:
    """Let the target answer the prompts of one split, with features."""
    plan = onpolicy.GenerationPlan(args.rows, worker=args.worker, num_workers=args.workers)
    if args.split != "train":
        plan = replace(plan, max_prompt_len=HELD_OUT_PROMPT_LEN)
    target = FrozenTarget(paths.target, tuple(args.taps), compute_dtype(), plan.max_len)
    out = onpolicy.ShardWriter(paths.shards(args.split), args.worker)
    eos = int(read_config(paths.target)["eos_token_id"])
    writer = onpolicy.OnPolicyWriter(target, onpolicy.ChatText(paths.target), plan, eos, out)
    return {"tokens": writer.run(prompts.read(paths.prompts(args.split)), args.tokens)}


def train(paths: Paths, args: argparse.Namespace) -> dict[str, Any]:
    """Start or continue the run; `--refresh` takes in text generated since its last snapshot."""
    checkpoint = paths.run / "checkpoint.pt"
    state = torch.load(checkpoint) if checkpoint.exists() else None
    snapshot = None if state is None or args.refresh else state["shards"]
    data = dataset(paths, "train", args.kind, snapshot)
    model = first_model(paths, data, args) if state is None else restore(paths, state)
    if model.config.kind != args.kind:
        raise CheckpointError(
            f"{checkpoint} trains a {model.config.kind} drafter, not --kind {args.kind}; "
            "name another --run"
        )
    loss = weights_for(model.config.kind, args.weighting, model.config.block_size)
    options = loop.TrainingOptions(
        max_steps=args.steps,
        learning_rate=args.rate,
        loss=loss,
        num_sequences=args.sequences,
        num_anchors=args.anchors,
        validate_every=args.validate_every,
    )
    watched = held_out(paths, args.kind, args.validate) if args.validate else None
    trainer = loop.Trainer(model, data, options, watched)
    if state is not None:
        trainer.load(state)

    def stop(_signal: int, _frame: object) -> None:
        trainer.stop_requested = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    trainer.run(paths.run, time.time() + 60 * args.minutes)
    return {"step": trainer.step, "answer_tokens": data.num_answer_tokens}


def first_model(paths: Paths, data: OnPolicyDataset, args: argparse.Namespace) -> DraftModel:
    """Return the drafter a run begins with: new, or the one `--warm-start` names."""
    if args.warm_start:
        return warm_model(paths, data, args.warm_start, shape(args))
    return new_model(paths, data, shape(args))


def export(paths: Paths, args: argparse.Namespace) -> dict[str, Any]:
    """Write the drafter directory; calibrate on held-out blocks where there is a confidence head."""
    state = torch.load(paths.run / "checkpoint.pt")
    model = restore(paths, state)
    tokens = dataset(paths, "train", model.config.kind, state["shards"]).num_answer_tokens
    extra = {
        "num_target_layers": int(read_config(paths.target)["num_hidden_layers"]),
        "training": {"steps": state["step"], "answer_tokens": tokens},
    }
    save_drafter(model, args.out, extra)
    curves.plot_log(paths.run / "log.jsonl", args.out / "training.png")
    shipped = load_drafter(args.out, *tables(paths.target))
    data = dataset(paths, "held_out", model.config.kind)
    sizes = gammas(model.config.block_size)
    result, blocks = evaluate.evaluate(shipped, data, sizes)
    done = {"step": state["step"], **report(result)}
    if has_head(shipped):
        found = calibrate_drafter(args.out, paths.target, {("greedy", 0.0): blocks})
        done |= found["greedy"].measured()
    return done


def measure(paths: Paths, args: argparse.Namespace) -> dict[str, Any]:
    """Measure a drafter directory on the held-out text."""
    model = load_drafter(args.drafter, *tables(paths.target))
    data = dataset(paths, "held_out", model.config.kind)
    sizes = gammas(model.config.block_size)
    result, _blocks = evaluate.evaluate(model, data, sizes, per_domain=args.per_domain)
    return report(result)


def ship(paths: Paths, args: argparse.Namespace) -> dict[str, Any]:
    """Write the held-out answers of the work folder, ids only, to `--out`."""
    roots = [paths.shards(split) for split in SPLITS if split != "train"]
    written = write_text([root for root in roots if root.is_dir()], paths.target, args.out)
    return {"answers": written}


def shape(args: argparse.Namespace) -> initialise.Shape:
    """Return the drafter the options describe."""
    return initialise.Shape(
        kind=args.kind,
        gamma=args.gamma,
        num_layers=args.layers,
        markov_rank=args.rank,
        markov_head=args.head,
        draft_vocab_size=args.draft_vocab,
        taps=tuple(args.taps),
        mask_token_id=args.mask_token,
        qk_norm=args.qk_norm,
    )


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about the drafter itself; a run that is continued keeps what it began with."""
    new = parser.add_argument_group("a new drafter")
    new.add_argument("--kind", choices=KINDS, default="dspark")
    new.add_argument("--gamma", type=int, default=7, help="draft tokens a block (MTP: 1)")
    new.add_argument("--layers", type=int, default=2, help="draft layers of DSpark and DFlash")
    new.add_argument("--rank", type=int, default=128, help="of DSpark's sequential head")
    new.add_argument("--head", choices=MARKOV_HEADS, default="vanilla", help="DSpark's")
    new.add_argument(
        "--draft-vocab", type=int, default=DRAFT_VOCAB_SIZE, help="most frequent ids; 0: all"
    )
    new.add_argument("--taps", type=int, nargs="+", default=TAPS, help="target layers, from 0")
    new.add_argument("--mask-token", type=int, default=MASK_TOKEN_ID, help="a reserved id")
    new.add_argument("--qk-norm", action=argparse.BooleanOptionalAction, default=True)
    new.add_argument(
        "--warm-start",
        type=Path,
        metavar="DIR",
        help="begin with this drafter's weights; of the options here only --kind, --gamma and --qk-norm then count",
    )
    new.add_argument("--weighting", choices=WEIGHTINGS, default="blend", help="of the loss")


STAGES = {
    "prompts": make_prompts,
    "generate": generate,
    "train": train,
    "export": export,
    "evaluate": measure,
    "held-out": ship,
}


def main(arguments: list[str] | None = None) -> None:
    """Run one stage and write its result as one JSON line to stdout."""
    parser = argparse.ArgumentParser(prog="python -m actors.engine.training", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--work", type=Path, required=True, help="folder of the run")
    parser.add_argument("--target", type=Path, help="target directory (default: SmolLM2-135M)")
    parser.add_argument("--split", choices=SPLITS, default="train")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="answer tokens to write")
    parser.add_argument("--rows", type=int, default=48, help="answers written at once")
    parser.add_argument("--worker", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5_500, help="where the cosine ends")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--minutes", type=float, default=90.0, help="stop training after")
    parser.add_argument("--sequences", type=int, default=8, help="answers a step")
    parser.add_argument("--anchors", type=int, default=32, help="blocks of each answer")
    parser.add_argument(
        "--validate", type=int, default=6, help="held-out answers of each domain; 0: none"
    )
    parser.add_argument("--validate-every", type=int, default=200, help="steps between")
    parser.add_argument("--refresh", action="store_true")
    parser.add_argument("--run", help="name of the run (default: the kind)")
    add_shape_options(parser)
    parser.add_argument("--per-domain", type=int, help="held-out answers of each domain")
    parser.add_argument("--out", type=Path, help="directory to write")
    parser.add_argument("--drafter", type=Path, help="drafter directory to measure")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    paths = Paths(args.work, args.target or ensure_smollm2(), args.run or args.kind)
    sys.stdout.write(json.dumps(STAGES[args.stage](paths, args)) + "\n")


if __name__ == "__main__":
    main()
