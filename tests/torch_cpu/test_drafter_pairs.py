"""EAGLE-3 and MTP: the module against a plain recomputation, the engine against the module and its own past."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from actors.core.sampling import SamplingParams
from actors.engine.drafters.config import DrafterConfig
from actors.engine.drafters.eagle3 import Eagle3Layer, Eagle3Model
from actors.engine.drafters.model import BlockInputs
from actors.engine.drafters.mtp import MtpModel
from actors.engine.drafters.pairs import PairModel
from actors.engine.rotary import rotary_tables, rotate
from actors.engine.weights import CheckpointError
from tests.torch_cpu.greedy_blocks import draft_greedy
from tests.torch_cpu.tiny_drafters import (
    Stream,
    commit_batch,
    eagle3_config,
    mtp_config,
    pair_engine,
    tiny_pair_model,
)

CONFIGS: dict[str, DrafterConfig] = {
    "eagle3": eagle3_config(),
    "eagle3-qk-norm-whole-vocabulary": eagle3_config(qk_norm=True, draft_vocab_size=96),
    "mtp": mtp_config(),
    "mtp-qk-norm": mtp_config(qk_norm=True),
}


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> PairModel:
    return tiny_pair_model(CONFIGS[request.param])


def norm(weight: Tensor, x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def enter(model: PairModel, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Spec 9.1 and 9.3: the residual and the attention's input of pairs (hidden, next token)."""
    token = model.embed[ids]
    layer = model.layer
    if isinstance(model, Eagle3Model):
        assert isinstance(layer, Eagle3Layer)
        own = norm(layer.hidden_norm.weight, hidden)
        return hidden, torch.cat((norm(layer.input_layernorm.weight, token), own), -1)
    assert isinstance(model, MtpModel)
    both = torch.cat((norm(model.hnorm.weight, hidden), norm(model.enorm.weight, token)), -1)
    joined = both @ model.eh_proj.weight.T
    return joined, norm(layer.input_layernorm.weight, joined)


def run_layer(model: PairModel, residual: Tensor, x: Tensor) -> Tensor:
    """One causal pass over the whole sequence [T, *] without any cache; returns the un-normed output [T, d]."""
    attention, config, length = model.layer.self_attn, model.config, len(x)
    cos, sin = (t[:length, None] for t in rotary_tables(config.head_dim, config.rope_theta, length))
    q, k, v = (
        (x @ p.weight.T).view(length, -1, config.head_dim)
        for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if config.qk_norm:
        q = norm(attention.q_norm.get_parameter("weight"), q)
        k = norm(attention.k_norm.get_parameter("weight"), k)
    group = config.num_attention_heads // config.num_key_value_heads
    q, k = rotate(q, cos, sin), rotate(k, cos, sin).repeat_interleave(group, 1)
    v = v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * config.head_dim**-0.5
    later = torch.ones(length, length).triu(1).bool()
    mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), v)
    hidden = residual + mixed.reshape(length, -1) @ attention.o_proj.weight.T
    mlp, x = model.layer.mlp, norm(model.layer.post_attention_layernorm.weight, hidden)
    inner = F.silu(x @ mlp.gate_proj.weight.T) * (x @ mlp.up_proj.weight.T)
    return hidden + inner @ mlp.down_proj.weight.T


def plain_logits(
    model: PairModel, stream: Stream, committed: int, text: Tensor, num_slots: int
) -> list[Tensor]:
    """Logits of the slots of one block; `text` [1 + num_slots] are the anchor and the tokens taken as drafted.

    Everything is computed again for every slot: verified pairs before the anchor, then the block's own outputs.
    """
    anchor = committed - 1
    features = stream.features[:anchor]
    hidden = features @ model.fc.weight.T if isinstance(model, Eagle3Model) else features
    ids = torch.cat((stream.ids[1:anchor], text[:1]))
    found = []
    for slot in range(num_slots):
        out = run_layer(model, *enter(model, hidden, ids))[-1:]
        found.append((norm(model.norm.weight, out) @ model.head.T)[0])
        hidden, ids = torch.cat((hidden, out)), torch.cat((ids, text[slot + 1 : slot + 2]))
    return found


def plain_block(model: PairModel, stream: Stream, committed: int, gamma: int) -> list[int]:
    """The greedy block."""
    text = stream.ids[committed - 1 : committed]
    for slot in range(gamma):
        logits = plain_logits(model, stream, committed, F.pad(text, (0, 1)), slot + 1)[-1]
        text = torch.cat((text, model.draft_ids[logits.argmax()][None]))
    return text[1:].tolist()


def inputs_at(stream: Stream, anchors: Tensor, span: int) -> BlockInputs:
    ids = stream.ids[anchors][None]
    return BlockInputs(
        stream.features[None, :span], stream.ids[None, 1 : span + 1], anchors[None], ids
    )


def test_teacher_forced_slots_equal_step_by_step_ones(model: PairModel) -> None:
    gamma, stream = model.config.block_size, Stream("a", 30, model.config)
    anchors = torch.tensor([1, 7, 12, 20])
    previous = stream.ids[anchors[:, None] + torch.arange(gamma)][None]
    hidden = model.slots(inputs_at(stream, anchors, 20), previous)
    assert hidden.shape == (1, 4, gamma, 32)
    for i, anchor in enumerate(anchors.tolist()):
        text = stream.ids[anchor : anchor + gamma + 1]
        wanted = plain_logits(model, stream, anchor + 1, text, gamma)
        torch.testing.assert_close(
            model.base_logits(hidden[0, i]), torch.stack(wanted), atol=1e-3, rtol=1e-3
        )


def test_features_from_the_anchor_on_are_not_seen(model: PairModel) -> None:
    stream, anchors = Stream("a", 30, model.config), torch.tensor([7, 12])
    previous = torch.randint(0, 96, (1, 2, model.config.block_size))
    inputs = inputs_at(stream, anchors, 20)
    before = model.slots(inputs, previous)
    inputs.features[:, 7:] += 1
    after = model.slots(inputs, previous)
    torch.testing.assert_close(after[:, 0], before[:, 0])
    assert not torch.allclose(after[:, 1], before[:, 1])
    inputs.features[:, 6] += 1
    assert not torch.allclose(model.slots(inputs, previous)[:, 0], before[:, 0])


def test_a_padded_anchor_leaves_no_trace_in_the_gradient(model: PairModel) -> None:
    model.requires_grad_(True)
    stream, anchors = Stream("a", 30, model.config), torch.tensor([7, 0])
    previous = torch.randint(0, 96, (1, 2, model.config.block_size))
    model.slots(inputs_at(stream, anchors, 20), previous)[0, 0].sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


def test_greedy_blocks_of_a_whole_text_equal_single_ones(model: PairModel) -> None:
    gamma, stream = model.config.block_size, Stream("a", 20, model.config)
    anchors = torch.arange(3, 18)
    blocks = draft_greedy(model, inputs_at(stream, anchors, 17))
    for i, anchor in enumerate(anchors.tolist()):
        assert blocks.token_ids[0, i].tolist() == plain_block(model, stream, anchor + 1, gamma)


def test_the_engine_drafts_as_the_plain_computation_says_round_after_round(
    model: PairModel,
) -> None:
    engine, gamma = pair_engine(model), model.config.block_size
    streams = {n: Stream(n, 40, model.config, i) for i, n in enumerate("abc")}
    # Several requests of different lengths, then others in another order: guesses of earlier rounds are gone.
    for rows in (
        {"a": (0, 12), "b": (0, 3), "c": (0, 30)},
        {"c": (29, 31), "a": (11, 16)},
        {"b": (2, 9), "a": (15, 17)},
        {"a": (16, 17 + gamma)},
    ):
        entries = [streams[n].commit(*rows[n]) for n in rows]
        proposal = engine.advance(commit_batch(entries))
        assert proposal is not None
        assert proposal.request_ids == tuple(rows)
        for i, name in enumerate(rows):
            wanted = plain_block(model, streams[name], rows[name][1], gamma)
            assert proposal.draft_token_ids[i].tolist() == wanted


def test_a_context_committed_in_pieces_equals_one_commit(model: PairModel) -> None:
    stream = Stream("a", 700, model.config)  # beyond the first 512 columns
    pieces, whole = pair_engine(model), pair_engine(model)
    assert pieces.advance(commit_batch([stream.commit(0, 300)], wants=False)) is None
    assert pieces.advance(commit_batch([stream.commit(299, 650)], wants=False)) is None
    last = pieces.advance(commit_batch([stream.commit(649, 660)]))
    once = whole.advance(commit_batch([stream.commit(0, 660)]))
    assert last is not None
    assert once is not None
    assert last.draft_token_ids.tolist() == once.draft_token_ids.tolist()
    torch.testing.assert_close(pieces.context.keys[..., :659, :], whole.context.keys[..., :659, :])


def test_what_a_chain_guessed_leaves_nothing_in_the_context(model: PairModel) -> None:
    engine, stream = pair_engine(model), Stream("a", 40, model.config)
    engine.advance(commit_batch([stream.commit(0, 10)]))
    assert not engine.context.keys[..., 9:, :].any()
    assert not engine.context.values[..., 9:, :].any()


def test_duplicates_old_generations_and_holes_give_no_block(model: PairModel) -> None:
    engine, stream = pair_engine(model), Stream("a", 40, model.config)
    first = commit_batch([stream.commit(0, 10)])
    assert engine.advance(first) is not None
    assert engine.advance(first) is None
    entry = stream.commit(9, 14)
    cut = entry._replace(rows=entry.rows[:-1], ids=entry.ids[:-1])
    assert engine.advance(commit_batch([cut])) is None
    assert engine.advance(commit_batch([stream.commit(0, 8)], generation=1)) is not None
    assert engine.advance(commit_batch([stream.commit(13, 20)], generation=0)) is None
    # A prompt of one token has no pair yet, so nothing to start a chain from.
    assert engine.advance(commit_batch([Stream("b", 9, model.config).commit(0, 1)])) is None
    engine.close(("a", "b", "never-seen"))
    assert engine.open_requests() == ()


@pytest.mark.parametrize("seed", [None, 7])
def test_sparse_q_is_the_distribution_sampled_from(model: PairModel, seed: int | None) -> None:
    stream = Stream("a", 40, model.config)
    params = SamplingParams(temperature=0.8, seed=seed, noise_key=7)
    proposal = pair_engine(model).advance(commit_batch([stream.commit(0, 10)], params=params))
    assert proposal is not None
    drafted = torch.from_numpy(proposal.draft_token_ids[0]).long()
    text = torch.cat((stream.ids[9:10], drafted))
    logits = torch.stack(plain_logits(model, stream, 10, text, len(drafted)))
    top = logits.topk(8)
    torch.testing.assert_close(
        torch.from_numpy(proposal.q_probs[0]), (top.values / 0.8).softmax(-1), atol=1e-4, rtol=1e-3
    )
    assert torch.equal(torch.from_numpy(proposal.q_ids[0]).long(), model.draft_ids[top.indices])


def test_another_slot_of_a_chain_draws_with_other_noise() -> None:
    """A chain whose distribution is the same in every slot must not repeat one draw."""
    model = tiny_pair_model(eagle3_config(draft_vocab_size=96))
    model.head.zero_()
    stream = Stream("a", 40, model.config)
    engine = pair_engine(model, draft_top_k=96)
    params = SamplingParams(noise_key=11)
    proposal = engine.advance(commit_batch([stream.commit(0, 10)], params=params))
    assert proposal is not None
    assert len(set(proposal.draft_token_ids[0].tolist())) > 2


def test_more_slots_than_trained_for_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"gamma=2 is outside 1\.\.1"):
        pair_engine(tiny_pair_model(mtp_config()), gamma=2)
    with pytest.raises(CheckpointError, match="one layer"):
        eagle3_config(num_hidden_layers=2)
    with pytest.raises(CheckpointError, match="last layer only"):
        mtp_config(target_layer_ids=(1, 2))


def test_mtp_cannot_tell_a_raw_feature_from_its_normed_direction() -> None:
    """Shards hold final_norm(h) = w * h / rms(h); divided by w it enters the model as h itself does."""
    model = tiny_pair_model(mtp_config())
    raw, ids = torch.randn(50, 32) * 30, torch.randint(0, 96, (50,))
    normed = F.rms_norm(raw, (32,), None, 1e-5)
    for part, other in zip(model.enter(raw, ids), model.enter(normed, ids), strict=True):
        torch.testing.assert_close(part, other, atol=1e-4, rtol=1e-4)
