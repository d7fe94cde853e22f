"""What one process answers: the target alone, one token a step, no ranks, no drafter, no cluster."""

from __future__ import annotations

import numpy as np

from actors.engine.target_engine import load_engine
from actors.engine.trial import TrialSequences
from configs.schema import ClusterConfig


def greedy(config: ClusterConfig, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """The next `num_tokens` token ids after each prompt."""
    engine = load_engine(config, (), progress=False)
    rows = [np.array([*prompt, *[0] * num_tokens], np.int64) for prompt in prompts]
    sequences = TrialSequences(engine, rows)
    query_len = {row: len(prompt) for row, prompt in enumerate(prompts)}
    for _ in range(num_tokens):
        for row, logits in zip(query_len, sequences.logits(query_len), strict=True):
            rows[row][sequences.length[row]] = int(logits[-1].argmax())
        query_len = dict.fromkeys(query_len, 1)
    return [row[len(prompt) :].tolist() for row, prompt in zip(rows, prompts, strict=True)]
