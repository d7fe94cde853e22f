"""Tokens per second of whole rounds in this process: target, drafter and the rank's decisions, without Ray and HTTP."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from actors.core.admission import RankLimits
from actors.core.layout import StepPlan
from actors.core.local_policy import LocalPolicy, PolicyName
from actors.core.messages import (
    AdmittedRequest,
    CloseDraft,
    CommitBatch,
    Endpoint,
    RankProfile,
    TokenDeltas,
)
from actors.core.own_profile import StepTimes
from actors.core.prefix_scheduler import allocate
from actors.core.rank import Outgoing, Rank
from actors.core.rank_calibration import RankCalibration
from actors.core.sampling import SamplingParams
from actors.core.sps import CostCurve
from actors.core.verify_decision import VerifyDecider
from actors.engine.base import DrafterEngine
from actors.engine.checkpoint import find_model
from actors.engine.drafters.serve import configured_engine, configured_taps
from actors.engine.step_profile import quick_samples
from actors.engine.target_engine import TorchTargetEngine, load_engine
from configs.schema import ClusterConfig

NEW_TOKENS = 96
PROMPTS = (
    "Write a function in Python that returns the prime factors of a number.",
    "A train leaves at nine and travels 120 km at 80 km/h. When does it arrive? Explain step by step.",
    "Tell me how bread is made.",
    "List the planets of the solar system with one fact about each.",
)
_TARGET, _DRAFTER, _INGRESS = (
    Endpoint(name, role, f"inproc://{name}", "", "1")  # type: ignore[arg-type]
    for name, role in (("target-0", "target"), ("drafter-0", "drafter"), ("bench", "ingress"))
)


@dataclass(frozen=True)
class Figures:
    """One combination. Rates count rounds only: prefill is over before the clock starts."""

    batch: int
    policy: str
    numerics: str
    graphs: bool
    tokens_per_s: float
    tokens_a_round: float  # committed per request and round, bonus included
    verified_a_round: float  # draft tokens scheduled per request and round
    step_ms: float  # of the target, mean
    draft_ms: float  # of the drafter, mean a round


class Bench:
    """Serves greedy requests with a rank, its target and its drafter in one thread.

    Args:
        times: measured cost curve of the target, what `lagged` and `algorithm1` decide by.
        prompts: token ids, dealt out in turn.
    """

    def __init__(
        self,
        config: ClusterConfig,
        target: TorchTargetEngine,
        drafter: DrafterEngine | None,
        times: StepTimes,
        prompts: Sequence[np.ndarray],
    ) -> None:
        self._config, self._drafter, self._prompts = config, drafter, prompts
        self._model, self._times = target, times

    @property
    def replays(self) -> bool:
        """Whether steps are replayed from CUDA graphs."""
        return self._model.paged is not None and self._model.captures

    def measure(
        self, policy: PolicyName, num_requests: int, new_tokens: int = NEW_TOKENS
    ) -> dict[str, float]:
        """Serve `num_requests` of `new_tokens` each; tokens_per_s and the rest of `Figures`."""
        self._begin(policy, num_requests, new_tokens)
        rows = rounds = verified = 0
        tokens, step_s, draft_s = 0, 0.0, 0.0
        while (plan := self._rank.plan_step(time.monotonic())) is not None:
            before, drafted = self._num_tokens, self._draft_s
            seconds = self._step(plan)
            if (np.diff(plan.cu_query_len) == 1 + plan.verify_len).all():
                rounds, rows = rounds + 1, rows + plan.num_requests
                verified += int(plan.verify_len.sum())
                tokens += self._num_tokens - before
                step_s, draft_s = step_s + seconds, draft_s + self._draft_s - drafted
        assert self._rank.is_idle and rounds
        return {
            "tokens_per_s": round(tokens / (step_s + draft_s), 1),
            "tokens_a_round": round(tokens / rows, 2),
            "verified_a_round": round(verified / rows, 2),
            "step_ms": round(step_s / rounds * 1e3, 2),
            "draft_ms": round(draft_s / rounds * 1e3, 2),
        }

    def _begin(self, policy: PolicyName, num_requests: int, new_tokens: int) -> None:
        settings, spec = self._config.policy, self._model.spec
        gamma = self._drafter.spec.gamma if self._drafter is not None else 0
        longest = max(map(len, self._prompts)) + new_tokens + gamma + 1
        num_blocks = num_requests * -(-longest // spec.block_size) + 1
        self._target = self._model.sibling(num_blocks)
        local = self._policy = LocalPolicy(
            policy, settings.static_length, settings.static_threshold, settings.min_predicted_gain
        )
        tokens, requests, seconds, _ = self._times
        none = np.zeros(len(tokens))
        local.times.measured(
            CostCurve.of(
                RankProfile(
                    _TARGET, spec.identity, tokens.astype(np.int32), requests.astype(np.int32),
                    seconds, none, gamma,
                )
            )
        )  # fmt: skip
        limits = RankLimits(
            num_blocks=num_blocks,
            block_size=spec.block_size,
            max_model_len=spec.max_model_len,
            vocab_size=spec.vocab_size,
            max_running=num_requests,
            max_waiting=num_requests,
            max_batch_tokens=max(
                self._config.target.max_batch_tokens, num_requests * (1 + gamma) + 1
            ),
            gamma=gamma,
            stop_share=self._config.drafter.stop_share,
        )
        decider = VerifyDecider(_TARGET.name, _TARGET.epoch, local, allocate, local.drafting)
        calibration = RankCalibration(
            gamma, self._config.calibration, policy, stops=limits.stop_share > 0
        )
        self._rank = Rank(_TARGET, limits, decider, calibration)
        self._rank.set_drafters([_DRAFTER] if gamma else [])
        self._num_tokens, self._draft_s = 0, 0.0
        for index in range(num_requests):
            prompt = self._prompts[index % len(self._prompts)].astype(np.int32)
            self._send(self._rank.on_message(_request(index, prompt, new_tokens), time.monotonic()))

    def _step(self, plan: StepPlan) -> float:
        started = time.perf_counter()
        result = self._target.step(plan)
        seconds = time.perf_counter() - started
        self._send(self._rank.apply(plan, result, time.monotonic(), seconds))
        report = self._rank.report
        assert report is not None
        self._policy.times.fold_report(report)
        return seconds

    def _send(self, out: Outgoing) -> None:
        for _, message in out:
            if isinstance(message, TokenDeltas):
                self._num_tokens += sum(len(delta.token_ids) for delta in message.deltas)
            elif isinstance(message, CloseDraft) and self._drafter is not None:
                self._drafter.close(message.request_ids)
            elif isinstance(message, CommitBatch) and self._drafter is not None:
                started = time.perf_counter()
                proposal = self._drafter.advance(message)
                self._draft_s += time.perf_counter() - started
                if proposal is not None:
                    self._rank.on_message(proposal, time.monotonic())


def _request(index: int, prompt: np.ndarray, new_tokens: int) -> AdmittedRequest:
    greedy = SamplingParams(temperature=0.0)
    return AdmittedRequest(f"r{index}", 0, _INGRESS, prompt, 0, new_tokens, greedy)


def prompt_ids(model_dir: Path, vocab_size: int) -> list[np.ndarray]:
    """`PROMPTS` in the model's tokens; random ones where it has no tokenizer."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        rng = np.random.default_rng(0)
        return [rng.integers(0, vocab_size, 20) for _ in PROMPTS]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return [np.array(tokenizer.encode(text).ids) for text in PROMPTS]


def bench_of(config: ClusterConfig, *, captures: bool) -> Bench:
    """Load both engines and measure the curve. Raises CheckpointError when one of them cannot be loaded."""
    model_dir = find_model(config.model.path)
    target = load_engine(config, configured_taps(config), captures=captures)
    drafter = configured_engine(config, _DRAFTER.name, captures=captures)
    times = quick_samples(target, config).curve()
    return Bench(config, target, drafter, times, prompt_ids(model_dir, target.spec.vocab_size))
