"""A rank with the real target engine: same request, same tokens, however it is served (C1, numerics: reproducible)."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.core.local_policy import LocalPolicy, PolicyName
from actors.core.messages import AbortRequest, AdmittedRequest
from actors.core.rank import Rank
from actors.core.sampling import SamplingParams
from actors.engine.target_engine import TorchTargetEngine, load_engine
from configs.schema import ClusterConfig
from tests.pure.rank_harness import Session, admitted, make_rank
from tests.torch_cpu.rank_engines import TAPS, VOCAB, KnowingDrafter, real_drafter, write_tiny_llama

NUM_NEW = 24


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    write_tiny_llama(path)
    return path


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest, tiny_dir: Path) -> TorchTargetEngine:
    config = ClusterConfig.model_validate(
        {
            "model": {
                "path": str(tiny_dir),
                "dtype": request.param,
                "numerics": "reproducible",
                "max_model_len": 128,
            },
            "target": {"kv_cache_tokens": 2048, "block_size": 8, "max_batch_tokens": 64},
        }
    )
    return load_engine(config, tap_layer_ids=TAPS)


def rank_for(engine: TorchTargetEngine, gamma: int, **overrides: object) -> Rank:
    spec = engine.spec
    values: dict[str, object] = {
        "num_blocks": spec.num_blocks,
        "block_size": spec.block_size,
        "max_model_len": spec.max_model_len,
        "vocab_size": VOCAB,
        "max_batch_tokens": 64,
        "gamma": gamma,
    }
    return make_rank(**{**values, **overrides})


def requests() -> dict[str, AdmittedRequest]:
    """Eight prompts of different lengths: greedy ones, and seeded ones with different parameters."""
    rng = random.Random(1)
    made = {}
    for i in range(8):
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 3, 9, 20, 33]))]
        seeded = SamplingParams(
            temperature=0.7 + 0.1 * i, top_p=0.9, top_k=40 if i == 5 else 0, seed=i, noise_key=i
        )
        message = admitted(f"r{i}", prompt, NUM_NEW)
        made[f"r{i}"] = message if i % 2 == 0 else replace(message, sampling=seeded)
    return made


def serve(
    session: Session, messages: list[AdmittedRequest], steps_between: int = 0
) -> dict[str, list[int]]:
    for message in messages:
        session.submit(message)
        for _ in range(steps_between):
            session.step()
    session.run()
    assert session.rank.check_idle() == []
    return {message.request_id: session.streams[message.request_id].tokens for message in messages}


@pytest.fixture(scope="module")
def alone(engine: TorchTargetEngine) -> dict[str, list[int]]:
    """Every request served by itself, without speculation."""
    texts = {}
    for name, message in requests().items():
        texts |= serve(Session(rank_for(engine, 0), target=engine), [message])
        assert len(texts[name]) == NUM_NEW
    assert len({tuple(text) for text in texts.values()}) == 8
    return texts


def knowing(
    alone: Mapping[str, list[int]], gamma: int, error: float, seed: int = 0
) -> KnowingDrafter:
    texts = {name: [*m.prompt_ids.tolist(), *alone[name]] for name, m in requests().items()}
    return KnowingDrafter(texts, gamma, error, random.Random(seed))


@pytest.mark.parametrize("gamma", [0, 2, 5])
@pytest.mark.parametrize("error", [0.0, 0.3, 1.0])
def test_in_a_batch_of_eight_with_drafts_of_any_quality(
    engine: TorchTargetEngine, alone: dict[str, list[int]], gamma: int, error: float
) -> None:
    rank = rank_for(engine, gamma)
    session = Session(rank, target=engine, drafter=knowing(alone, max(gamma, 1), error))
    assert serve(session, list(requests().values())) == alone
    accepted = rank.counters.acceptance.accepted.sum()
    assert accepted == rank.counters.acceptance.scheduled.sum() if error == 0.0 else True
    assert accepted > 8 * gamma if gamma and error < 1.0 else True


@pytest.mark.parametrize("max_batch_tokens", [8, 17])
def test_arriving_one_by_one_in_small_chunks(
    engine: TorchTargetEngine, alone: dict[str, list[int]], max_batch_tokens: int
) -> None:
    rank = rank_for(engine, 5, max_batch_tokens=max_batch_tokens, max_running=5)
    session = Session(rank, target=engine, drafter=knowing(alone, 5, 0.2))
    assert serve(session, list(requests().values()), steps_between=2) == alone


def test_proposals_lost_now_and_then_and_requests_aborted_beside(
    engine: TorchTargetEngine, alone: dict[str, list[int]]
) -> None:
    rng = random.Random(3)
    session = Session(rank_for(engine, 2), target=engine, drafter=knowing(alone, 2, 0.2))
    for message in requests().values():
        session.submit(message)
    for step in range(60):
        if session.step(drafts=rng.random() < 0.6) is None and session.rank.deadline is not None:
            session.now = session.rank.deadline
        if step == 6:
            session.deliver(session.rank.on_message(AbortRequest("r2", 0), session.now))
    session.run()
    assert session.rank.check_idle() == []
    for name, text in alone.items():
        tokens = session.streams[name].tokens
        assert tokens == (text[: len(tokens)] if name == "r2" else text)


@pytest.mark.parametrize("num_prior", [1, 10, 23])
def test_a_replayed_journal_continues_with_the_same_tokens(
    engine: TorchTargetEngine, alone: dict[str, list[int]], num_prior: int
) -> None:
    replays = [
        replace(
            message,
            generation=1,
            prompt_ids=np.concatenate((message.prompt_ids, alone[name][:num_prior])).astype(
                np.int32
            ),
            num_prior_tokens=num_prior,
        )
        for name, message in requests().items()
    ]
    session = Session(rank_for(engine, 5), target=engine, drafter=knowing(alone, 5, 0.3))
    rest = serve(session, replays)
    assert rest == {name: text[num_prior:] for name, text in alone.items()}


def test_a_stop_token_inside_an_accepted_run(
    engine: TorchTargetEngine, alone: dict[str, list[int]]
) -> None:
    for index in range(2, 9):
        stop = alone["r0"][index]
        expected = alone["r0"][: alone["r0"].index(stop) + 1]
        message = replace(requests()["r0"], stop_token_ids=(stop,))
        session = Session(rank_for(engine, 5), target=engine, drafter=knowing(alone, 5, 0.0))
        assert serve(session, [message])["r0"] == expected
        assert session.streams["r0"].reason == "stop"


@pytest.mark.parametrize("policy", ["static_length", "static_threshold", "algorithm1", "lagged"])
def test_with_the_real_drafter_and_every_policy(
    engine: TorchTargetEngine, alone: dict[str, list[int]], policy: PolicyName
) -> None:
    local = LocalPolicy(policy, static_length=2, static_threshold=0.2)
    rank = rank_for(engine, 3, policy=local, max_batch_tokens=24)
    drafter = real_drafter(3)
    session = Session(rank, target=engine, drafter=drafter)
    free = [
        replace(admitted(f"free{i}", [7 + i] * 5, NUM_NEW), sampling=SamplingParams(noise_key=i))
        for i in range(3)
    ]
    texts = serve(session, [*free, *requests().values()], steps_between=1)
    assert {name: texts[name] for name in alone} == alone
    assert all(len(texts[message.request_id]) == NUM_NEW for message in free)
    assert drafter.open_requests() == ()
    assert rank.counters.acceptance.scheduled.sum() > 0
    assert rank.counters.num_late == 0
    assert rank.book.drafts.dropped.total() == 0
