"""DSpark's acceptance length over that of drafters trained on the same text for as many steps (paper, Table 1).

Ratios come with a spread: answers are drawn again, with replacement, within each domain, the same ones for both
drafters of a ratio. It says how far other held-out answers could have moved a ratio, not what another run would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.engine.training.evaluate import macro_domains
from actors.engine.training.replay import Acceptance, Blocks

Float64 = npt.NDArray[np.float64]
DSPARK = "dspark"
NUM_RESAMPLES = 2000
INTERVAL = (2.5, 97.5)  # percentiles of the resamples


@dataclass(frozen=True)
class AnswerRounds:
    """What one drafter made of each answer: committed tokens, bonus included, and rounds, both expectations."""

    domains: Mapping[str, str]  # by answer
    committed: Mapping[str, float]
    rounds: Mapping[str, float]

    @classmethod
    def of(cls, every: Sequence[Blocks]) -> AnswerRounds:
        """Count every answer's rounds with whole blocks."""
        tallies = {}
        for blocks in every:
            tallies[blocks.record_id] = Acceptance(blocks.accept.shape[1])
            tallies[blocks.record_id].add(blocks)
        return cls(
            {blocks.record_id: blocks.domain for blocks in every},
            {answer: tally.committed for answer, tally in tallies.items()},
            {answer: tally.rounds for answer, tally in tallies.items()},
        )


@dataclass(frozen=True)
class Entrant:
    """A drafter in the comparison.

    Args:
        name: what the report calls it.
        plain: what a drafter of its kind and head is called.
        trained_on: (steps, answer tokens); None where either is not known.
        by_temperature: what it made of the held-out answers.
    """

    name: str
    plain: str
    num_layers: int
    trained_on: tuple[int, int] | None
    by_temperature: Mapping[float, AnswerRounds]


def alike(entrants: Sequence[Entrant]) -> dict[str, Entrant]:
    """Return the largest group that was trained alike and has a DSpark in it; empty without one.

    The first of each kind and head is called by its plain name, one as deep as DSpark before others; the others by
    their own.
    """
    groups: dict[tuple[int, int], list[Entrant]] = {}
    for entrant in entrants:
        if entrant.trained_on is not None:
            groups.setdefault(entrant.trained_on, []).append(entrant)
    fit = [g for g in groups.values() if len(g) > 1 and any(e.plain == DSPARK for e in g)]
    group = max(fit, key=len, default=[])
    depth = next((e.num_layers for e in group if e.plain == DSPARK), 0)
    named: dict[str, Entrant] = {}
    for entrant in sorted(group, key=lambda e: e.num_layers != depth):
        named[entrant.name if entrant.plain in named else entrant.plain] = entrant
    return named


def report(entrants: Sequence[Entrant]) -> dict[str, Any] | None:
    """Return who was trained alike, and DSpark's ratios to each at every temperature; None without such a group."""
    named = alike(entrants)
    if not named:
        return None
    dspark = named[DSPARK]
    assert dspark.trained_on is not None
    steps, answer_tokens = dspark.trained_on
    found: dict[str, Any] = {
        "steps": steps,
        "answer_tokens": answer_tokens,
        "drafters": {n: {"entry": e.name, "num_layers": e.num_layers} for n, e in named.items()},
        "resamples": NUM_RESAMPLES,
        "interval": list(INTERVAL),
    }
    for temperature in dspark.by_temperature:
        rounds = {name: entrant.by_temperature[temperature] for name, entrant in named.items()}
        found[f"temperature_{temperature:g}"] = {
            f"{DSPARK}/{name}": ratio(rounds[DSPARK], rounds[name])
            for name in named
            if name != DSPARK
        }
    return found


def ratio(over: AnswerRounds, under: AnswerRounds, seed: int = 0) -> dict[str, float | None]:
    """Return the ratio of the macro acceptance lengths on the answers both have, and its interval over resamples.

    The interval is None where a domain has one answer only: drawn again it says nothing about others.
    """
    answers = sorted(over.domains.keys() & under.domains.keys())
    domains = np.array([over.domains[answer] for answer in answers])
    sides = [
        np.array([[side.committed[a], side.rounds[a]] for a in answers]) for side in (over, under)
    ]
    chosen = macro_domains(sorted(set(domains.tolist())))
    rng = np.random.default_rng(seed)
    exact, drawn = np.zeros((2, len(chosen))), np.zeros((2, len(chosen), NUM_RESAMPLES))
    for d, domain in enumerate(chosen):
        rows = np.flatnonzero(domains == domain)
        times = rng.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), NUM_RESAMPLES)
        for s, side in enumerate(sides):
            exact[s, d] = _length(side[rows].sum(0))
            drawn[s, d] = _length(times @ side[rows])
    over_mean, under_mean = exact.mean(1)
    over_drawn, under_drawn = drawn.mean(1)
    found: dict[str, float | None] = {"ratio": round(float(over_mean / under_mean), 4)}
    if min(np.count_nonzero(domains == domain) for domain in chosen) < 2:
        return found | {"low": None, "high": None}
    low, high = np.percentile(over_drawn / under_drawn, INTERVAL)
    return found | {"low": round(float(low), 4), "high": round(float(high), 4)}


def _length(counts: Float64) -> Float64:
    """Return committed tokens a round of counts [..., 2]."""
    length: Float64 = counts[..., 0] / counts[..., 1]
    return length
