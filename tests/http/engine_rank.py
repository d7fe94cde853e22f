"""A rank with a real (tiny) target engine in a thread, and a drafter that has read what was generated before."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from actors.core.admission import RankLimits
from actors.core.messages import (
    AbortRequest,
    AdmittedRequest,
    CloseDraft,
    CommitBatch,
    Endpoint,
    ProposalBatch,
    TokenDeltas,
)
from actors.core.prefix_scheduler import allocate
from actors.core.rank import Outgoing, Rank
from actors.core.verify_decision import VerifyDecider
from actors.engine.drafters.engine import DSparkEngine
from actors.engine.target_engine import TorchTargetEngine, load_engine
from actors.link import LocalLink
from cluster.text import TextCodec
from configs.schema import ClusterConfig
from tests.http.harness import Server
from tests.pure.rank_harness import VerifyAll
from tests.pure.scripted_drafter import DRAFTER
from tests.torch_cpu.rank_engines import TAPS, VOCAB, write_tiny_llama
from tests.torch_cpu.tiny_tokenizers import write_tokenizer

EOS, GAMMA, MAX_LEN = 2, 4, 128
LETTERS = "".join(chr(c) for c in range(0x20, 0x7F) if chr(c) not in "`~")


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}A: "


async def replace_ranks(server: Server, rank: EngineRank) -> None:
    """Let `rank` serve alone, and wait until the front knows."""
    for old in server.ranks:
        old.kill()
    server.ranks[:] = [rank]  # type: ignore[list-item]
    server.publish()
    version = server.tables[-1].version
    await server.until(lambda: server.dispatcher.router.table.version == version)


def tiny_model(path: Path) -> tuple[TorchTargetEngine, TextCodec]:
    """A random Llama over single letters; EOS is token 2."""
    write_tiny_llama(path)
    file = write_tokenizer(path, LETTERS, specials=3)
    model = {"path": str(path), "dtype": "float32", "max_model_len": MAX_LEN}
    target = {"kv_cache_tokens": 8192, "block_size": 8, "max_batch_tokens": 64}
    engine = load_engine(ClusterConfig.model_validate({"model": model, "target": target}), TAPS)
    tokenizer = Tokenizer.from_file(str(file))
    return engine, TextCodec(tokenizer, eos_token_ids=(EOS,), chat_template=TEMPLATE)


class EngineRank:
    """The loop of a target rank, its engine and its drafter, without Ray.

    The drafter goes on as some earlier stream did that had the same token at the same place; a fifth of its tokens are
    noise. With a `drafter`, that one drafts instead.

    Attributes:
        phases_at_abort: how far requests were when somebody ended them from outside.
    """

    def __init__(
        self,
        link: LocalLink,
        engine: TorchTargetEngine,
        drafter: DSparkEngine | None = None,
        max_waiting: int = 64,
    ) -> None:
        self.name, self.link, self.engine, self.drafter = link.endpoint.name, link, engine, drafter
        self.phases_at_abort: Counter[str] = Counter()
        limits = RankLimits(
            num_blocks=engine.spec.num_blocks,
            block_size=8,
            max_model_len=MAX_LEN,
            vocab_size=VOCAB,
            max_running=32,
            max_waiting=max_waiting,
            max_batch_tokens=64,
            gamma=GAMMA,
            max_wait_s=0.0,
        )
        decider = VerifyDecider(self.name, link.endpoint.epoch, VerifyAll(), allocate)
        self.rank = Rank(link.endpoint, limits, decider)
        self.rank.set_drafters([DRAFTER])
        self.problems: list[str] | None = None
        self._texts: dict[str, list[int]] = {}
        self._rng = random.Random(0)
        self._killed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> Endpoint:
        return self.link.endpoint

    @property
    def is_clean(self) -> bool:
        """Idle, every block, slot and draft context is back, and nothing was found wrong."""
        holds = self.drafter.open_requests() if self.drafter else ()
        pool = self.rank.book.pool
        return self.problems == [] and not holds and pool.num_free == pool.num_blocks

    @property
    def num_accepted(self) -> int:
        return int(self.rank.counters.acceptance.accepted.sum())

    def kill(self) -> None:
        self._killed = True
        self.link.wake()
        self._thread.join()
        self.link.close()

    def _run(self) -> None:
        while not self._killed:
            for message in self.link.poll(0.01):
                self.problems = None
                if isinstance(message, AdmittedRequest):
                    self._texts[message.request_id] = message.prompt_ids.tolist()
                if isinstance(message, AbortRequest):
                    request = self.rank.book.live.get(message.request_id)
                    self.phases_at_abort[request.phase.value if request else "over"] += 1
                self._send(self.rank.on_message(message, time.monotonic()))
            plan = self.rank.plan_step(time.monotonic())
            if plan is not None:
                result = self.engine.step(plan)
                self._send(self.rank.apply(plan, result, time.monotonic(), 0.001))
            elif self.rank.is_idle:
                self.problems = self.rank.check_idle()

    def _send(self, outgoing: Outgoing) -> None:
        for to, message in outgoing:
            if isinstance(message, CloseDraft) and self.drafter is not None:
                self.drafter.close(message.request_ids)
            if isinstance(message, CommitBatch):
                proposal = (self.drafter.advance if self.drafter else self._draft)(message)
                if proposal is not None:
                    self.rank.on_message(proposal, time.monotonic())
                continue
            if isinstance(message, TokenDeltas):
                for delta in message.deltas:
                    self._texts[delta.request_id] += delta.token_ids
            if to != DRAFTER:
                self.link.send(to, message)

    def _draft(self, commit: CommitBatch) -> ProposalBatch | None:
        wants = np.flatnonzero(commit.wants_block)
        if not len(wants):
            return None
        blocks = np.array([self._block(commit, int(i)) for i in wants], np.int32)
        return ProposalBatch(
            DRAFTER.name,
            tuple(commit.request_ids[i] for i in wants),
            commit.generations[wants],
            commit.committed_lens[wants],
            blocks,
            np.full(blocks.shape, 0.9, np.float32),
            blocks[:, :, None],
            np.ones((*blocks.shape, 1), np.float32),
            0.0,
        )

    def _block(self, commit: CommitBatch, index: int) -> list[int]:
        start, anchor = int(commit.committed_lens[index]), int(commit.anchor_token_ids[index])
        known = [
            text[start : start + GAMMA]
            for text in self._texts.values()
            if len(text) > start and text[start - 1] == anchor
        ]
        block = [*(known[0] if known else []), *[0] * GAMMA][:GAMMA]
        return [self._rng.randrange(VOCAB) if self._rng.random() < 0.2 else t for t in block]
