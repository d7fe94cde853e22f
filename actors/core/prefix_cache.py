"""Prompts that begin alike share what was computed for them (C7): K/V in the pool's blocks, features beside them.

A full block is known by a chained digest: of the digest of the block before it and of its own tokens; the chain begins
with the identity of the model. Equal digests mean equal tokens from the first one on, so equal K/V: bit for bit where a
row's result does not depend on its batch (`numerics: reproducible`), and as close as another chunking of the prompt
where it does. Layers with a sliding window keep all their K/V, so a hit is right for them too.

**The draft context.** A drafter builds its context from features of the target. They are kept here in one row a KV
slot, written by the very step that writes the slot's K/V and void with it. So whatever the cache holds for the target
it holds for any drafter: a hit tells the request's drafter the features of the hit as if they had just been computed
(`draft_feed`), and its context, with it the acceptance, is the cold run's. Letting drafters keep blocks of their own
would save these messages, but then the rank had to know what a drafter still holds, across lost messages, evictions and
restarts; here drafters keep no state worth knowing, one that restarts is told everything again, and a context can be of
any kind. The price is host memory (the features of `kv_cache_tokens` tokens, touched as they are used) and one copy of
its features a step.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from actors.core.kv_blocks import BlockPool
from actors.core.layout import StepPlan
from actors.core.request import Request
from actors.core.row_table import RowTable

Features = npt.NDArray[np.uint16] | npt.NDArray[np.float32]


class PrefixCache:
    """What a rank still knows of prompts and outputs it has computed.

    Attributes:
        num_asked_tokens: tokens to be computed before their first one, of all requests that got a place.
        num_hit_tokens: those of them that did not have to be computed.
        num_hits: requests that found anything of it when they got their place.
    """

    def __init__(self, pool: BlockPool, model_identity: str, enabled: bool) -> None:
        self.enabled = enabled
        self.num_asked_tokens = self.num_hit_tokens = self.num_hits = 0
        self._pool = pool
        self._root = hashlib.sha256(model_identity.encode()).digest()
        self._features: Features | None = None  # [num_blocks * block_size, feature_dim]

    def known_blocks(self, request: Request) -> list[int]:
        """The blocks that hold what the request has to compute next, as far as they are known without a gap."""
        known: list[int] = []
        size = self._pool.block_size
        index = request.context_len // size
        most = (request.context_len + request.num_prefill_left - 1) // size
        while self.enabled and index + len(known) < most:
            block = self._pool.find(self._digest(request, index + len(known)))
            if block is None:
                break
            known.append(block)
        return known

    def begin(self, request: Request, num_known: int, table: RowTable) -> None:
        """A request got its place, with blocks of which the first `num_known` are known."""
        if self.enabled:
            self.num_asked_tokens += request.num_prefill_left
            self.num_hits += num_known > 0
        self._skip(request, num_known, table)

    def adopt(self, request: Request, table: RowTable) -> None:
        """Let a request in prefill go on behind all that is known of its prompt; its last token is always computed.

        A block it has filled in part is given up for the known, full one.
        """
        first, known = request.context_len // self._pool.block_size, self.known_blocks(request)
        if known:
            table.share(request, first, known)
            self._skip(request, first + len(known), table)

    def _skip(self, request: Request, num_known: int, table: RowTable) -> None:
        num_tokens = num_known * self._pool.block_size - request.context_len
        if num_tokens > 0:
            self.num_hit_tokens += num_tokens
            request.skip_prefill(num_tokens)
            request.num_named = num_known
            table.advance(request)

    def keep(self, plan: StepPlan, features: Features | None) -> None:
        """Keep the features of a step beside the K/V it wrote. Those of refused tokens go when their slots do."""
        if not self.enabled or features is None or not features.shape[1]:
            return
        if self._features is None:
            shape = (self._pool.num_blocks * self._pool.block_size, features.shape[1])
            self._features = np.empty(shape, features.dtype)
        self._features[plan.slot_mapping] = features

    def features_of(self, slots: npt.NDArray[np.intp]) -> Features:
        """[len(slots), feature_dim] of these KV slots; without columns while the target taps nothing."""
        if self._features is None:
            return np.zeros((len(slots), 0), np.float32)
        return self._features[slots]

    def note(self, request: Request) -> None:
        """Make the blocks known that the committed tokens of a request fill. Its lease must be open."""
        num_full = request.context_len // self._pool.block_size
        if not self.enabled or num_full <= request.num_named:
            return
        for index in range(request.num_named, num_full):
            self._pool.name(int(request.lease.blocks[index]), self._digest(request, index))
        request.num_named = num_full

    def _digest(self, request: Request, index: int) -> bytes:
        size, digests = self._pool.block_size, request.digests
        for i in range(len(digests), index + 1):
            tokens = request.token_ids[i * size : (i + 1) * size].astype("<i4").tobytes()
            digests.append(
                hashlib.sha256((digests[-1] if digests else self._root) + tokens).digest()
            )
        return digests[index]
