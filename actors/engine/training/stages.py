"""The stages of a run, from prompts to a drafter directory, whatever starts them: the module's command or `dspark`."""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from actors.engine.drafters.checkpoint import load_drafter, save_drafter
from actors.engine.drafters.model import DraftModel
from actors.engine.training import curves, evaluate, initialise, loop, online, onpolicy, prompts
from actors.engine.training.calibrate import calibrate_drafter
from actors.engine.training.dataset import OnPolicyDataset
from actors.engine.training.evaluation import has_head
from actors.engine.training.frozen_target import FrozenTarget
from actors.engine.training.losses import weights_for
from actors.engine.training.online import FeatureSource, LocalFeatures
from actors.engine.training.parallel import Peers
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
from actors.engine.weights import Checkpoint, CheckpointError, read_config

log = logging.getLogger(__name__)

SMOLLM2_TAPS = (2, 10, 18, 24, 28)  # what the bundled drafters were trained with
SMOLLM2_MASK_ID = 16  # <empty_output>: reserved, never part of a chat
NUM_TAPS = 5
TRAIN_PROMPTS: dict[prompts.Domain, int] = {"code": 6000, "math": 4800, "chat": 6400}
HELD_OUT_PROMPTS: dict[prompts.Domain, int] = {"code": 64, "math": 64, "chat": 64, "prose": 64}
SPLITS = ("train", "held_out", "held_out_t1")  # the last: held-out prompts at temperature 1
HELD_OUT_PROMPT_LEN = 320  # HumanEval stubs are long
HELD_OUT_TOKENS = 100_000  # at most; a few hundred answers say enough


def built_in_prompts(paths: Paths) -> dict[str, int]:
    """Write the lists of built-in prompts; ModuleNotFoundError names a package that they need."""
    train = prompts.build("train", TRAIN_PROMPTS)
    held = prompts.build("held_out", HELD_OUT_PROMPTS)
    sampled = prompts.at_temperature(held, 1.0)
    return _write_lists(paths, {"train": train, "held_out": held, "held_out_t1": sampled})


def user_prompts(paths: Paths, file: Path, held_out_share: float) -> dict[str, int]:
    """Write the lists of the user's own prompts; ValueError names a line that is none."""
    return _write_lists(paths, prompts.read_user(file, held_out_share))


def _write_lists(paths: Paths, lists: dict[str, list[prompts.Prompt]]) -> dict[str, int]:
    for split, found in lists.items():
        prompts.write(found, paths.prompts(split))
    return {split: len(found) for split, found in lists.items()}


def generate(
    paths: Paths,
    args: argparse.Namespace,
    split: str,
    text: onpolicy.PromptText,
    max_tokens: int,
) -> int:
    """Let the target answer the prompts of one split, with features; returns the answer tokens written.

    What is there already is not written again. Raises CheckpointError when it was written with other taps.
    """
    plan = onpolicy.GenerationPlan(
        args.rows, args.max_prompt_len, args.max_answer_len, args.worker, args.workers
    )
    if split != "train":
        plan = replace(plan, max_prompt_len=max(plan.max_prompt_len, HELD_OUT_PROMPT_LEN))
    taps = taps_of(paths, args)
    before = text_taps(paths)
    if before is not None and before != taps:
        raise CheckpointError(
            f"{paths.work} holds text with --taps {' '.join(map(str, before))}; use these, or another --work"
        )
    target = FrozenTarget(paths.target, taps, compute_dtype(), plan.max_len)
    out = onpolicy.ShardWriter(paths.shards(split), args.worker)
    paths.facts.write_text(json.dumps({"taps": taps}) + "\n", encoding="utf-8")
    writer = onpolicy.OnPolicyWriter(target, text, plan, out)
    return writer.run(prompts.read(paths.prompts(split)), max_tokens)


def train(
    paths: Paths,
    args: argparse.Namespace,
    peers: Peers | None = None,
    watch: Callable[[loop.Trainer], None] = lambda _trainer: None,
    source: FeatureSource | None = None,
) -> dict[str, Any]:
    """Start or continue the run; `--refresh` takes in text generated since its last snapshot.

    `watch` gets the trainer before its first step, to look at it and to stop it. With `peers`, all trainers call this.
    `source` gives the features of `--online` text; None: the target is loaded here.
    """
    checkpoint = paths.run / "checkpoint.pt"
    state = torch.load(checkpoint) if checkpoint.exists() else None
    snapshot = None if state is None or args.refresh else state["shards"]
    data = (
        online_text(paths, args, source)
        if args.online
        else dataset(paths, "train", args.kind, snapshot)
    )
    model = first_model(paths, data, args) if state is None else restore(paths, state)
    if model.config.kind != args.kind:
        raise CheckpointError(
            f"{checkpoint} trains a {model.config.kind} drafter, not --kind {args.kind}; "
            "name another --run"
        )
    options = loop.TrainingOptions(
        max_steps=args.steps,
        learning_rate=args.rate,
        warmup_steps=min(loop.WARMUP_STEPS, max(1, args.steps // 10)),
        loss=weights_for(model.config.kind, args.weighting, model.config.block_size),
        num_sequences=min(args.sequences, data.num_usable),
        num_anchors=args.anchors,
        validate_every=args.validate_every,
        checkpoint_every_s=args.checkpoint_seconds,
    )
    is_first = peers is None or peers.rank == 0
    watched = held_out(paths, args.kind, args.validate) if args.validate and is_first else None
    trainer = loop.Trainer(model, data, options, watched, peers)
    if state is not None:
        trainer.load(state)
    watch(trainer)
    trainer.run(paths.run, time.time() + 60 * args.minutes)
    return {
        "step": trainer.step,
        "answer_tokens": data.num_answer_tokens,
        "loss": None if trainer.latest is None else round(trainer.latest.loss, 4),
    }


def local_features(paths: Paths, args: argparse.Namespace) -> LocalFeatures:
    """Return the target as a source of features for the text of `--online`."""
    return LocalFeatures(
        paths.target, taps_of(paths, args), compute_dtype(), online.longest(args.online)
    )


def online_text(
    paths: Paths, args: argparse.Namespace, source: FeatureSource | None
) -> OnPolicyDataset:
    """Return the text of `--online`, with features from `source`."""
    source = source or local_features(paths, args)
    final_norm = Checkpoint(paths.target)["model.norm.weight"] if args.kind == "mtp" else None
    return online.OnlineDataset(args.online, source, tables(paths.target)[1], final_norm)


def first_model(paths: Paths, data: OnPolicyDataset, args: argparse.Namespace) -> DraftModel:
    """Return the drafter a run begins with: new, or the one `--warm-start` names."""
    if args.warm_start:
        return warm_model(paths, data, args.warm_start, shape(paths, args))
    return new_model(paths, data, shape(paths, args))


def export(paths: Paths, out: Path, *, in_eight_bits: bool = False) -> dict[str, Any]:
    """Write the drafter directory; calibrate on held-out blocks where there are some, and a confidence head."""
    checkpoint = paths.run / "checkpoint.pt"
    if not checkpoint.exists():
        raise CheckpointError(
            f"{checkpoint} does not exist; train first, with this --work and --run"
        )
    state = torch.load(checkpoint)
    model = restore(paths, state)
    extra = {
        "num_target_layers": int(read_config(paths.target)["num_hidden_layers"]),
        "training": {"steps": state["step"], "answer_tokens": state["answer_tokens"]},
    }
    save_drafter(model, out, extra, in_eight_bits=in_eight_bits)
    curves.plot_log(paths.run / "log.jsonl", out / "training.png")
    done: dict[str, Any] = {"drafter": str(out), "step": state["step"]}
    try:
        data = dataset(paths, "held_out", model.config.kind)
    except FileNotFoundError as missing:
        log.warning("neither measured nor calibrated: %s", missing)
        return done
    shipped = load_drafter(out, *tables(paths.target))
    sizes = gammas(model.config.block_size)
    result, blocks = evaluate.evaluate(shipped, data, sizes)
    done |= report(result)
    if has_head(shipped):
        done |= calibrate_drafter(out, paths.target, {("greedy", 0.0): blocks})["greedy"].measured()
    return done


def shape(paths: Paths, args: argparse.Namespace) -> initialise.Shape:
    """Return the drafter the options describe, for this target."""
    vocab = int(read_config(paths.target)["vocab_size"])
    return initialise.Shape(
        kind=args.kind,
        gamma=args.gamma,
        num_layers=args.layers,
        markov_rank=args.rank,
        markov_head=args.head,
        draft_vocab_size=args.draft_vocab if args.draft_vocab < vocab else 0,
        taps=taps_of(paths, args),
        mask_token_id=mask_token(paths) if args.mask_token is None else args.mask_token,
        qk_norm=args.qk_norm,
    )


def taps_of(paths: Paths, args: argparse.Namespace) -> tuple[int, ...]:
    """Return the target layers to read: as given, else those of the text that is there, else a spread."""
    if args.taps:
        return tuple(args.taps)
    before = text_taps(paths)
    if before is not None:
        return before
    if paths.is_bundled:
        return SMOLLM2_TAPS
    return spread(int(read_config(paths.target)["num_hidden_layers"]))


def text_taps(paths: Paths) -> tuple[int, ...] | None:
    """Return the taps that the text of this work folder was written with; None where nothing says so."""
    if not paths.facts.is_file():
        return None
    return tuple(json.loads(paths.facts.read_text(encoding="utf-8"))["taps"])


def spread(depth: int) -> tuple[int, ...]:
    """Return five layers from the second to the third last (spec 1.3), or all but the last of a shallow target."""
    if depth < 2 * NUM_TAPS - 1:
        return tuple(range(max(1, depth - 1)))[-NUM_TAPS:]
    return tuple(round(1 + i * (depth - 4) / (NUM_TAPS - 1)) for i in range(NUM_TAPS))


def mask_token(paths: Paths) -> int:
    """Return an id that no text has: the padding token, else the last row of the vocabulary."""
    if paths.is_bundled:
        return SMOLLM2_MASK_ID
    config = read_config(paths.target)
    pad = config.get("pad_token_id")
    return int(pad) if isinstance(pad, int) else int(config["vocab_size"]) - 1
