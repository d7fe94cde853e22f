"""The target as training sees it gives the features that serving taps, for every architecture that is served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from actors.engine.training.frozen_target import FrozenTarget
from actors.engine.trial import TrialSequences
from actors.engine.weights import CheckpointError
from tests.torch_cpu.family_checkpoints import FAMILY, LAYERS, VOCAB, write_checkpoint
from tests.torch_cpu.oracle_models import engine_of

TAPS = (0, 2)


@pytest.mark.parametrize("architecture", list(FAMILY))
def test_features_are_those_that_serving_taps(tmp_path: Path, architecture: str) -> None:
    """A prompt at once in serving; here two prompts of unequal start in rows of different pace."""
    path = write_checkpoint(tmp_path / "m", architecture)
    ids = np.random.default_rng(3).integers(0, VOCAB, (2, 17))
    engine = engine_of(path, taps=TAPS)
    rows = TrialSequences(engine, list(ids))
    served = torch.from_numpy(np.asarray(engine.step(rows.plan({0: 17, 1: 17})).features))
    served = served.view(2, 17, -1)
    logits = torch.stack(TrialSequences(engine, list(ids)).logits({0: 17, 1: 17}))

    target = FrozenTarget(path, TAPS, torch.float32, max_len=20)
    kept = target.new_rows(3)
    taps, found = torch.zeros(2, 17, len(TAPS), served.shape[-1] // 2), torch.zeros(logits.shape)
    tokens, starts = torch.from_numpy(ids), torch.tensor([0, 0])
    for row, first in enumerate((6, 9)):  # each prompt alone, into the second and third row
        out = target.forward(tokens[row : row + 1, :first], starts[:1], kept, row + 1)
        taps[row, :first], found[row, :first] = out.taps[0], target.head(out.hidden)[0]
    starts = torch.tensor([6, 9])
    for _ in range(8):  # then both at once, a token a forward
        out = target.forward(tokens[torch.arange(2), starts][:, None], starts, kept, 1)
        taps[torch.arange(2), starts] = out.taps[:, 0]
        found[torch.arange(2), starts] = target.head(out.hidden)[:, 0]
        starts += 1
    for row, end in enumerate(starts.tolist()):
        torch.testing.assert_close(
            taps[row, :end].flatten(1), served[row, :end], atol=2e-5, rtol=1e-4
        )
        torch.testing.assert_close(found[row, :end], logits[row, :end], atol=2e-5, rtol=1e-4)


def test_a_layer_that_the_target_lacks_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "m", "Qwen3ForCausalLM")
    with pytest.raises(CheckpointError, match=f"layers 0 to {LAYERS - 1}"):
        FrozenTarget(path, (0, LAYERS), torch.float32, max_len=8)
