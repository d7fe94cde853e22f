"""The running requests of a rank as arrays: one slot a request, one array a fact.

A step for hundreds of requests is laid out by gathering slots, not by visiting objects. `Request` owns what a stream is
about (tokens, stop conditions, counters); the table holds what the next forward reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from actors.core.kv_blocks import BlockLease
from actors.core.messages import ProposalBatch
from actors.core.request import Phase, Request
from actors.core.sampling import SamplingBatch

Int32 = npt.NDArray[np.int32]
Slots = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]


class RowTable:
    """S slots of at most `max_model_len` tokens each. All arrays are indexed by slot."""

    def __init__(self, num_slots: int, max_blocks: int, gamma: int) -> None:
        self.num_slots = num_slots
        self.gamma = gamma
        self.requests: list[Request | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        # --- the request ---
        self.generation = np.zeros(num_slots, np.int32)
        self.arrival = np.zeros(num_slots, np.int64)
        self.class_id = np.zeros(num_slots, np.int32)
        self.stream_key = np.zeros(num_slots, np.uint64)  # of its id: the same on any rank
        self.has_rules: Mask = np.zeros(
            num_slots, np.bool_
        )  # its target law is not the model's own
        self.committed_len = np.zeros(num_slots, np.int32)  # context_len + 1, in a prompt too
        self.anchor_token_id = np.zeros(num_slots, np.int32)
        self.num_remaining = np.zeros(num_slots, np.int32)  # tokens it may still produce
        self.block_table = np.zeros((num_slots, max_blocks), np.int32)  # padded with 0
        self.leased_len = np.zeros(num_slots, np.int32)  # tokens its blocks have room for
        self.sampling = SamplingBatch(
            np.ones(num_slots, np.float32),
            np.ones(num_slots, np.float32),
            np.zeros(num_slots, np.int32),
            np.zeros(num_slots, np.uint64),
            np.zeros(num_slots, np.int8),
        )
        self.is_special: Mask = np.zeros(num_slots, np.bool_)  # see `StepPlan.special`
        self.is_running: Mask = np.zeros(num_slots, np.bool_)  # past its prompt: it takes rounds
        self.last_step = np.zeros(num_slots, np.int64)  # when it last had a round
        # --- the draft it waits for ---
        self.wants_draft: Mask = np.zeros(
            num_slots, np.bool_
        )  # a block was asked for, none is here
        self.is_due: Mask = np.zeros(num_slots, np.bool_)  # and it is still worth waiting for
        self.is_unasked: Mask = np.zeros(
            num_slots, np.bool_
        )  # it could use one; none was asked for
        self.told_at = np.zeros(num_slots, np.float64)  # s; the drafter, and asked if at all
        self.drafter_index = np.full(num_slots, -1, np.int64)
        self.draft_len = np.zeros(num_slots, np.int32)  # tokens whose features its drafter was told
        # --- the draft it has ---
        self.has_draft: Mask = np.zeros(num_slots, np.bool_)
        self.draft_token_ids = np.zeros((num_slots, gamma), np.int32)
        self.confidences = np.zeros((num_slots, gamma), np.float32)  # as the drafter gave them
        self.drafted_len = np.zeros(num_slots, np.int32)  # slots of it that were drafted
        self.q_ids = np.full((num_slots, gamma, 1), -1, np.int32)  # [S, gamma, draft_top_k]
        self.q_probs = np.zeros((num_slots, gamma, 1), np.float32)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def place(self, request: Request, lease: BlockLease) -> None:
        """Give the request a slot and its blocks, until `clear`."""
        slot = self._free.pop()
        request.start(slot, lease)
        self.requests[slot] = request
        self.generation[slot] = request.generation
        self.arrival[slot] = request.arrival
        self.class_id[slot] = request.admitted.class_id
        self.stream_key[slot] = _stream_key(request.request_id)
        self.block_table[slot, lease.num_blocks :] = 0
        self._take_over_blocks(request)
        params = request.admitted.sampling
        self.sampling.temperature[slot] = params.temperature
        self.sampling.top_p[slot] = params.top_p
        self.sampling.top_k[slot] = params.top_k
        self.sampling.noise_key[slot] = params.noise_key & (2**64 - 1)
        self.sampling.rule[slot] = params.rule
        self.is_special[slot] = params.is_special
        self.has_rules[slot] = params.rules is not None
        self.last_step[slot] = 0
        self.advance(request)

    def advance(self, request: Request) -> None:
        """Take over what a step committed. In the middle of a prompt the anchor is its next token."""
        slot = request.slot
        self.committed_len[slot] = request.context_len + 1
        self.anchor_token_id[slot] = request.token_ids[request.context_len]
        self.num_remaining[slot] = request.num_remaining
        self.is_running[slot] = request.phase is Phase.RUNNING

    def extend(self, request: Request, num_tokens: int) -> bool:
        """See that its blocks have room for `num_tokens` tokens in all; False when there are too few."""
        if not request.lease.extend(num_tokens):
            return False
        self._take_over_blocks(request)
        return True

    def share(self, request: Request, first: int, blocks: Sequence[int]) -> None:
        """Use known blocks as those of the request from index `first` on."""
        for index, block in enumerate(blocks, first):
            request.lease.share(index, block)
        self._take_over_blocks(request)

    def draft_room(self, slots: Slots) -> Int32:
        """[len(slots)] draft tokens the blocks of these running requests have room for."""
        room: Int32 = self.leased_len[slots] - self.committed_len[slots]
        return room

    def _take_over_blocks(self, request: Request) -> None:
        blocks = request.lease.blocks
        self.block_table[request.slot, : len(blocks)] = blocks
        self.leased_len[request.slot] = request.lease.num_tokens

    def clear(self, slot: int) -> None:
        assert self.requests[slot] is not None, f"slot {slot} is cleared twice"
        self.requests[slot] = None
        self.is_running[slot] = self.has_draft[slot] = self.wants_draft[slot] = False
        self.is_special[slot] = self.is_unasked[slot] = False
        self.drafter_index[slot] = -1
        self._free.append(slot)

    def store_drafts(self, batch: ProposalBatch, rows: Slots, slots: Slots) -> None:
        """Keep rows of a proposal whose lengths and generations were found to match `slots`."""
        support = batch.q_ids.shape[2]
        if support > self.q_ids.shape[2]:
            self._widen_support(support)
        self.draft_token_ids[slots] = batch.draft_token_ids[rows]
        self.confidences[slots] = batch.confidences[rows]
        self.drafted_len[slots] = self.gamma if batch.draft_lens is None else batch.draft_lens[rows]
        self.q_ids[slots, :, :support] = batch.q_ids[rows]
        self.q_probs[slots, :, :support] = batch.q_probs[rows]
        self.q_ids[slots, :, support:] = -1
        self.q_probs[slots, :, support:] = 0.0
        self.has_draft[slots] = True
        self.wants_draft[slots] = False

    def _widen_support(self, support: int) -> None:
        old = self.q_ids.shape[2]
        q_ids = np.full((self.num_slots, self.gamma, support), -1, np.int32)
        q_probs = np.zeros((self.num_slots, self.gamma, support), np.float32)
        q_ids[:, :, :old], q_probs[:, :, :old] = self.q_ids, self.q_probs
        self.q_ids, self.q_probs = q_ids, q_probs


def _stream_key(request_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")
