"""Shards of invented text with invented features, as the on-policy writer lays them out."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB, WIDTH, TAPS = 40, 16, 2


def shards(
    root: Path,
    num_records: int = 6,
    vocab: int = VOCAB,
    width: int = WIDTH,
    temperature: float = 0.0,
) -> Path:
    """Two shards of records whose text repeats a fixed cycle, so that there is something to learn."""
    rng = torch.Generator().manual_seed(0)
    root.mkdir()
    table = torch.randn((vocab, TAPS, width), generator=rng)
    for shard in range(2):
        metas, parts = [], []
        for i in range(num_records):
            length, prompt = 20 + 3 * i, 4 + i
            ids = (torch.arange(length) * 7 + i) % vocab
            rows = length - 1
            metas.append(
                {
                    "record_id": f"{shard}-{i}",
                    "domain": ("code", "math")[i % 2],
                    "temperature": temperature,
                    "prompt_len": prompt,
                    "length": length,
                }
            )
            parts.append(
                {
                    "ids": ids.int(),
                    "taps": table[ids[:rows]].bfloat16(),
                    "hidden": torch.randn((rows, width), generator=rng).bfloat16(),
                    "lse": torch.full((rows,), 8.0),
                }
            )
        tensors = {n: torch.cat([p[n] for p in parts]) for n in parts[0]}
        save_file(tensors, root / f"shard-0-{shard:05d}.safetensors")
        (root / f"shard-0-{shard:05d}.json").write_text(json.dumps(metas))
    return root
