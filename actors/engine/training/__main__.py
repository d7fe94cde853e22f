"""Train a DSpark drafter, one stage a command; each can be stopped and run again.

python -m actors.engine.training prompts  --work W
python -m actors.engine.training generate --work W --split train
python -m actors.engine.training train    --work W --minutes 90
python -m actors.engine.training export   --work W --out DIR
python -m actors.engine.training evaluate --work W --drafter DIR
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from actors.engine.drafters.checkpoint import load_dspark, save_dspark
from actors.engine.drafters.dspark import DSparkModel
from actors.engine.gguf_import import ensure_smollm2
from actors.engine.training import calibrate, evaluate, initialise, loop, onpolicy, prompts
from actors.engine.training.dataset import OnPolicyDataset
from actors.engine.training.frozen_target import FrozenTarget
from actors.engine.training.losses import LossWeights
from actors.engine.weights import embedding_tables, read_config

TAPS = (2, 10, 18, 24, 28)
NUM_LAYERS = 2
BLOCK_SIZE = 5
DRAFT_VOCAB_SIZE = 8192
MARKOV_RANK = 128
MASK_TOKEN_ID = 16  # <empty_output>: reserved, never part of a chat
TRAIN_PROMPTS: dict[prompts.Domain, int] = {"code": 6000, "math": 4800, "chat": 6400}
HELD_OUT_PROMPTS: dict[prompts.Domain, int] = {"code": 64, "math": 64, "chat": 64}
HELD_OUT_PROMPT_LEN = 320  # HumanEval stubs are long
LOSS = LossWeights(ce=0.3, tv=0.3, confidence=0.3, distill=0.7)


@dataclass(frozen=True)
class Paths:
    """Where a training run keeps its files, outside the repository."""

    work: Path
    target: Path

    def prompts(self, split: str) -> Path:
        """The prompt list of `split`."""
        return self.work / f"{split}.jsonl"

    def shards(self, split: str) -> Path:
        """The on-policy shards of `split`."""
        return self.work / split

    @property
    def run(self) -> Path:
        """Checkpoint, log and curve."""
        return self.work / "run"


def make_prompts(paths: Paths, _args: argparse.Namespace) -> dict[str, Any]:
    """Write both prompt lists."""
    train = prompts.build("train", TRAIN_PROMPTS)
    held_out = prompts.build("held_out", HELD_OUT_PROMPTS)
    prompts.write(train, paths.prompts("train"))
    prompts.write(held_out, paths.prompts("held_out"))
    return {"train": len(train), "held_out": len(held_out)}


def generate(paths: Paths, args: argparse.Namespace) -> dict[str, Any]:
    """Let the target answer the prompts of one split, with features."""
    plan = onpolicy.GenerationPlan(worker=args.worker, num_workers=args.workers)
    if args.split == "held_out":
        plan = replace(plan, max_prompt_len=HELD_OUT_PROMPT_LEN)
    target = FrozenTarget(paths.target, TAPS, torch.bfloat16, plan.max_len)
    out = onpolicy.ShardWriter(paths.shards(args.split), args.worker)
    eos = int(read_config(paths.target)["eos_token_id"])
    writer = onpolicy.OnPolicyWriter(target, onpolicy.ChatText(paths.target), plan, eos, out)
    return {"tokens": writer.run(prompts.read(paths.prompts(args.split)), args.tokens)}


def train(paths: Paths, args: argparse.Namespace) -> dict[str, Any]:
    """Start or continue the run; `--refresh` takes in text generated since its last snapshot."""
    checkpoint = paths.run / "checkpoint.pt"
    state = torch.load(checkpoint) if checkpoint.exists() else None
    snapshot = None if state is None or args.refresh else state["shards"]
    data = OnPolicyDataset(paths.shards("train"), snapshot)
    model = new_model(paths, data) if state is None else restore(paths, state)
    options = loop.TrainingOptions(max_steps=args.steps, learning_rate=args.rate, loss=LOSS)
    trainer = loop.Trainer(model, data, options)
    if state is not None:
        trainer.load(state)

    def stop(_signal: int, _frame: object) -> None:
        trainer.stop_requested = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    trainer.run(paths.run, time.time() + 60 * args.minutes)
    return {"step": trainer.step, "answer_tokens": data.num_answer_tokens}


def export(paths: Paths, args: argparse.Namespace) -> dict[str, Any]:
    """Calibrate on held-out blocks and write the drafter directory."""
    state = torch.load(paths.run / "checkpoint.pt")
    model = restore(paths, state)
    extra = {"num_target_layers": int(read_config(paths.target)["num_hidden_layers"])}
    save_dspark(model, args.out, extra)
    shipped = load_dspark(args.out, *embedding_tables(paths.target, torch.bfloat16))
    result, blocks = evaluate.evaluate(shipped, OnPolicyDataset(paths.shards("held_out")))
    # Half of the answers fit, the other half says how good the fit is; all of them fit what ships.
    logits, labels = evaluate.pooled(blocks[::2])
    shift = calibrate.fit_shift(logits, labels)
    halves = calibrate.fit(logits + shift, labels)
    logits, labels = evaluate.pooled(blocks[1::2])
    unseen = calibrate.survival_error(logits + shift, labels, halves.temperatures)
    logits, labels = evaluate.pooled(blocks)
    shift = calibrate.fit_shift(logits, labels)
    with torch.no_grad():
        assert model.confidence_head is not None
        model.confidence_head.proj.bias.add_(shift)
    save_dspark(model, args.out, extra)
    calibration = calibrate.fit(logits + shift, labels)
    calibration.write(args.out / "calibration.json")
    loop.plot_log(paths.run / "log.jsonl", args.out / "training.png")
    return {
        "step": state["step"],
        "confidence_shift": round(shift, 3),
        "ece_unseen_half": [round(e, 4) for e in unseen],
        **report(result),
    }


def measure(paths: Paths, args: argparse.Namespace) -> dict[str, Any]:
    """Measure a drafter directory on the held-out text."""
    model = load_dspark(args.drafter, *embedding_tables(paths.target, torch.bfloat16))
    data = OnPolicyDataset(paths.shards("held_out"))
    result, _blocks = evaluate.evaluate(model, data, per_domain=args.per_domain)
    return report(result)


def new_model(paths: Paths, data: OnPolicyDataset) -> DSparkModel:
    """Return a drafter at its starting weights, its vocabulary chosen from text and prompts."""
    config = initialise.config_for_target(
        paths.target,
        taps=TAPS,
        num_layers=NUM_LAYERS,
        block_size=BLOCK_SIZE,
        draft_vocab_size=DRAFT_VOCAB_SIZE,
        markov_rank=MARKOV_RANK,
        mask_token_id=MASK_TOKEN_ID,
    )
    counts = data.token_counts(config.vocab_size)
    text = onpolicy.ChatText(paths.target)
    for prompt in prompts.read(paths.prompts("train")):
        ids = torch.tensor(text.encode(prompt.text))
        counts.index_add_(0, ids, torch.full((len(ids),), 0.25))
    embed, head = embedding_tables(paths.target, torch.bfloat16)
    chosen = initialise.choose_draft_ids(counts, config.draft_vocab_size)
    model = DSparkModel(config, embed, head, chosen)
    initialise.initialise_from_target(model, paths.target, seed=1)
    return model


def restore(paths: Paths, state: dict[str, Any]) -> DSparkModel:
    """Return the model of a checkpoint."""
    embed, head = embedding_tables(paths.target, torch.bfloat16)
    config = initialise.config_for_target(
        paths.target,
        taps=TAPS,
        num_layers=NUM_LAYERS,
        block_size=BLOCK_SIZE,
        draft_vocab_size=len(state["draft_ids"]),
        markov_rank=MARKOV_RANK,
        mask_token_id=MASK_TOKEN_ID,
    )
    model = DSparkModel(config, embed, head, state["draft_ids"])
    model.load_state_dict(state["model"])
    return model


def report(result: dict[str, dict[int, evaluate.Acceptance]]) -> dict[str, Any]:
    """Return acceptance lengths by domain and gamma, and their mean over domains."""
    gammas = sorted(next(iter(result.values())))
    by_domain = {
        domain: {f"gamma_{g}": round(tally[g].length, 3) for g in gammas}
        for domain, tally in sorted(result.items())
    }
    means = {f"gamma_{g}": round(evaluate.macro(result, g), 3) for g in gammas}
    return {"acceptance_length": {**by_domain, "macro": means}}


STAGES = {
    "prompts": make_prompts,
    "generate": generate,
    "train": train,
    "export": export,
    "evaluate": measure,
}


def main(arguments: list[str] | None = None) -> None:
    """Run one stage and write its result as one JSON line to stdout."""
    parser = argparse.ArgumentParser(prog="python -m actors.engine.training", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--work", type=Path, required=True, help="folder of the run")
    parser.add_argument("--target", type=Path, help="target directory (default: SmolLM2-135M)")
    parser.add_argument("--split", choices=("train", "held_out"), default="train")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="answer tokens to write")
    parser.add_argument("--worker", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5_500, help="where the cosine ends")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--minutes", type=float, default=90.0, help="stop training after")
    parser.add_argument("--refresh", action="store_true")
    parser.add_argument("--per-domain", type=int, help="held-out answers of each domain")
    parser.add_argument("--out", type=Path, help="drafter directory to write")
    parser.add_argument("--drafter", type=Path, help="drafter directory to measure")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    paths = Paths(args.work, args.target or ensure_smollm2())
    sys.stdout.write(json.dumps(STAGES[args.stage](paths, args)) + "\n")


if __name__ == "__main__":
    main()
