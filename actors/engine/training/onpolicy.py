"""The target's own answers with the features seen while writing them: on-policy training text.

Continuous batching over dense rows: a finished row is refilled at once. Every finished answer goes,
with taps, final hidden states and log-normalisers, into a shard; the records already in shards are
skipped on a restart, so the command can be stopped and run again.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jinja2
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from actors.engine.training.frozen_target import FrozenTarget
from actors.engine.training.prompts import Prompt

log = logging.getLogger(__name__)

SHARD_RECORDS = 64
STORED = torch.bfloat16  # of features in shards, whatever they were computed in


@dataclass(frozen=True)
class GenerationPlan:
    """How to write answers: rows at once, longest prompt and answer in tokens, worker i of n."""

    num_rows: int = 48
    max_prompt_len: int = 208
    max_answer_len: int = 224
    worker: int = 0
    num_workers: int = 1

    @property
    def max_len(self) -> int:
        return self.max_prompt_len + self.max_answer_len


@dataclass
class Row:
    """One answer while it is written: prompt and answer ids, and a log-normaliser for each answer token."""

    prompt: Prompt
    ids: list[int]
    prompt_len: int
    # Of this record alone: its text depends on no order.
    rng: torch.Generator = field(default_factory=torch.Generator)
    lse: list[float] = field(default_factory=list)


class PromptText(Protocol):
    """How a prompt becomes what the model reads."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a conversation whose only turn is `text`, answer to follow."""
        ...


class ChatText:
    """Renders one user turn with the model's own chat template and encodes it."""

    def __init__(self, model_dir: Path) -> None:
        """Read `tokenizer.json` and `chat_template.jinja` of `model_dir`."""
        self.tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        source = (model_dir / "chat_template.jinja").read_text(encoding="utf-8")
        self._template = jinja2.Environment().from_string(source)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a conversation whose only turn is `text`, answer to follow."""
        turns = [{"role": "user", "content": text}]
        rendered = self._template.render(messages=turns, add_generation_prompt=True)
        ids: list[int] = self.tokenizer.encode(rendered, add_special_tokens=False).ids
        return ids


class ShardWriter:
    """Collects finished records and writes them `SHARD_RECORDS` at a time, atomically."""

    def __init__(self, out_dir: Path, worker: int) -> None:
        """Append to the shards of `worker` in `out_dir`."""
        self.out_dir = out_dir
        self.worker = worker
        self._pending: list[tuple[dict[str, Any], dict[str, Tensor]]] = []
        out_dir.mkdir(parents=True, exist_ok=True)
        self._next = len(list(out_dir.glob(f"shard-{worker}-*.json")))

    def add(self, row: Row, taps: Tensor, hidden: Tensor) -> None:
        """Keep one record: `taps` [n, m, d] and `hidden` [n, d] of the first n = len(ids) - 1 tokens."""
        known = len(row.ids) - 1
        meta = {
            "record_id": row.prompt.record_id,
            "domain": row.prompt.domain,
            "temperature": row.prompt.temperature,
            "prompt_len": row.prompt_len,
            "length": len(row.ids),
        }
        lse = torch.zeros(known)
        lse[row.prompt_len - 1 :] = torch.tensor(row.lse)
        parts = {
            "ids": torch.tensor(row.ids, dtype=torch.int32),
            "taps": taps[:known].clone(),
            "hidden": hidden[:known].clone(),
            "lse": lse,
        }
        self._pending.append((meta, parts))
        if len(self._pending) >= SHARD_RECORDS:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as one shard; the JSON beside it appears last and makes it count."""
        if not self._pending:
            return
        stem = self.out_dir / f"shard-{self.worker}-{self._next:05d}"
        names = self._pending[0][1]
        tensors = {n: torch.cat([parts[n] for _, parts in self._pending]) for n in names}
        save_file(tensors, f"{stem}.safetensors")
        partial = Path(f"{stem}.json.partial")
        partial.write_text(json.dumps([meta for meta, _ in self._pending]), encoding="utf-8")
        partial.replace(f"{stem}.json")
        self._pending.clear()
        self._next += 1


def finished_ids(out_dir: Path) -> set[str]:
    """Return the record ids already in complete shards of `out_dir`."""
    return {
        meta["record_id"]
        for path in out_dir.glob("shard-*.json")
        for meta in json.loads(path.read_text(encoding="utf-8"))
    }


class OnPolicyWriter:
    """Keeps `num_rows` answers going and hands finished ones to a ShardWriter."""

    def __init__(
        self, target: FrozenTarget, text: PromptText, plan: GenerationPlan, out: ShardWriter
    ) -> None:
        """Allocate K/V and feature rows; `target.max_len` must be `plan.max_len`."""
        eos = frozenset(target.config.eos_token_ids)
        self.target, self.text, self.plan, self.eos, self.out = target, text, plan, eos, out
        rows, length, width = plan.num_rows, plan.max_len, target.hidden_size
        self.kv = target.new_rows(rows)
        taps = len(target.tap_layer_ids)
        self.taps = torch.zeros((rows, length, taps, width), dtype=STORED)
        self.hidden = torch.zeros((rows, length, width), dtype=STORED)
        self.rows: list[Row | None] = [None] * rows
        self.cursor = torch.zeros(rows, dtype=torch.long)  # tokens whose features are known
        self.current = torch.zeros(rows, dtype=torch.long)
        self.num_too_long = 0  # prompts left out

    def run(self, prompts: list[Prompt], max_tokens: int) -> int:
        """Answer `prompts` until they or `max_tokens` answer tokens run out; return tokens written."""
        done = finished_ids(self.out.out_dir)
        workers, own = self.plan.num_workers, self.plan.worker
        # By id, not by place in the list: a list that was shuffled or has grown gives nothing to two workers.
        mine = [p for p in prompts if zlib.crc32(p.record_id.encode()) % workers == own]
        queue = deque(p for p in mine if p.record_id not in done)
        written = 0
        bar = tqdm(total=max_tokens, unit="tok", desc="on-policy text", mininterval=5.0)
        while written < max_tokens:
            for index, row in enumerate(self.rows):
                if row is None and queue:
                    self._open(index, queue.popleft())
            if all(row is None for row in self.rows):
                break
            written += self._step(bar)
        self.out.flush()
        bar.close()
        if self.num_too_long:
            log.warning(
                "%d prompts are longer than %d tokens and were left out",
                self.num_too_long,
                self.plan.max_prompt_len,
            )
        return written

    def _open(self, index: int, prompt: Prompt) -> None:
        ids = self.text.encode(prompt.text)
        if len(ids) > self.plan.max_prompt_len:
            self.num_too_long += 1
            return
        first = self.target.forward(
            torch.tensor([ids]), torch.zeros(1, dtype=torch.long), self.kv, index
        )
        count = len(ids)
        self.taps[index, :count] = first.taps[0]
        self.hidden[index, :count] = first.hidden[0]
        self.cursor[index] = count
        rng = torch.Generator().manual_seed(zlib.crc32(prompt.record_id.encode()))
        row = Row(prompt, ids, count, rng)
        token, lse = self._sample(first.hidden[:, -1], [row])
        row.ids.append(int(token))
        row.lse.append(float(lse))
        self.current[index] = token
        self.rows[index] = row

    def _step(self, bar: Any) -> int:
        """Advance every row by one token; return how many answer tokens finished rows held."""
        out = self.target.forward(self.current[:, None], self.cursor, self.kv, 0)
        everyone = torch.arange(self.plan.num_rows)
        self.taps[everyone, self.cursor] = out.taps[:, 0].to(STORED)
        self.hidden[everyone, self.cursor] = out.hidden[:, 0].to(STORED)
        tokens, lses = self._sample(out.hidden[:, 0], self.rows)
        finished = 0
        for index, (row, token, lse) in enumerate(
            zip(self.rows, tokens.tolist(), lses.tolist(), strict=True)
        ):
            if row is None:
                continue
            row.ids.append(token)
            row.lse.append(lse)
            self.current[index] = token
            self.cursor[index] += 1
            answer = len(row.ids) - row.prompt_len
            if token in self.eos or answer >= self.plan.max_answer_len:
                self.out.add(row, self.taps[index], self.hidden[index])
                self.rows[index] = None
                self.cursor[index] = 0
                finished += answer
                bar.update(answer)
        return finished

    def _sample(self, hidden: Tensor, rows: list[Row | None]) -> tuple[Tensor, Tensor]:
        """Return (token [R], log-normaliser at temperature 1 [R]) for hidden [R, d] of these rows."""
        logits = self.target.head(hidden).float()
        lse = logits.logsumexp(-1)
        tokens = logits.argmax(-1)
        drawn = [(i, row) for i, row in enumerate(rows) if row and row.prompt.temperature > 0]
        if drawn:
            warm = torch.tensor([i for i, _ in drawn])
            temperature = torch.tensor([row.prompt.temperature for _, row in drawn])
            mass = (logits[warm] / temperature[:, None]).softmax(-1).cumsum(-1)
            uniform = torch.stack([torch.rand(1, generator=row.rng) for _, row in drawn])
            draw = uniform * mass[:, -1:]
            tokens[warm] = torch.searchsorted(mass, draw)[:, 0].clamp_max(logits.shape[-1] - 1)
        return tokens, lse
