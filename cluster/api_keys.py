"""API keys: who may come in, how often, and with how many streams at once. Pure: the caller brings the clock.

Only hashes are held. Every ingress replica keeps its own counts, so the limits it is given are those of one replica.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.api_errors import ApiError
from configs.schema import ClusterConfig


@dataclass(frozen=True)
class KeyLimits:
    """One key as one replica sees it.

    Attributes:
        sha256: of the key, hexadecimal.
        requests_per_minute: also the size of a burst; 0: any number.
        max_streams: at once; 0: any number.
    """

    name: str
    sha256: str
    requests_per_minute: float = 0.0
    max_streams: int = 0


class StreamPlaces:
    """Places that the streams of one request hold. Giving them back twice is harmless."""

    def __init__(self, account: KeyAccount, count: int) -> None:
        self._account = account
        self._count = count
        account.num_streams += count

    def give_back(self) -> None:
        self._account.num_streams -= self._count
        self._count = 0


class KeyAccount:
    """What one key has used."""

    def __init__(self, limits: KeyLimits) -> None:
        self.limits = limits
        self.num_streams = 0
        self._burst = max(1.0, limits.requests_per_minute)
        self._allowance = self._burst
        self._seen_s: float | None = None

    def adopt(self, limits: KeyLimits) -> None:
        """Other limits from now on; what has been used stays used."""
        self.limits = limits
        self._burst = max(1.0, limits.requests_per_minute)
        self._allowance = min(self._allowance, self._burst)

    def take_request(self, now_s: float) -> None:
        """Count one request.

        Raises:
            ApiError: 429 with the time until the next one is allowed.
        """
        rate_s = self.limits.requests_per_minute / 60
        if rate_s == 0:
            return
        since_s = 0.0 if self._seen_s is None else max(0.0, now_s - self._seen_s)
        self._seen_s = now_s
        self._allowance = min(self._burst, self._allowance + since_s * rate_s)
        if self._allowance < 1:
            raise ApiError(
                429,
                f"key {self.limits.name!r} may send {self.limits.requests_per_minute:g} requests a minute here; "
                "wait as long as Retry-After says",
                code="rate_limit_exceeded",
                retry_after_s=max(1, math.ceil((1 - self._allowance) / rate_s)),
            )
        self._allowance -= 1

    def open_streams(self, count: int) -> StreamPlaces:
        """Places for the streams of one request.

        Raises:
            ApiError: 429, they exceed the key's share.
        """
        most = self.limits.max_streams
        if most and count > most:
            raise ApiError(
                400,
                f"n: key {self.limits.name!r} may have {most} streams at once here, this request needs {count}; "
                "ask for fewer choices or prompts",
                param="n",
                code="request_too_large",
            )
        if most and self.num_streams + count > most:
            raise ApiError(
                429,
                f"key {self.limits.name!r} has {self.num_streams} of its {most} streams open; wait for one to end",
                code="share_exceeded",
                retry_after_s=1,
            )
        return StreamPlaces(self, count)


class KeyRing:
    """All keys of a server. Without any, everybody comes in and nothing is counted."""

    def __init__(self, keys: Sequence[KeyLimits] = ()) -> None:
        self._accounts = {key.sha256: KeyAccount(key) for key in keys}
        self._open = KeyAccount(KeyLimits("", ""))
        self.num_requests: Counter[str] = Counter()  # by name; of those let in
        self.num_unknown = 0

    def adopt(self, keys: Sequence[KeyLimits]) -> None:
        """Other limits of the same keys: ranks or ingress replicas have become more or fewer."""
        for key in keys:
            account = self._accounts[key.sha256]
            if key != account.limits:
                account.adopt(key)

    def account(self, authorization: str | None) -> KeyAccount:
        """Whose key an Authorization header holds.

        Raises:
            ApiError: 401, no key or one that is not known.
        """
        if not self._accounts:
            return self._open
        scheme, _, key = (authorization or "").partition(" ")
        # The key is compared by its hash: how long that takes tells nothing of the keys that exist.
        digest = hashlib.sha256(key.strip().encode()).hexdigest()
        account = self._accounts.get(digest) if scheme.lower() == "bearer" else None
        if account is None:
            self.num_unknown += 1
            problem = "the API key is not known here" if authorization else "an API key is needed"
            raise ApiError(
                401, f"{problem}; send the header Authorization: Bearer KEY", code="invalid_api_key"
            )
        self.num_requests[account.limits.name] += 1
        return account


def key_limits(
    config: ClusterConfig, num_places: int = 0, num_replicas: int = 0
) -> list[KeyLimits]:
    """The configured keys as one replica counts them: each replica gets an equal part of what a key may use.

    Args:
        num_places: requests that all ranks run at once; 0: as configured.
        num_replicas: that share the limits; 0: as configured.
    """
    replicas = num_replicas or config.ingress.num_replicas
    places = num_places or config.target.num_ranks * config.target.max_running
    return [
        KeyLimits(
            key.name,
            key.sha256,
            key.requests_per_minute / replicas,
            max(1, int(key.max_share * places / replicas)) if key.max_share < 1 else 0,
        )
        for key in config.ingress.api_keys
    ]
