"""The serving drafter against the module it was packed from, and against its own past."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.core.messages import ProposalBatch
from actors.core.sampling import SamplingParams
from actors.engine.drafters.dspark import DSparkModel
from actors.engine.drafters.packed_backbone import PaddedContext
from actors.engine.weights import CheckpointError
from tests.torch_cpu.tiny_drafters import Stream, commit_batch, tiny_config, tiny_engine, tiny_model


def expected_block(model: DSparkModel, stream: Stream, committed: int) -> tuple[list[int], Tensor]:
    """Greedy ids and confidences of one block, by the module and a plain loop over slots."""
    anchor = committed - 1
    hidden = model.backbone(
        stream.features[None, :anchor], torch.tensor([[anchor]]), stream.ids[None, [anchor]]
    )[0, 0]
    previous = stream.ids[anchor : anchor + 1]
    drafted, confidences = [], []
    for slot in hidden:
        rows = model.markov_embedding(previous)
        assert rows is not None
        confidences.append(model.confidence_logits(slot[None], rows).sigmoid())
        previous = model.draft_ids[model.logits(slot[None], previous).argmax(-1)]
        drafted.append(int(previous))
    return drafted, torch.cat(confidences)


def check(proposal: ProposalBatch | None, model: DSparkModel, streams: dict[str, Stream]) -> None:
    assert proposal is not None
    for i, name in enumerate(proposal.request_ids):
        ids, confidences = expected_block(model, streams[name], int(proposal.committed_lens[i]))
        gamma = proposal.draft_token_ids.shape[1]
        assert proposal.draft_token_ids[i].tolist() == ids[:gamma]
        np.testing.assert_allclose(
            proposal.confidences[i], confidences[:gamma].detach().numpy(), atol=1e-5
        )


@pytest.mark.parametrize(
    "changes",
    [{}, {"qk_norm": True}, {"draft_vocab_size": 96}, {"confidence_head_with_markov": False}],
)
def test_proposals_equal_a_plain_computation(changes: dict[str, Any]) -> None:
    model = tiny_model(tiny_config(**changes))
    engine = tiny_engine(model)
    streams = {n: Stream(n, 40, model.config, i) for i, n in enumerate("abc")}
    lengths = {"a": 12, "b": 3, "c": 30}
    entries = [streams[n].commit(0, lengths[n]) for n in "abc"]
    check(engine.advance(commit_batch(entries)), model, streams)
    # Further rounds for some of them, in another order, each with its own number of accepted tokens.
    entries = [streams["c"].commit(29, 31), streams["a"].commit(11, 16)]
    check(engine.advance(commit_batch(entries)), model, streams)
    entries = [streams["b"].commit(2, 9), streams["a"].commit(15, 17)]
    check(engine.advance(commit_batch(entries)), model, streams)


def test_context_committed_in_pieces_equals_one_commit() -> None:
    model = tiny_model(tiny_config())
    stream = Stream("a", 700, model.config)  # beyond the first 512 columns: the store grows
    pieces, whole = tiny_engine(model), tiny_engine(model)
    assert pieces.advance(commit_batch([stream.commit(0, 300)], wants=False)) is None
    assert pieces.advance(commit_batch([stream.commit(299, 650)], wants=False)) is None
    last = pieces.advance(commit_batch([stream.commit(649, 660)]))
    once = whole.advance(commit_batch([stream.commit(0, 660)]))
    assert last is not None
    assert once is not None
    np.testing.assert_array_equal(last.draft_token_ids, once.draft_token_ids)
    np.testing.assert_allclose(last.confidences, once.confidences, atol=1e-6)
    check(last, model, {"a": stream})


def test_more_requests_than_rows_grows_and_close_gives_rows_back() -> None:
    model = tiny_model(tiny_config())
    engine = tiny_engine(model)
    streams = {f"r{i}": Stream(f"r{i}", 20, model.config, i) for i in range(40)}
    check(engine.advance(commit_batch([s.commit(0, 9) for s in streams.values()])), model, streams)
    engine.close(("r3", "r17", "never-seen"))
    assert set(engine.open_requests()) == set(streams) - {"r3", "r17"}
    streams["new"] = Stream("new", 20, model.config, 99)
    entries = [streams["new"].commit(0, 5), streams["r20"].commit(8, 12)]
    check(engine.advance(commit_batch(entries)), model, streams)


def test_repeated_and_overlapping_commits_change_nothing() -> None:
    model = tiny_model(tiny_config())
    engine = tiny_engine(model)
    streams = {"a": Stream("a", 40, model.config)}
    first = commit_batch([streams["a"].commit(0, 10)])
    assert engine.advance(first) is not None
    assert engine.advance(first) is None
    overlapping = commit_batch([streams["a"].commit(5, 14)])
    check(engine.advance(overlapping), model, streams)
    assert engine.advance(first) is None


def test_a_newer_generation_starts_over_and_an_older_one_is_ignored() -> None:
    model = tiny_model(tiny_config())
    engine = tiny_engine(model)
    old, new = Stream("a", 40, model.config, 1), Stream("a", 40, model.config, 2)
    engine.advance(commit_batch([old.commit(0, 20)]))
    check(engine.advance(commit_batch([new.commit(0, 8)], generation=1)), model, {"a": new})
    assert engine.advance(commit_batch([old.commit(19, 22)], generation=0)) is None


def test_a_context_first_seen_in_the_middle_starts_there() -> None:
    model = tiny_model(tiny_config())
    engine = tiny_engine(model)
    stream = Stream("a", 40, model.config)
    proposal = engine.advance(commit_batch([stream.commit(20, 30)]))
    assert proposal is not None
    hidden = engine.model.block(
        stream.ids[[29]],
        torch.tensor([29]),
        PaddedContext(*engine.context.view(np.array([0]), engine.model.config.block_size)),
    )
    # The module with the same 9 tokens visible, at their own positions.
    visible = torch.full((1, 1, 29), float("-inf"))
    visible[..., 20:] = 0
    from actors.engine.drafters import dspark

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dspark, "strict_context_mask", lambda _anchors, _span: visible)
        wanted = model.backbone(
            stream.features[None, :29], torch.tensor([[29]]), stream.ids[None, [29]]
        )
    torch.testing.assert_close(hidden, wanted[0], atol=1e-5, rtol=1e-4)


def test_fewer_draft_tokens_are_cut_from_the_full_block() -> None:
    model = tiny_model(tiny_config())
    stream = Stream("a", 40, model.config)
    engine = tiny_engine(model, gamma=2)
    check(engine.advance(commit_batch([stream.commit(0, 10)])), model, {"a": stream})
    with pytest.raises(CheckpointError, match="gamma=6"):
        tiny_engine(model, gamma=6)


@pytest.mark.parametrize("seed", [None, 7])
def test_sparse_q_is_the_distribution_sampled_from(seed: int | None) -> None:
    model = tiny_model(tiny_config())
    stream = Stream("a", 40, model.config)
    params = SamplingParams(temperature=0.8, seed=seed, noise_key=7)
    proposal = tiny_engine(model).advance(commit_batch([stream.commit(0, 10)], params=params))
    assert proposal is not None
    np.testing.assert_allclose(proposal.q_probs.sum(-1), 1, atol=1e-5)
    anchor, drafted = 9, proposal.draft_token_ids[0]
    previous = torch.tensor([int(stream.ids[anchor]), *drafted[:-1].tolist()])
    hidden = model.backbone(
        stream.features[None, :anchor], torch.tensor([[anchor]]), stream.ids[None, [anchor]]
    )[0, 0]
    top = model.logits(hidden, previous).topk(8)
    np.testing.assert_allclose(
        proposal.q_probs[0], (top.values / 0.8).softmax(-1).detach().numpy(), atol=1e-5
    )
    np.testing.assert_array_equal(proposal.q_ids[0], model.draft_ids[top.indices].numpy())
    assert all(t in proposal.q_ids[0, k] for k, t in enumerate(drafted))


def test_features_of_the_wrong_width_are_refused() -> None:
    engine = tiny_engine(tiny_model(tiny_config()))
    stream = Stream("a", 20, tiny_config(target_layer_ids=(0, 1, 2)))
    with pytest.raises(ValueError, match=r"features have shape .* needs \[\*, 64\]"):
        engine.advance(commit_batch([stream.commit(0, 10)]))


def test_bf16_features_travel_as_bits() -> None:
    model = tiny_model(tiny_config())
    stream = Stream("a", 20, model.config)
    stream.features = stream.features.bfloat16().float()
    message = commit_batch([stream.commit(0, 10)])
    rows = torch.from_numpy(message.features).bfloat16().view(torch.int16).numpy()
    packed = replace(message, features=rows.view(np.uint16))
    check(tiny_engine(model).advance(packed), model, {"a": stream})


def test_a_prompt_of_one_token_has_an_empty_context() -> None:
    model = tiny_model(tiny_config())
    engine = tiny_engine(model)
    streams = {n: Stream(n, 20, model.config, i) for i, n in enumerate("ab")}
    check(engine.advance(commit_batch([streams["a"].commit(0, 1)])), model, streams)
    mixed = [streams["b"].commit(0, 1), streams["a"].commit(0, 4)]
    check(engine.advance(commit_batch(mixed)), model, streams)


def test_an_entry_whose_features_are_incomplete_gets_no_block() -> None:
    model = tiny_model(tiny_config())
    engine = tiny_engine(model)
    stream = Stream("a", 40, model.config)
    entry = stream.commit(0, 12)
    cut = entry._replace(rows=entry.rows[:-3], ids=entry.ids[:-3])
    assert engine.advance(commit_batch([cut])) is None
    check(engine.advance(commit_batch([stream.commit(8, 14)])), model, {"a": stream})


def test_a_context_beyond_the_positions_of_the_checkpoint_is_still_drafted_for() -> None:
    short = tiny_model(tiny_config(max_position_embeddings=16))
    long = tiny_model(tiny_config())
    long.load_state_dict(short.state_dict())
    engine, stream = tiny_engine(short), Stream("a", 60, long.config)
    # The anchor at position 13 still lies inside, the last slots of its block do not.
    check(engine.advance(commit_batch([stream.commit(0, 14)])), long, {"a": stream})
    check(engine.advance(commit_batch([stream.commit(13, 50)])), long, {"a": stream})
