"""Prompts of the tenants: code, chat and math: endless streams of prompts, the same for the same seed.

Pure: a tenant, a seed and a count give the same prompt everywhere, so two servers can be given the same load.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

Write = Callable[[random.Random], str]

NOUNS = (
    "orders",
    "planets",
    "recipes",
    "sensors",
    "books",
    "matches",
    "invoices",
    "trains",
    "songs",
    "cells",
)
VERBS = (
    "sorts",
    "groups",
    "counts",
    "filters",
    "merges",
    "validates",
    "reverses",
    "compares",
    "summarises",
)
TYPES = (
    "a list of dictionaries",
    "a CSV file",
    "two strings",
    "a nested list",
    "a binary tree",
    "a JSON document",
)
TOPICS = (
    "growing tomatoes on a balcony", "the history of the bicycle", "how vaccines work", "learning the piano at forty",
    "why the sea is salty", "preparing for a job interview", "the rules of chess", "saving water at home",
    "how bridges carry load", "choosing a first telescope", "baking bread", "the life of a honey bee",
)  # fmt: skip
FORMS = (
    "Explain {topic} to a curious ten-year-old.",
    "Give me five practical tips about {topic}.",
    "Write a short friendly letter about {topic}.",
    "What do people most often get wrong about {topic}?",
    "Tell me something surprising about {topic}, and why it matters.",
)


@dataclass(frozen=True)
class Tenant:
    """One kind of traffic: who sends it, what it asks, how much it wants back."""

    name: str
    write: Write
    max_tokens: tuple[int, int]  # shortest and longest answer asked for

    def ask(self, seed: int, index: int) -> tuple[str, int]:
        """Return the prompt and max_tokens of request `index` under `seed`."""
        rng = random.Random(f"{self.name}-{seed}-{index}")
        return self.write(rng), rng.randint(*self.max_tokens)


def _code(rng: random.Random) -> str:
    noun, other = rng.sample(NOUNS, 2)
    task = f"{rng.choice(VERBS)} {noun} by the number of {other} in {rng.choice(TYPES)}"
    return f"Write a Python function `{rng.choice(NOUNS)}_{rng.randint(2, 99)}` that {task}. Add a docstring."


def _chat(rng: random.Random) -> str:
    return rng.choice(FORMS).format(topic=rng.choice(TOPICS))


def _math(rng: random.Random) -> str:
    a, b, c = rng.randint(12, 480), rng.randint(3, 60), rng.randint(2, 12)
    return rng.choice(
        (
            f"A shop sells {a} {rng.choice(NOUNS)} in {b} days. How many in {b * c} days? Think step by step.",
            f"Compute {a} * {b} - {c} step by step.",
            f"The sum of two numbers is {a + b} and their difference is {abs(a - b)}. Find both.",
        )
    )


TENANTS = {
    tenant.name: tenant
    for tenant in (
        Tenant("code", _code, (48, 128)),
        Tenant("chat", _chat, (48, 128)),
        Tenant("math", _math, (32, 96)),
    )
}


def parse_mix(text: str) -> dict[str, float]:
    """Read `code=2,chat=1` as shares that sum to one.

    Raises:
        ValueError: naming an unknown tenant or a weight that is no positive number.
    """
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = part.partition("=")
        name = name.strip()
        if name not in TENANTS:
            raise ValueError(f"--mix {text!r}: no tenant {name!r}; use {', '.join(TENANTS)}")
        try:
            weights[name] = float(weight or 1)
        except ValueError:
            weights[name] = 0.0
        if not 0 < weights[name] < float("inf"):
            raise ValueError(f"--mix {text!r}: {name} needs a positive number")
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}
