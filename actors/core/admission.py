"""The door of a rank: who gets room, who is refused and why, and what was already dealt with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from actors.core.kv_blocks import BlockPool
from actors.core.messages import AdmittedRequest, ReservationReply, Reserve
from actors.core.request import Request, Reservation, worst_case_len

_REMEMBERED = 8192
_DEFAULT_RETRY_S = 1.0
_MAX_RETRY_S = 30.0


@dataclass(frozen=True)
class RankLimits:
    """What one rank may hold and run. Facts of the loaded target and values of the configuration."""

    num_blocks: int
    block_size: int  # tokens
    max_model_len: int  # tokens
    vocab_size: int
    max_running: int  # requests
    max_waiting: int  # requests
    max_batch_tokens: int
    gamma: int = 0  # 0: no speculation
    max_wait_s: float = 0.25  # for a proposal
    stop_share: float = 0.0  # of the price below which a slot is not drafted; 0: whole blocks
    reservation_ttl_s: float = 10.0
    explain_rounds: int = 0  # kept a request; 0: only of those that ask
    max_step_stretch: float = 2.5  # by prefill, of a step with rounds
    prefix_cache: bool = True  # share what prompts begin with
    model_identity: str = ""  # of whatever K/V and features depend on besides tokens

    def __post_init__(self) -> None:
        # One round with a full block, plus one token of prefill beside it.
        assert self.max_batch_tokens >= 2, f"max_batch_tokens={self.max_batch_tokens}"
        assert self.max_running >= 1 and self.gamma >= 0


class AdmissionDesk:
    """Reservations of one rank. A granted reservation that nobody uses frees itself.

    A reservation is a place in line, granted while the prompts of all that are here and reserved fit into the memory
    at once, as far as they have got; blocks are taken when a request starts and as it grows (`block_room`).
    """

    def __init__(self, pool: BlockPool, limits: RankLimits, rank: str) -> None:
        self._pool = pool
        self._limits = limits
        self._rank = rank
        self._reservations: dict[str, Reservation] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()  # request id -> last generation
        self._num_arrivals = 0
        self.draining = False
        self.num_refused = 0
        self.num_expired = 0

    @property
    def num_reservations(self) -> int:
        return len(self._reservations)

    def reserve(
        self, message: Reserve, live: Collection[Request], retry_after_s: float | None, now: float
    ) -> ReservationReply:
        """Grant a place, or say what is missing. Asking again renews the same reservation."""
        if message.request_id not in self._reservations:
            refusal = self._refusal(message, live)
            if refusal:
                self.num_refused += 1
                never_fits = self._never_fits(message.prompt_len + message.max_new_tokens)
                retry = _DEFAULT_RETRY_S if retry_after_s is None else retry_after_s
                retry = 0.0 if never_fits else min(max(retry, 0.05), _MAX_RETRY_S)
                return ReservationReply(self._rank, message.request_id, False, refusal, retry)
        self._reservations[message.request_id] = Reservation(
            message.request_id,
            message.reply_to,
            message.prompt_len,
            now + self._limits.reservation_ttl_s,
        )
        return ReservationReply(self._rank, message.request_id, granted=True)

    def _refusal(self, message: Reserve, live: Collection[Request]) -> str:
        limits = self._limits
        if self.draining:
            return "the rank is draining: send the request to another"
        if message.prompt_len < 1 or message.max_new_tokens < 0:
            return f"prompt_len={message.prompt_len}, max_new_tokens={message.max_new_tokens}"
        if reason := self._never_fits(message.prompt_len + message.max_new_tokens):
            return reason
        if len(live) + len(self._reservations) >= limits.max_running + limits.max_waiting:
            return f"{len(live) + len(self._reservations)} requests are running or waiting"
        return self._no_room(message.prompt_len, live)

    def _no_room(self, num_tokens: int, live: Collection[Request]) -> str:
        """What is missing for a prompt beside all that are here and reserved; empty when nothing is."""
        pool = self._pool
        wanted = sum(pool.blocks_for(request.committed_len) for request in live)
        wanted += sum(pool.blocks_for(r.prompt_len) for r in self._reservations.values())
        needed, free = pool.blocks_for(num_tokens), max(0, pool.num_blocks - wanted)
        return "" if needed <= free else f"{needed} KV blocks needed, {free} are free"

    def _never_fits(self, num_tokens: int) -> str:
        limit = min(self._limits.max_model_len, self._pool.num_blocks * self._pool.block_size)
        if num_tokens <= limit:
            return ""
        return f"prompt plus output is {num_tokens} tokens, this rank holds at most {limit}"

    @property
    def ended_ids(self) -> Iterable[str]:
        """Requests that were here and are over, as far as they are remembered."""
        return self._ended.keys()

    def is_known(self, request_id: str, generation: int) -> bool:
        """Whether this generation, or a later one, was already ended here: a repeated or late message."""
        return generation <= self._ended.get(request_id, generation - 1)

    def admit(self, message: AdmittedRequest, live: Collection[Request]) -> Request | str:
        """Turn a reservation into a request. Returns what is wrong otherwise; nothing stays reserved then."""
        reservation = self._reservations.pop(message.request_id, None)
        if problem := self._problem_with(message):
            return problem
        if reservation is None and self._no_room(len(message.prompt_ids), live):
            return "no reservation is held for it and no room is left: reserve again"
        self._num_arrivals += 1
        return Request(message, self._num_arrivals)

    def _problem_with(self, message: AdmittedRequest) -> str:
        prompt = message.prompt_ids
        if len(prompt) == 0:
            return "prompt_ids is empty: send at least one token"
        if int(prompt.min()) < 0 or int(prompt.max()) >= self._limits.vocab_size:
            return f"prompt_ids outside 0..{self._limits.vocab_size - 1}: use the model's tokenizer"
        rules = message.sampling.rules
        if rules is not None:
            # One id outside would fail the whole step, with everybody in it.
            changed = [*(i for i, _ in rules.logit_bias), *message.stop_token_ids]
            if max(changed, default=0) >= self._limits.vocab_size:
                return (
                    f"logit_bias or stop tokens outside 0..{self._limits.vocab_size - 1}: "
                    "use the model's tokenizer"
                )
        return self._never_fits(worst_case_len(message))

    def cancel(self, request_id: str) -> None:
        self._reservations.pop(request_id, None)

    def end(self, request_id: str, generation: int) -> None:
        """Remember that this generation is over, so that a repeated message does not start it again."""
        self._ended[request_id] = max(generation, self._ended.get(request_id, generation))
        self._ended.move_to_end(request_id)
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def expire(self, now: float) -> None:
        if not self._reservations:
            return
        late = [r.request_id for r in self._reservations.values() if r.expires_at <= now]
        self.num_expired += len(late)
        for request_id in late:
            self.cancel(request_id)

    def cancel_all_of(self, ingress: str) -> None:
        """An ingress replica has died: nobody will use what it reserved."""
        gone: Iterable[str] = [
            r.request_id for r in self._reservations.values() if r.reply_to.name == ingress
        ]
        for request_id in gone:
            self.cancel(request_id)
