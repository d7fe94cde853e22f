"""How the tokens of a checked request are drawn: parameters, logit rules, and a seed for each of its choices."""

from __future__ import annotations

import hashlib

from actors.core.logit_rules import LogitRules
from actors.core.sampling import SamplingParams
from cluster.api_errors import bad_request
from cluster.openai_api import GenerationRequest
from cluster.structured_output import Trial, grammar_of
from cluster.text import TextCodec

MAX_BIASES = 1024  # OpenAI's own is 300
MAX_ID_DIGITS = 20


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of `n` choices: the first is what the request would get alone, the others are told apart by hash.

    So a seed and n give the same choices again, and a larger n keeps those of a smaller one.
    """
    if choice == 0:
        return seed
    digest = hashlib.sha256(f"choice {choice} of {seed}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def sampling_of(
    request: GenerationRequest,
    codec: TextCodec,
    rules: LogitRules | None,
    noise_key: int,
    choice: int,
) -> SamplingParams:
    """Sampling parameters of one choice; `noise_key` is used when the request has no seed."""
    defaults = codec.default_sampling
    given = {
        name: defaults.get(name, fallback) if value is None else value
        for name, value, fallback in (
            ("temperature", request.temperature, 1.0),
            ("top_p", request.top_p, 1.0),
            ("top_k", request.top_k, 0),
        )
    }
    seed = None if request.seed is None else choice_seed(request.seed, choice)
    return SamplingParams(
        temperature=float(given["temperature"]),
        top_p=float(given["top_p"]),
        # -1 keeps all, in vLLM's words; so does more than there are, and ranks keep it in 32 bits.
        top_k=min(max(0, int(given["top_k"])), codec.vocab_size),
        seed=seed,
        noise_key=noise_key if seed is None else seed,
        speculation=request.dspark is None or request.dspark.speculation,
        rules=rules,
        logprobs=request.logprobs_order,
    )


def rules_of(
    request: GenerationRequest, codec: TextCodec, trial: Trial, forced_grammar: str = ""
) -> LogitRules | None:
    """The request's logit rules; None when they change nothing, so that it costs nothing.

    Args:
        trial: whether anything can be written by a grammar.
        forced_grammar: of a tool call that was demanded.

    Raises:
        ApiError: a bias for a token that does not exist, or a grammar that cannot be followed.
    """
    penalty = request.repetition_penalty
    rules = LogitRules(
        repetition_penalty=1.0 if penalty is None else float(penalty),
        frequency_penalty=float(request.frequency_penalty or 0.0),
        presence_penalty=float(request.presence_penalty or 0.0),
        logit_bias=_biases(request, codec.vocab_size),
        min_tokens=request.min_tokens or 0,
        grammar=forced_grammar
        or grammar_of(request.response_format, request.structured_outputs, trial),
    )
    return None if rules == LogitRules() else rules


def _biases(request: GenerationRequest, vocab_size: int) -> tuple[tuple[int, float], ...]:
    given = request.logit_bias or {}
    if len(given) > MAX_BIASES:
        raise bad_request("logit_bias", len(given), f"give at most {MAX_BIASES} tokens")
    biases = {}
    for key, bias in given.items():
        is_short = len(key) <= MAX_ID_DIGITS  # Python refuses to read thousands of digits
        if not (is_short and key.isascii() and key.isdigit() and int(key) < vocab_size):
            raise bad_request(
                "logit_bias", key, f"keys are token ids, as strings from 0 to {vocab_size - 1}"
            )
        biases[int(key)] = float(bias)
    return tuple(sorted((token_id, bias) for token_id, bias in biases.items() if bias))
