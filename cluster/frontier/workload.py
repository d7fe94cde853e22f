"""The requests that every contender serves, in the same order: code, mathematics, chat and prose in turns.

Pure: the same seed gives the same list, and a shorter list is the beginning of a longer one, so that a text can be
compared over all concurrencies.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

LEAST_REQUESTS = 8  # of a cell: with one stream, a few prompts are no sample
_THINGS = (
    "invoices", "library books", "bus tickets", "seed packets", "train wagons", "postcards", "bicycles",
    "sensor readings", "film reels", "museum visitors", "paint cans", "chess games",
)  # fmt: skip
_SHAPES = (
    "a list of tuples", "a dictionary of lists", "a text file with one record a line", "two sorted lists", "a matrix",
    "a queue",
)  # fmt: skip
_JOBS = (
    "removes duplicates from", "finds the three largest entries of", "sums up by month", "splits into equal parts",
    "checks for missing values in", "merges and sorts",
)  # fmt: skip
_SUBJECTS = (
    "keeping bees in a city", "learning to swim as an adult", "how tides work", "repairing an old radio",
    "planning a week without a car", "why leaves change colour", "the first postal services", "cooking for ten people",
    "how glass is made", "sleeping on a night train", "the moons of Jupiter", "growing herbs on a windowsill",
)  # fmt: skip
_QUESTIONS = (
    "Explain {} in simple words.", "Give me five tips about {}.", "What should a beginner know about {}?",
    "List the advantages and disadvantages of {}.",
)  # fmt: skip
_PLACES = (
    "a harbour in winter", "an empty theatre", "a village on market day", "a mountain hut at night",
    "a greenhouse after rain", "the last tram of the evening",
)  # fmt: skip
_OPENINGS = (
    "Describe {} in one paragraph.", "Write the first page of a story that begins in {}.",
    "Write a short letter from somebody who works in {}.",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """One prompt; `seed` is used at temperatures above zero."""

    kind: str
    prompt: str
    max_tokens: int
    seed: int


def requests_of(count: int, tokens: int, seed: int = 0) -> tuple[Request, ...]:
    """The first `count` requests.

    Args:
        tokens: mean length asked for; each asks for half to one and a half times as many, so that streams do not
            begin and end in step.
    """
    kinds = tuple(_WRITERS)
    chosen = []
    for index in range(count):
        rng, kind = random.Random(f"{seed}-{index}"), kinds[index % len(kinds)]
        length = rng.randint(max(2, tokens // 2), max(2, tokens + tokens // 2))
        chosen.append(Request(kind, _WRITERS[kind](rng), length, seed * 100_000 + index))
    return tuple(chosen)


def num_requests(concurrency: int, waves: int) -> int:
    """Requests of a cell: every stream serves about `waves` of them."""
    return max(LEAST_REQUESTS, concurrency * waves)


def _code(rng: random.Random) -> str:
    return f"Write a Python function that {rng.choice(_JOBS)} {rng.choice(_THINGS)} held in {rng.choice(_SHAPES)}."


def _math(rng: random.Random) -> str:
    a, b, c = rng.randint(13, 420), rng.randint(3, 40), rng.randint(2, 9)
    things = rng.choice(_THINGS)
    asked = (
        f"There are {a} {things}. Every day {b} more arrive. How many are there after {c} days? Show the steps.",
        f"{a * c} {things} are shared equally by {c} people. How many does each get? Explain.",
        f"What is {b}% of {a * 10}? Show the steps.",
    )
    return rng.choice(asked)


def _chat(rng: random.Random) -> str:
    return rng.choice(_QUESTIONS).format(rng.choice(_SUBJECTS))


def _prose(rng: random.Random) -> str:
    return rng.choice(_OPENINGS).format(rng.choice(_PLACES))


_WRITERS: dict[str, Callable[[random.Random], str]] = {
    "code": _code,
    "chat": _chat,
    "math": _math,
    "prose": _prose,
}
