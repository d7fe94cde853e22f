"""Sequential and confidence heads: their equations, teacher forced and step by step, and as served."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from actors.core.sampling import SamplingParams
from actors.engine.drafters.dspark import DSparkModel
from actors.engine.drafters.heads import MarkovHead, draft_left_to_right
from tests.torch_cpu.greedy_blocks import draft_greedy
from tests.torch_cpu.tiny_drafters import (
    DFLASH,
    GREEDY,
    Stream,
    commit_batch,
    tiny_config,
    tiny_engine,
    tiny_model,
)

HEADS = ["vanilla", "gated", "rnn"]
CONFIDENCES: list[dict[str, Any]] = [
    {},
    {"confidence_head_with_markov": False},
    {"enable_confidence_head": False, "confidence_head_with_markov": False},
]


def head_of(model: DSparkModel) -> MarkovHead:
    assert model.markov_head is not None
    return model.markov_head


def biases_by_the_equations(
    head: MarkovHead, kind: str, previous: Tensor, hidden: Tensor
) -> list[Tensor]:
    """Spec 1.8 written out for one block: previous [gamma], hidden [gamma, d]."""
    w1, w2 = head.markov_w1.weight, head.markov_w2.weight
    rank = w1.shape[1]
    state, biases = torch.zeros(rank), []
    for token, h in zip(previous, hidden, strict=True):
        e = w1[token]
        if kind == "gated":
            linear = head.get_submodule("gate_proj")
            e = torch.sigmoid(linear.weight @ torch.cat((h, e)) + linear.bias) * e
        elif kind == "rnn":
            linear = head.get_submodule("joint_proj")
            z = linear.weight @ torch.cat((state, e, h)) + linear.bias
            gate, candidate, out = torch.sigmoid(z[:rank]), z[rank : 2 * rank], z[2 * rank :]
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            e = torch.tanh(out)
        biases.append(w2 @ e)
    return biases


@pytest.mark.parametrize("kind", HEADS)
def test_biases_follow_the_equations(kind: str) -> None:
    model = tiny_model(tiny_config(markov_head_type=kind))
    hidden, previous = torch.randn(2, 3, 5, 32), torch.randint(0, 96, (2, 3, 5))
    biases = model.logits(hidden, previous) - model.base_logits(hidden)
    for b in range(2):
        for n in range(3):
            wanted = biases_by_the_equations(head_of(model), kind, previous[b, n], hidden[b, n])
            torch.testing.assert_close(biases[b, n], torch.stack(wanted), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", HEADS)
def test_teacher_forced_block_logits_equal_step_by_step_logits(kind: str) -> None:
    model = tiny_model(tiny_config(markov_head_type=kind))
    hidden, text = torch.randn(3, 5, 32), torch.randint(0, 96, (3, 6))
    together = model.logits(hidden, text[:, :-1])
    seen: list[Tensor] = []

    def follow_the_text(logits: Tensor) -> Tensor:
        seen.append(logits)
        return text[:, len(seen)]

    rows = draft_left_to_right(
        head_of(model), model.base_logits(hidden), hidden, text[:, 0], follow_the_text
    )
    torch.testing.assert_close(torch.stack(seen, 1), together)
    torch.testing.assert_close(rows, head_of(model).markov_w1(text[:, :-1]))


def test_a_fresh_recurrent_state_acts_from_the_next_slot_on() -> None:
    model = tiny_model(tiny_config(markov_head_type="rnn"))
    hidden, previous = torch.randn(1, 5, 32), torch.randint(0, 96, (1, 5))
    before = model.logits(hidden, previous)
    # The candidate part of the projection only feeds the state.
    head_of(model).get_submodule("joint_proj").get_parameter("weight")[6:12] += 1
    after = model.logits(hidden, previous)
    torch.testing.assert_close(after[:, 0], before[:, 0])
    assert (after[:, 1:] != before[:, 1:]).any(-1).all()


@pytest.mark.parametrize("kind", HEADS)
def test_a_slot_does_not_depend_on_tokens_from_its_own_on(kind: str) -> None:
    model = tiny_model(tiny_config(markov_head_type=kind))
    hidden, previous = torch.randn(1, 5, 32), torch.randint(0, 96, (1, 5))
    before = model.logits(hidden, previous)
    previous[0, 3] = (previous[0, 3] + 1) % 96  # the token drafted in slot 2
    changed = (model.logits(hidden, previous) != before).any(-1)[0].tolist()
    assert changed[:4] == [False, False, False, True]
    assert changed[4] == (kind == "rnn")


def reference_block(model: DSparkModel, stream: Stream, committed: int) -> tuple[Tensor, Tensor]:
    """Greedy ids [gamma] and hidden [gamma, d] of one block by the module, whole prefix recomputed."""
    anchor = committed - 1
    hidden = model.backbone(
        stream.features[None, :anchor], torch.tensor([[anchor]]), stream.ids[None, [anchor]]
    )[0, 0]
    drafted: list[Tensor] = [stream.ids[anchor]]
    for slot in range(len(hidden)):
        logits = model.logits(hidden[: slot + 1], torch.stack(drafted))
        drafted.append(model.draft_ids[logits[-1].argmax()])
    return torch.stack(drafted), hidden


@pytest.mark.parametrize("confidence", CONFIDENCES)
@pytest.mark.parametrize("kind", [*HEADS, "dflash"])
@pytest.mark.parametrize("draft_vocab_size", [64, 96])
def test_the_engine_drafts_as_the_module_says(
    kind: str, confidence: dict[str, Any], draft_vocab_size: int
) -> None:
    own = DFLASH if kind == "dflash" else {"markov_head_type": kind, **confidence}
    model = tiny_model(tiny_config(draft_vocab_size=draft_vocab_size, **own))
    engine = tiny_engine(model)
    streams = [Stream(n, 40, model.config, i) for i, n in enumerate("ab")]
    for first, committed in ((0, 9), (8, 12), (11, 13)):
        proposal = engine.advance(commit_batch([s.commit(first, committed) for s in streams]))
        assert proposal is not None
        for i, stream in enumerate(streams):
            ids, hidden = reference_block(model, stream, committed)
            assert proposal.draft_token_ids[i].tolist() == ids[1:].tolist()
            logits = model.slot_confidences(hidden, ids[:-1])
            if logits is not None:
                torch.testing.assert_close(
                    torch.from_numpy(proposal.confidences[i]), logits.sigmoid()
                )


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_sparse_q_is_the_corrected_distribution_sampled_from(kind: str, seed: int | None) -> None:
    model = tiny_model(tiny_config(markov_head_type=kind))
    stream = Stream("a", 40, model.config)
    params = SamplingParams(temperature=0.8, seed=seed, noise_key=7)
    proposal = tiny_engine(model).advance(commit_batch([stream.commit(0, 10)], params=params))
    assert proposal is not None
    _ids, hidden = reference_block(model, stream, 10)
    drafted = torch.from_numpy(proposal.draft_token_ids[0]).long()
    previous = torch.cat((stream.ids[9:10], drafted[:-1]))
    top = model.logits(hidden, previous).topk(8)
    torch.testing.assert_close(
        torch.from_numpy(proposal.q_probs[0]), (top.values / 0.8).softmax(-1), atol=1e-5, rtol=1e-4
    )
    assert torch.equal(torch.from_numpy(proposal.q_ids[0]).long(), model.draft_ids[top.indices])
    assert (top.indices == torch.searchsorted(model.draft_ids, drafted)[:, None]).any(-1).all()


def test_a_vanilla_head_drawn_slot_by_slot_draws_the_same_tokens() -> None:
    model = tiny_model(tiny_config())
    fused, single = tiny_engine(model), tiny_engine(model)
    single.model.sequential, single.model.markov = head_of(model), None
    stream = Stream("a", 40, model.config)
    for params in (GREEDY, SamplingParams(noise_key=3), SamplingParams(seed=5, noise_key=5)):
        fused.close(("a",))
        single.close(("a",))
        batch = commit_batch([stream.commit(0, 12)], params=params)
        one, other = fused.advance(batch), single.advance(batch)
        assert one is not None
        assert other is not None
        assert one.draft_token_ids.tolist() == other.draft_token_ids.tolist()
        torch.testing.assert_close(
            torch.from_numpy(one.q_probs), torch.from_numpy(other.q_probs), atol=1e-6, rtol=1e-4
        )


@pytest.mark.parametrize("kind", HEADS)
def test_greedy_blocks_of_a_whole_text_equal_single_ones(kind: str) -> None:
    from actors.engine.drafters.model import BlockInputs

    model = tiny_model(tiny_config(markov_head_type=kind))
    stream = Stream("a", 30, model.config)
    anchors = torch.arange(5, 29)
    inputs = BlockInputs(
        stream.features[None, :28], stream.ids[None, 1:29], anchors[None], stream.ids[anchors][None]
    )
    blocks = draft_greedy(model, inputs)
    assert blocks.confidence_logits is not None
    for i, anchor in enumerate(anchors.tolist()):
        ids, hidden = reference_block(model, stream, anchor + 1)
        assert blocks.token_ids[0, i].tolist() == ids[1:].tolist()
        torch.testing.assert_close(
            blocks.confidence_logits[0, i],
            model.slot_confidences(hidden, ids[:-1]),
            atol=1e-5,
            rtol=1e-4,
        )
        probs = model.logits(hidden, ids[:-1]).softmax(-1).amax(-1)
        torch.testing.assert_close(blocks.peaks[0, i], probs, atol=1e-5, rtol=1e-4)
