"""The DSpark module: what a block may see, and that parallel and sequential forms agree."""

from __future__ import annotations

import pytest
import torch

from actors.engine.drafters.config import DSparkConfig
from actors.engine.drafters.dspark import DSparkModel
from actors.engine.drafters.layers import strict_context_mask
from actors.engine.drafters.model import BlockInputs
from tests.torch_cpu.tiny_drafters import every_config, random_model


def model(num_layers: int = 2) -> DSparkModel:
    config = DSparkConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=num_layers,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        max_position_embeddings=64,
        vocab_size=96,
        draft_vocab_size=64,
        block_size=5,
        mask_token_id=3,
        target_layer_ids=(0, 2),
        markov_rank=6,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        qk_norm=True,
        tied_to_target=True,
    )
    torch.manual_seed(0)
    built = DSparkModel(config, torch.randn(96, 32), torch.randn(96, 32), torch.arange(64))
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return built.requires_grad_(False)


def test_the_mask_hides_the_anchor_and_all_after_it() -> None:
    mask = strict_context_mask(torch.tensor([[0, 2, 4]]), 4)
    visible = (mask == 0)[0].int().tolist()
    assert visible == [[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]


def test_a_block_ignores_the_anchors_own_feature_and_later_ones() -> None:
    drafter = model()
    features = torch.randn(1, 20, 64)
    anchors, ids = torch.tensor([[7, 12]]), torch.tensor([[5, 6]])
    before = drafter.backbone(features, anchors, ids)
    changed = features.clone()
    changed[:, 7:] += 1
    after = drafter.backbone(changed, anchors, ids)
    torch.testing.assert_close(after[:, 0], before[:, 0])
    assert not torch.allclose(after[:, 1], before[:, 1])
    changed = features.clone()
    changed[:, 6] += 1
    assert not torch.allclose(drafter.backbone(changed, anchors, ids)[:, 0], before[:, 0])


def test_blocks_of_a_sequence_do_not_see_each_other() -> None:
    drafter = model()
    features = torch.randn(1, 20, 64)
    together = drafter.backbone(features, torch.tensor([[7, 8, 12]]), torch.tensor([[5, 9, 6]]))
    alone = drafter.backbone(features, torch.tensor([[8]]), torch.tensor([[9]]))
    torch.testing.assert_close(together[:, 1:2], alone)


def test_inside_a_block_attention_goes_both_ways() -> None:
    drafter = model()
    features = torch.randn(1, 20, 64)
    anchors = torch.tensor([[7]])
    one, other = (drafter.backbone(features, anchors, torch.tensor([[i]])) for i in (5, 6))
    assert not torch.allclose(one[..., -1, :], other[..., -1, :])  # slot 0 reaches the last slot
    # and a later slot reaches slot 0: another mask embedding changes it
    drafter.embed[3] += 1
    changed = drafter.backbone(features, anchors, torch.tensor([[5]]))
    assert not torch.allclose(changed[..., 0, :], one[..., 0, :])


def test_padding_behind_the_context_changes_nothing() -> None:
    drafter = model()
    features = torch.randn(1, 12, 64)
    padded = torch.cat((features, torch.zeros(1, 5, 64)), 1)
    where, ids = torch.tensor([[12]]), torch.tensor([[5]])
    torch.testing.assert_close(
        drafter.backbone(padded, where, ids), drafter.backbone(features, where, ids)
    )


def test_teacher_forced_logits_equal_step_by_step_logits() -> None:
    drafter = model()
    hidden = torch.randn(3, 5, 32)
    previous = torch.randint(0, 96, (3, 5))
    together = drafter.logits(hidden, previous)
    steps = [drafter.logits(hidden[:, k], previous[:, k]) for k in range(5)]
    torch.testing.assert_close(together, torch.stack(steps, 1))


def test_the_confidence_of_a_slot_does_not_depend_on_its_own_token() -> None:
    drafter = model()
    hidden = torch.randn(5, 32)
    previous = torch.tensor([1, 2, 3, 4, 5])
    base = drafter.confidence_logits(hidden, drafter.markov_embedding(previous))
    previous[3] = 9  # the token drafted in slot 2
    moved = drafter.confidence_logits(hidden, drafter.markov_embedding(previous))
    assert (base != moved).nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("name", list(every_config()))
@pytest.mark.parametrize("gamma", [1, 5])
def test_kept_slots_are_those_of_whole_blocks(name: str, gamma: int) -> None:
    model = random_model(every_config(block_size=gamma)[name])
    gamma = model.config.block_size
    torch.manual_seed(2)
    anchors = torch.tensor([[3, 9, 5], [2, 4, 6]])
    inputs = BlockInputs(
        torch.randn(2, 9, model.config.feature_dim),
        torch.randint(0, 96, (2, 9)),
        anchors,
        torch.randint(0, 96, (2, 3)),
    )
    previous = torch.randint(0, 96, (2, 3, gamma))
    kept = torch.randperm(6 * gamma)[: 3 * gamma].sort().values
    hidden, codes, w2 = model.kept_slots(inputs, previous, kept)
    whole = model.slots(inputs, previous)
    torch.testing.assert_close(hidden, whole.flatten(0, 2)[kept])
    all_codes, all_w2 = model.codes(whole, previous)
    torch.testing.assert_close(codes, all_codes.flatten(0, 2)[kept])
    assert torch.equal(w2, all_w2)
