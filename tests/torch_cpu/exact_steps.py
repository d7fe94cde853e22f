"""Exact joint laws of whole streams over many steps: drafts, confidences, lagged budgets, acceptance, ends.

Two requests share every step of a rank or a group. A state is what both have committed, together with what the budgets
of the next two steps will be made from. All states are carried along with their probabilities, so a budget that learns
of a token before it should shows in the law of the two streams, alone or together.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Protocol

import numpy as np
import numpy.typing as npt

from actors.core.sampling import SamplingParams
from tests.torch_cpu.exact_law import Code, commit_laws, drafted
from tests.torch_cpu.tiny_pair import TinyPair, processed

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class StepRows:
    """What a planner sees of a step: its rows, and of which request each is."""

    step: int
    requests: tuple[int, ...]  # [R]
    survivals: Float32  # [R, gamma], zeros without a draft
    caps: Int32  # [R]
    has_draft: npt.NDArray[np.bool_]  # [R]
    num_prefill_tokens: int

    @property
    def key(self) -> Hashable:
        return (
            self.requests,
            self.survivals.tobytes(),
            self.caps.tobytes(),
            self.has_draft.tobytes(),
            self.num_prefill_tokens,
        )


class Planner(Protocol):
    """A policy with the code that serves it. To add one: what it remembers of a step, and what it makes of that."""

    def memory(self, rows: StepRows, before: Hashable) -> Hashable:
        """What budgets of later steps may be made from, given what was remembered before. The fewer different ones,
        the faster; None: nothing yet."""

    def verify_len(self, memory: Hashable, rows: StepRows) -> Int32:
        """Lengths [R]; `memory` is that of two steps before."""


@dataclass(frozen=True)
class Events:
    """What happens around the rounds."""

    joins: tuple[int, int] = (0, 0)  # step from which each request runs
    late: frozenset[tuple[int, int]] = frozenset()  # (request, step) whose block does not come
    prefill: dict[int, int] = field(default_factory=dict)  # prefill tokens of a step


@dataclass(frozen=True)
class Option:
    """Rows of the state with the same draft: what is known of it, and where each length leads."""

    rows: npt.NDArray[np.intp]
    survivals: Float32 | None  # [gamma]; None: no draft
    cap: int
    kernels: dict[int, Float64]  # verify_len: [rows, prefixes]


class Streams:
    """One request: every prefix of up to `max_new` tokens it can have, and what a round makes of each."""

    def __init__(
        self, pair: TinyPair, params: SamplingParams, anchor: int, max_new: int, code: Code
    ) -> None:
        self.pair, self.params, self.anchor, self.max_new = pair, params, anchor, max_new
        lengths = range(max_new + 1)
        self.prefixes: list[Tokens] = [
            p for n in lengths for p in product(range(pair.vocab), repeat=n)
        ]
        self.index = {prefix: i for i, prefix in enumerate(self.prefixes)}
        top_k = len(pair.base[0])
        self.blocks = [drafted(code, pair, a, params, top_k) for a in range(pair.vocab)]
        self.commits = [
            commit_laws(code, pair, a, params, block) for a, block in enumerate(self.blocks)
        ]
        self.ended = self._rows(lambda prefix: len(prefix) == max_new)
        self.with_drafts, self.without = list(self._options(True)), list(self._options(False))

    def law(self) -> Float64:
        """[prefixes] probabilities of the complete ones under the target alone."""
        rows = [
            processed(self.pair.target[0, v].double().numpy(), self.params)
            for v in range(self.pair.vocab)
        ]
        law = np.zeros(len(self.prefixes))
        for prefix in self.prefixes:
            if len(prefix) == self.max_new:
                before = (self.anchor, *prefix)
                law[self.index[prefix]] = np.prod([rows[a][b] for a, b in zip(before, prefix)])  # noqa: B905
        return law

    def _rows(self, wanted) -> npt.NDArray[np.intp]:  # type: ignore[no-untyped-def]
        return np.array([i for i, prefix in enumerate(self.prefixes) if wanted(prefix)], np.intp)

    def _options(self, has_draft: bool) -> Iterator[Option]:
        for anchor, num_left in product(range(self.pair.vocab), range(1, self.max_new + 1)):
            rows = self._rows(
                lambda p, a=anchor, n=num_left: (
                    (p[-1] if p else self.anchor) == a and self.max_new - len(p) == n
                )
            )
            cap = min(self.pair.gamma, num_left - 1)
            if not len(rows):
                continue
            if cap == 0 or not has_draft:  # the last token of a stream uses no draft
                yield Option(rows, None, 0, {0: self._kernel(rows, anchor, None, 0)})
                continue
            for head in sorted({tuple(t[:-1]) for t in self.blocks[anchor].tokens.tolist()}):
                kernels = {n: self._kernel(rows, anchor, head, n) for n in range(cap + 1)}
                yield Option(rows, self._survivals(anchor, head), cap, kernels)

    def _survivals(self, anchor: int, head: Tokens) -> Float32:
        """They depend on the block without its last token."""
        return self.pair.survivals(anchor, np.array([[*head, 0]]))[0]

    def _kernel(
        self, rows: npt.NDArray[np.intp], anchor: int, head: Tokens | None, verify_len: int
    ) -> Float64:
        """From these prefixes to what they become, times the probability of a block that begins with `head`."""
        blocks, kernel = self.blocks[anchor], np.zeros((len(rows), len(self.prefixes)))
        for path, tokens in enumerate(blocks.tokens.tolist()):
            if head is not None and tuple(tokens[:-1]) != head:
                continue
            law = self.commits[anchor][path, verify_len]
            for count, token in np.argwhere(law):
                run = (*tokens[:count], int(token))
                chance = blocks.probability[path] * law[count, token]
                for at, row in enumerate(rows):
                    prefix = self.prefixes[row]
                    kernel[at, self.index[(*prefix, *run)[: self.max_new]]] += chance
        return kernel


def joint_law(pair_of_streams: Sequence[Streams], planner: Planner, events: Events) -> Float64:
    """P(both complete outputs), [prefixes of the first, prefixes of the second]."""
    first, second = pair_of_streams
    start = np.zeros((len(first.prefixes), len(second.prefixes)))
    start[0, 0] = 1.0
    states: dict[tuple[Hashable, Hashable], Float64] = {(None, None): start}
    last_step = max(events.joins) + max(first.max_new, second.max_new)
    for step in range(last_step):
        states = _step(pair_of_streams, planner, events, step, states)
    law: Float64 = sum(states.values(), start=np.zeros_like(start))
    return law


def _step(
    pair_of_streams: Sequence[Streams],
    planner: Planner,
    events: Events,
    step: int,
    states: dict[tuple[Hashable, Hashable], Float64],
) -> dict[tuple[Hashable, Hashable], Float64]:
    after: dict[tuple[Hashable, Hashable], Float64] = {}
    options = [_options(s, events, r, step) for r, s in enumerate(pair_of_streams)]
    for chosen in product(*options):
        present = tuple(r for r, option in enumerate(chosen) if option.kernels)
        rows = _rows(pair_of_streams, chosen, present, step, events)
        for (newest, older), state in states.items():
            part = state[np.ix_(chosen[0].rows, chosen[1].rows)]
            if not part.any():
                continue
            if not present:
                key, moved = (newest, newest), state * 0
                moved[np.ix_(chosen[0].rows, chosen[1].rows)] = part
            else:
                lens = planner.verify_len(older, rows)
                moves = [
                    np.eye(len(s.prefixes))[o.rows]
                    for s, o in zip(pair_of_streams, chosen, strict=True)
                ]
                for row, request in enumerate(present):
                    moves[request] = chosen[request].kernels[int(lens[row])]
                moved = moves[0].T @ part @ moves[1]
                key = (planner.memory(rows, newest), newest)
            after[key] = after[key] + moved if key in after else moved
    return after


def _options(streams: Streams, events: Events, request: int, step: int) -> list[Option]:
    """What this request may bring to the step; an option without kernels is absent."""
    everyone = np.arange(len(streams.prefixes))
    if step < events.joins[request]:
        return [Option(everyone, None, 0, {})]
    runs = streams.without if (request, step) in events.late else streams.with_drafts
    return [*runs, Option(streams.ended, None, 0, {})]


def _rows(
    pair_of_streams: Sequence[Streams],
    chosen: Sequence[Option],
    present: tuple[int, ...],
    step: int,
    events: Events,
) -> StepRows:
    gamma = pair_of_streams[0].pair.gamma
    drafts = [chosen[request].survivals for request in present]
    nothing = np.zeros(gamma, np.float32)
    return StepRows(
        step,
        present,
        np.array([nothing if d is None else d for d in drafts], np.float32).reshape(-1, gamma),
        np.array([chosen[request].cap for request in present], np.int32),
        np.array([d is not None for d in drafts], np.bool_),
        events.prefill.get(step, 0),
    )
