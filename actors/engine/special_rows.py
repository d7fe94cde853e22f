"""The rows of a step with logit rules or log probabilities: what happens to their logits around acceptance."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from actors.core.layout import SpecialRow, StepPlan
from actors.core.logit_edits import drafts_of, first_decided_rows, logit_edits
from actors.core.logit_rules import TokenLogprobs
from actors.engine.grammars import GrammarDesk, TokenMasks
from kernels.logit_edits import edit_logits, mask_logits, token_logprobs
from kernels.reference import working_precision
from kernels.rejection import process_logits


class SpecialStep:
    """One step's special rows. First `shape` the logits, then accept, then `logprobs`.

    Args:
        plan: the step.
        logits: [L, V] of the tokens the step decides with; raw, and changed in place by `shape`.
        grammars: follows the grammars of the rows that have one.
    """

    def __init__(self, plan: StepPlan, logits: Tensor, grammars: GrammarDesk | None = None) -> None:
        self._plan = plan
        self._masks = _no_grammars(plan) if grammars is None else grammars.masks(plan)
        self._firsts = first_decided_rows(plan)
        self._asking = [s for s in plan.special if s.sampling.logprobs is not None]
        self._raw = {
            s.row: logits[self._rows(s)].clone()
            for s in self._asking
            if s.sampling.logprobs is not None and s.sampling.logprobs.of == "raw"
        }
        self.logits = logits

    def shape(self) -> Tensor:
        """The logits that decide, [L, V]: rules applied to every position of every row that has some."""
        if any(s.sampling.rules is not None for s in self._plan.special):
            # Exact: acceptance computes in float32 anyway. The penalties must not be rounded to bfloat16.
            self.logits = working_precision(self.logits)
            edits = logit_edits(self._plan)
            if edits is not None:
                edit_logits(self.logits, edits)
        if self._masks is not None and len(self._masks.rows):
            mask_logits(self.logits, self._masks.rows, self._masks.bits)
        return self.logits

    @property
    def errors(self) -> dict[int, str]:
        """Rows of the plan whose grammar cannot be followed any further."""
        return {} if self._masks is None else self._masks.errors

    def logprobs(
        self,
        num_accepted: np.ndarray[tuple[int], np.dtype[np.int32]],
        next_token: np.ndarray[tuple[int], np.dtype[np.int32]],
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        """For each row that asks: one entry an accepted token, and one for the target's own."""
        return {
            special.row: self._of_row(
                special, int(num_accepted[special.row]), int(next_token[special.row])
            )
            for special in self._asking
        }

    def _of_row(
        self, special: SpecialRow, accepted: int, next_token: int
    ) -> tuple[TokenLogprobs, ...]:
        order = special.sampling.logprobs
        assert order is not None
        drafts = drafts_of(self._plan, special.row)[:accepted].tolist()
        tokens = torch.tensor([*drafts, next_token], device=self.logits.device)
        if order.of == "raw":
            logits = self._raw[special.row]
        else:
            logits = self._processed(special)
        own, ids, values = (
            t.tolist() for t in token_logprobs(logits[: accepted + 1], tokens, order.num_top)
        )
        return tuple(
            TokenLogprobs(one, tuple(top), tuple(of_top))
            for one, top, of_top in zip(own, ids, values, strict=True)
        )

    def _processed(self, special: SpecialRow) -> Tensor:
        logits, sampling = self.logits[self._rows(special)], special.sampling
        if sampling.temperature == 0.0:
            return logits

        def column(value: float) -> Tensor:
            return torch.full((len(logits),), value, device=logits.device)

        return process_logits(
            logits,
            column(sampling.temperature),
            column(sampling.top_p),
            column(sampling.top_k).long(),
        ).log()

    def _rows(self, special: SpecialRow) -> slice:
        first = int(self._firsts[special.row])
        return slice(first, first + 1 + int(self._plan.verify_len[special.row]))


def _no_grammars(plan: StepPlan) -> TokenMasks:
    """A target without a desk does not answer without the grammar that was asked for: it refuses."""
    guided = [s.row for s in plan.special if s.sampling.rules and s.sampling.rules.grammar]
    errors = dict.fromkeys(guided, "this target cannot follow grammars")
    return TokenMasks(np.empty(0, np.int64), np.empty((0, 0), np.int32), errors)
