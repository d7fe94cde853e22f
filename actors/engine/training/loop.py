"""The training loop: exact resume, atomic checkpoints, a log line a step, a loss curve."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from actors.engine.drafters.model import DraftModel
from actors.engine.training.curves import plot_log
from actors.engine.training.dataset import Batch, OnPolicyDataset
from actors.engine.training.losses import Labels, LossWeights, block_loss, confidence_loss
from actors.engine.training.parallel import Peers
from actors.engine.training.validation import HeldOut
from configs.machine import multiplies_bfloat16

WARMUP_STEPS = 60


@dataclass(frozen=True)
class TrainingOptions:
    """One run. `max_steps` shapes the cosine and may change at a resume; the rest should not."""

    max_steps: int
    learning_rate: float = 1e-3
    final_rate: float = 0.03  # of the peak
    warmup_steps: int = WARMUP_STEPS
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    num_sequences: int = 8
    num_anchors: int = 32
    seed: int = 1
    checkpoint_every_s: float = 240.0
    loss: LossWeights = field(default_factory=LossWeights)
    bf16: bool = field(default_factory=multiplies_bfloat16)
    validate_every: int = 200  # steps

    def rate(self, step: int) -> float:
        """Return the learning rate of `step`: linear warm-up, then a cosine to `final_rate`."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        done = min(1.0, step / max(1, self.max_steps))
        floor = self.final_rate
        return (
            self.learning_rate * warm * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
        )


@dataclass(frozen=True)
class StepLog:
    """What one step measured; rates are weighted means over its blocks, per slot."""

    step: int
    loss: float
    ce: float
    tv: float
    distill: float
    confidence: float
    agree: list[float]
    accept: list[float]
    rate: float
    seconds: float
    held_out: dict[str, Any] | None = None  # see `HeldOut.measure`, on the steps that end with it


class Trainer:
    """Trains `model` on a dataset; every step's batch depends on (seed, step) and the snapshot only."""

    def __init__(
        self,
        model: DraftModel,
        data: OnPolicyDataset,
        options: TrainingOptions,
        held_out: HeldOut | None = None,
        peers: Peers | None = None,
    ) -> None:
        """Build the optimiser; call `load` to continue an earlier run. `held_out` is measured now and then.

        With `peers`, a step is shared with other trainers; the first of them writes.
        """
        self.model, self.data, self.options = model, data, options
        self.held_out, self.peers = held_out, peers
        self.is_first = peers is None or peers.rank == 0
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": options.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=options.learning_rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.step = 0
        self.stop_requested = False  # set it from a signal handler: the run saves and returns
        self.until_s: float | None = None  # time.time() at which to stop
        self.latest: StepLog | None = None
        self._num_asking = 0.0  # trainers that wanted to stop during the last step
        self.to_draft = torch.full((model.config.vocab_size,), -1, dtype=torch.long)
        self.to_draft[model.draft_ids] = torch.arange(model.config.draft_vocab_size)

    def train_step(self) -> StepLog:
        """Run one optimiser step and return its measurements."""
        started = time.perf_counter()
        rate = self.options.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        rng = np.random.default_rng((self.options.seed, self.step))
        chances = self.options.loss.slots(self.model.config.block_size).double().numpy()
        drawn = self.data.draw(rng, self.options.num_sequences, self.options.num_anchors, chances)
        self.optimizer.zero_grad(set_to_none=True)
        num_kept = sum(int(d.kept.sum()) for d in drawn)
        mine = self.peers.part(drawn) if self.peers else drawn
        total, facts = self.losses(self.data.batch(mine), num_kept)
        total.backward()
        if self.peers is not None:
            asks = facts.new_tensor([float(self._wants_to_stop())])
            facts = self.peers.add_gradients(self.model, torch.cat((asks, facts)))
            self._num_asking, facts = float(facts[0]), facts[1:]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip_norm)
        self.optimizer.step()
        self.step += 1
        seconds = time.perf_counter() - started
        due = self.held_out is not None and self.step % self.options.validate_every == 0
        measured = self.held_out.measure(self.model) if self.held_out is not None and due else None
        fields = _log_fields(facts, self.model.config.block_size)
        self.latest = StepLog(
            step=self.step, rate=rate, seconds=seconds, held_out=measured, **fields
        )
        return self.latest

    def losses(self, batch: Batch, num_kept: int) -> tuple[Tensor, Tensor]:
        """Return (total loss, what `_log_fields` reads): parts of a mean over `num_kept` slots of all trainers.

        A slot of weight w is kept with probability w and then weighs one: the same loss in the mean,
        for about half the work over the vocabulary.
        """
        model, options = self.model, self.options
        gamma, width = model.config.block_size, model.config.hidden_size
        kept = batch.kept.flatten().nonzero()[:, 0]
        inputs = batch.inputs(None if options.bf16 else torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16):
            hidden, codes, w2 = model.kept_slots(inputs, batch.previous, kept)
        weights = torch.full((len(kept),), 1 / max(1, num_kept))
        labels = Labels(
            self.to_draft[batch.labels.flatten()[kept]],
            batch.teacher_hidden.view(-1, width)[kept],
            batch.teacher_lse.flatten()[kept],
            weights,
        )
        vocabulary = block_loss(hidden, codes, w2, model.head, labels, options.loss)
        logits = model.slot_confidences(hidden, batch.previous.flatten()[kept])
        confidence = torch.zeros(())
        if logits is not None:
            confidence = confidence_loss(logits, vocabulary.accept, weights)
        total = vocabulary.total + options.loss.confidence * confidence
        slots = kept % gamma
        terms = (total, vocabulary.ce, vocabulary.tv, vocabulary.distill, confidence)
        counts = (torch.ones(len(kept)), vocabulary.agree.float(), vocabulary.accept)
        sums = [torch.zeros(gamma).index_add_(0, slots, values) for values in counts]
        return total, torch.cat((torch.stack([t.detach() for t in terms]), *sums))

    def run(self, out_dir: Path, until_s: float | None = None) -> None:
        """Train to `max_steps`, the wall-clock time `until_s` or `stop_requested`; then save."""
        self.until_s = until_s
        if self.peers is not None:
            self.peers.share(self.model)
        if not self.is_first:
            for _ in self._steps():
                pass
            return
        out_dir.mkdir(parents=True, exist_ok=True)
        _drop_later_entries(out_dir / "log.jsonl", self.step)
        saved = time.monotonic()
        with (out_dir / "log.jsonl").open("a", encoding="utf-8") as log:
            for entry in self._steps():
                log.write(json.dumps(asdict(entry)) + "\n")
                if time.monotonic() - saved > self.options.checkpoint_every_s:
                    log.flush()
                    self.save(out_dir / "checkpoint.pt")
                    saved = time.monotonic()
        self.save(out_dir / "checkpoint.pt")
        plot_log(out_dir / "log.jsonl", out_dir / "loss.png")

    def _wants_to_stop(self) -> bool:
        return self.stop_requested or (self.until_s is not None and time.time() >= self.until_s)

    def _ends(self) -> bool:
        """Whether no step follows; trainers of one run say the same."""
        asked = self._wants_to_stop() if self.peers is None else self._num_asking > 0
        return asked or self.step >= self.options.max_steps

    def _steps(self) -> Iterator[StepLog]:
        bar = tqdm(
            total=self.options.max_steps,
            initial=self.step,
            desc="training",
            unit="step",
            mininterval=5.0,
            disable=not self.is_first,
        )
        smooth = None
        while not self._ends():
            entry = self.train_step()
            smooth = entry.loss if smooth is None else 0.98 * smooth + 0.02 * entry.loss
            bar.set_postfix(loss=f"{smooth:.3f}", agree=f"{entry.agree[0]:.2f}", refresh=False)
            bar.update()
            yield entry
        bar.close()

    def save(self, path: Path) -> None:
        """Write model, optimiser, step and data snapshot; the file is replaced whole or not at all."""
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "shards": self.data.shards,
            "answer_tokens": self.data.num_answer_tokens,
            "draft_ids": self.model.draft_ids,
            "config": self.model.config.to_json(),
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `save` wrote (read with torch.load)."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = int(state["step"])


def _log_fields(facts: Tensor, gamma: int) -> dict[str, Any]:
    """Return fields of StepLog; facts [5 + 3 gamma]: five terms, then slots that counted, agreed, were accepted."""
    names = ("loss", "ce", "tv", "distill", "confidence")
    counted, agree, accept = facts[len(names) :].view(3, gamma)
    rates = {"agree": agree / counted.clamp_min(1), "accept": accept / counted.clamp_min(1)}
    terms = dict(zip(names, facts.tolist(), strict=False))
    return {**terms, **{n: [round(v, 4) for v in r.tolist()] for n, r in rates.items()}}


def _drop_later_entries(log: Path, step: int) -> None:
    """Forget log lines beyond `step`: a killed run repeats the steps after its last checkpoint."""
    if log.exists():
        lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
        log.write_text(
            "".join(line for line in lines if json.loads(line)["step"] <= step), encoding="utf-8"
        )
