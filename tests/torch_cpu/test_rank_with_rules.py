"""Logit rules and log probabilities through a rank with the real engine: the same with speculation on and off."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.core.layout import StepPlan
from actors.core.logit_rules import LogitRules, LogprobsOrder
from actors.core.messages import AdmittedRequest
from actors.core.sampling import SamplingBatch, SamplingParams
from actors.engine.target_engine import TorchTargetEngine, load_engine
from configs.schema import ClusterConfig
from kernels.reference import process_logits
from tests.pure.rank_harness import Session, Stream, admitted
from tests.torch_cpu.rank_engines import TAPS, VOCAB, KnowingDrafter, write_tiny_llama
from tests.torch_cpu.test_rank_with_engine import rank_for

NUM_NEW = 20
RAW, PROCESSED = LogprobsOrder(3), LogprobsOrder(2, "processed")
BIAS = ((5, 4.0), (6, -100.0))
RULES = {
    "repetition": LogitRules(repetition_penalty=1.7),
    "frequency": LogitRules(frequency_penalty=1.1),
    "presence": LogitRules(presence_penalty=0.9),
    "bias": LogitRules(logit_bias=BIAS),
    "min_tokens": LogitRules(min_tokens=9),
    "all": LogitRules(1.2, 0.3, 0.4, BIAS, 9),
}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TorchTargetEngine:
    path: Path = tmp_path_factory.mktemp("tiny-llama")
    write_tiny_llama(path)
    model = {"path": str(path), "dtype": request.param, "max_model_len": 128}
    target = {"kv_cache_tokens": 2048, "block_size": 8, "max_batch_tokens": 64}
    return load_engine(ClusterConfig.model_validate({"model": model, "target": target}), TAPS)


def requests() -> dict[str, AdmittedRequest]:
    """Every rule greedy and seeded, half of them with log probabilities, beside plain requests."""
    rng = random.Random(2)
    made = {}
    for index, (name, rules) in enumerate([*RULES.items(), ("plain", None), ("asks", None)]):
        for kind, temperature in (("greedy", 0.0), ("seeded", 0.9)):
            prompt = [rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 4, 17]))]
            logprobs = (RAW, PROCESSED)[index % 2] if name != "plain" else None
            seed = None if kind == "greedy" else index
            sampling = SamplingParams(
                temperature, 0.9, 0, seed, index, rules=rules, logprobs=logprobs
            )
            message = admitted(f"{name} {kind}", prompt, NUM_NEW, stops=range(3, 40))
            made[message.request_id] = replace(message, sampling=sampling)
    return made


def serve(session: Session) -> dict[str, Stream]:
    for message in requests().values():
        session.submit(message)
    session.run()
    assert session.rank.check_idle() == []
    return session.streams


@pytest.fixture(scope="module")
def alone(engine: TorchTargetEngine) -> dict[str, Stream]:
    """Every request by itself, without speculation."""
    streams = {}
    for name, message in requests().items():
        session = Session(rank_for(engine, 0), target=engine)
        session.submit(message)
        session.run()
        streams[name] = session.streams[name]
    return streams


@pytest.mark.parametrize("error", [0.0, 0.4, 1.0])
def test_tokens_ends_and_logprobs_are_those_without_speculation(
    engine: TorchTargetEngine, alone: Mapping[str, Stream], error: float
) -> None:
    texts = {name: [*m.prompt_ids.tolist(), *alone[name].tokens] for name, m in requests().items()}
    drafter = KnowingDrafter(texts, 5, error, random.Random(4))
    rank = rank_for(engine, 5, max_running=16, max_waiting=16)
    served = serve(Session(rank, target=engine, drafter=drafter))
    for name, stream in alone.items():
        assert served[name].tokens == stream.tokens, name
        assert served[name].reason == stream.reason
        assert served[name].logprobs == stream.logprobs
    assert (rank.counters.acceptance.accepted.sum() > 30) == (error < 1.0)


def test_rules_and_orders_do_what_they_say(alone: Mapping[str, Stream]) -> None:
    for name, stream in alone.items():
        rules = requests()[name].sampling.rules
        if rules is not None and rules.min_tokens:
            assert not set(stream.tokens[:9]) & set(range(3, 40)), name
            assert len(stream.tokens) > 9
        if rules is not None and rules.logit_bias:
            assert 6 not in stream.tokens
        asks = requests()[name].sampling.logprobs
        assert len(stream.logprobs) == (len(stream.tokens) if asks else 0)
        for entry in stream.logprobs:
            assert asks is not None and len(entry.top_ids) == asks.num_top
            assert list(entry.top_logprobs) == sorted(entry.top_logprobs, reverse=True)


def logits_of(engine: TorchTargetEngine, token_ids: list[int]) -> torch.Tensor:
    """[n, V] logits after each token, by one prefill on a cache of its own."""
    count = len(token_ids)
    blocks = np.arange(-(-count // 8), dtype=np.int32)
    plan = StepPlan(
        step=0,
        request_ids=("x",),
        token_ids=np.array(token_ids, np.int32),
        positions=np.arange(count, dtype=np.int32),
        cu_query_len=np.array([0, count], np.int32),
        context_len=np.zeros(1, np.int32),
        block_tables=blocks[None],
        slot_mapping=np.arange(count, dtype=np.int32),
        verify_len=np.zeros(1, np.int32),
        samples=np.ones(1, np.bool_),
        sampling=SamplingBatch.of([SamplingParams()]),
    )
    return engine.sibling(len(blocks)).all_logits(plan).double()


@pytest.mark.parametrize("name", ["repetition", "all", "asks"])
@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_logprobs_are_those_of_the_distribution_they_name(
    engine: TorchTargetEngine, alone: Mapping[str, Stream], name: str, kind: str
) -> None:
    message, stream = requests()[f"{name} {kind}"], alone[f"{name} {kind}"]
    sampling, prompt = message.sampling, message.prompt_ids.tolist()
    logits = logits_of(engine, [*prompt, *stream.tokens])[len(prompt) - 1 : -1]
    assert sampling.logprobs is not None
    if sampling.logprobs.of == "raw":
        wanted = torch.log_softmax(logits, -1)
    elif kind == "greedy":
        wanted = torch.log_softmax(ruled(logits, message, stream), -1)
    else:
        n = len(logits)
        one = torch.ones(n)
        wanted = process_logits(
            ruled(logits, message, stream), one * 0.9, one * 0.9, torch.zeros(n).long()
        ).log()
    for entry, row, token in zip(stream.logprobs, wanted, stream.tokens, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert entry.top_ids[0] == int(row.argmax())
        assert entry.top_logprobs == pytest.approx(row[list(entry.top_ids)].tolist(), abs=1e-4)


def ruled(logits: torch.Tensor, message: AdmittedRequest, stream: Stream) -> torch.Tensor:
    """The rules from their definition, position by position."""
    rules, prompt = message.sampling.rules, message.prompt_ids.tolist()
    changed = logits.clone()
    if rules is None:
        return changed
    for k, row in enumerate(changed):
        output = stream.tokens[:k]
        for token in set(prompt + output):
            row[token] = row[token] / rules.repetition_penalty if row[token] > 0 else (
                row[token] * rules.repetition_penalty
            )  # fmt: skip
        for token in set(output):
            row[token] -= rules.frequency_penalty * output.count(token) + rules.presence_penalty
        for token, bias in rules.logit_bias:
            row[token] += bias
        if k < rules.min_tokens:
            row[list(message.stop_token_ids)] = -torch.inf
    return changed
