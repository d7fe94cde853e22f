"""C1 and C3 over whole streams: every policy × every processing of the target's distribution, exactly.

Two requests share the steps from their first token to their last, so budgets made of one step's survivals meet the
drafts of later ones, requests join late, lose blocks, ride beside prefill and end. The joint law of both outputs must
be the product of the target's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from actors.core.local_policy import LocalPolicy
from actors.core.prefix_scheduler import allocate, search
from actors.core.service_class import ServiceClass
from tests.torch_cpu.exact_law import Code, total_variation
from tests.torch_cpu.exact_steps import Events, Planner, StepRows, Streams, joint_law
from tests.torch_cpu.planners import AllocatorPlanner, LocalPlanner
from tests.torch_cpu.test_losslessness import APPENDIX_A, PARAMS, appendix_a, curve
from tests.torch_cpu.tiny_pair import TinyPair

# Found by trying: with these, what was seen two steps ago changes the lengths of nearly every step.
CURVE = curve([1.0, 1.3, 1.6, 2.1, 2.6, 2.62, 3.12, 3.42, 3.92], gamma=2)
CONFIDENCE = {21: [[0.46, 0.87], [0.51, 0.21]], 22: [[0.87, 0.83], [0.22, 0.88]]}
CLASSES = (ServiceClass("a", weight=0.7), ServiceClass("b"))
PREFILL = 2

PLANNERS: dict[str, Callable[[], Planner]] = {
    "none": lambda: LocalPlanner(lambda: LocalPolicy("none"), CURVE),
    "static_length": lambda: LocalPlanner(lambda: LocalPolicy("static_length", 1), CURVE),
    "static_threshold": lambda: LocalPlanner(
        lambda: LocalPolicy("static_threshold", 0, 0.4), CURVE
    ),
    "algorithm1": lambda: LocalPlanner(lambda: LocalPolicy("algorithm1"), CURVE),
    "lagged, decided locally": lambda: LocalPlanner(
        lambda: LocalPolicy("lagged"), CURVE, (0, PREFILL)
    ),
    "lagged, by the allocator": lambda: AllocatorPlanner(CURVE),
    "joint": lambda: AllocatorPlanner(CURVE, 2, joint=True),
    "joint, with classes": lambda: AllocatorPlanner(CURVE, joint=True, classes=CLASSES),
}
TOGETHER = Events()
EVENTS = Events(joins=(0, 1), late=frozenset({(0, 1)}), prefill={2: PREFILL, 3: PREFILL})


def homogeneous(seed: int, vocab: int) -> TinyPair:
    """A target whose law depends on the token before alone, so that a stream can be of any length."""
    pair = TinyPair.random(seed, gamma=2, vocab=vocab, dtype=torch.float64)
    confidence = np.array(CONFIDENCE.get(seed, pair.confidence), np.float32)
    return replace(pair, target=pair.target[:1].expand(3, -1, -1), confidence=confidence)


@cache
def streams(seed: int, vocab: int, name: str, max_new: int) -> Streams:
    return Streams(homogeneous(seed, vocab), PARAMS[name], seed % vocab, max_new, Code())


def law_error(planner: Planner, both: list[Streams], events: Events) -> float:
    law = joint_law(both, planner, events)
    return total_variation(law, np.outer(both[0].law(), both[1].law()))


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("name", PLANNERS)
def test_whole_streams_keep_their_joint_law(name: str, params: str) -> None:
    both = [streams(21, 2, params, 5), streams(22, 2, params, 4)]
    assert law_error(PLANNERS[name](), both, EVENTS) < 1e-9


@pytest.mark.parametrize("name", PLANNERS)
def test_requests_of_different_laws_share_the_steps(name: str) -> None:
    both = [streams(23, 3, "top_k and top_p", 4), streams(24, 3, "hot", 3)]
    assert law_error(PLANNERS[name](), both, TOGETHER) < 1e-9


@pytest.mark.parametrize("name", list(PLANNERS)[-4:])
def test_the_streams_do_exercise_budgets_that_depend_on_older_steps(name: str) -> None:
    """Otherwise the tests above would show nothing about them."""
    planner = PLANNERS[name]()
    chosen: dict[bytes, set[tuple[int, ...]]] = {}

    class Watched:
        def memory(self, rows, before):  # type: ignore[no-untyped-def]
            return planner.memory(rows, before)

        def verify_len(self, memory, rows):  # type: ignore[no-untyped-def]
            lens = planner.verify_len(memory, rows)
            if memory is None:
                return lens
            seen = rows.survivals.tobytes() + rows.caps.tobytes() + bytes(rows.requests)
            chosen.setdefault(seen, set()).add(tuple(lens.tolist()))
            return lens

    law_error(Watched(), [streams(21, 2, "plain", 5), streams(22, 2, "plain", 4)], TOGETHER)
    assert any(len(lens) > 1 for lens in chosen.values())


# --- mutants --------------------------------------------------------------------------------------------------------


class CurrentSurvivals(LocalPlanner):
    """A budget searched on the confidences of the very step it steers."""

    def verify_len(self, memory, rows: StepRows):  # type: ignore[no-untyped-def]
        found = search(rows.survivals, self._curve)
        return allocate(rows.survivals, found.max_draft_tokens, found.min_survival, rows.caps)


class OthersFirst(LocalPlanner):
    """Room for one token, given to whichever request has the worse second slot: a look at its first token."""

    def verify_len(self, memory, rows: StepRows):  # type: ignore[no-untyped-def]
        lens = np.zeros(len(rows.requests), np.int32)
        if rows.caps.any():
            rank = np.where(rows.caps > 0, rows.survivals[:, 1], np.inf)
            lens[int(rank.argmin())] = 1
        return lens


@cache
def appendix_a_twice() -> list[Streams]:
    return [Streams(appendix_a(), PARAMS["plain"], 0, 3, Code()) for _ in range(2)]


@pytest.mark.parametrize(
    ("mutant", "events"),
    [(CurrentSurvivals, Events(joins=(0, 3))), (OthersFirst, TOGETHER)],  # the first: one at a time
)
def test_a_planner_that_looks_ahead_shows_in_the_joint_law(
    mutant: type[LocalPlanner], events: Events
) -> None:
    planner = mutant(lambda: LocalPolicy("lagged"), APPENDIX_A)
    assert law_error(planner, appendix_a_twice(), events) > 1e-3


@pytest.mark.parametrize("name", PLANNERS)
def test_appendix_a_over_whole_streams_is_kept_by_every_planner(name: str) -> None:
    assert law_error(PLANNERS[name](), appendix_a_twice(), TOGETHER) < 1e-9
