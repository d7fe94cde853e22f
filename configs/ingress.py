"""How the HTTP front is reached, and what one request may take."""

from __future__ import annotations

import ipaddress
from typing import Literal

from pydantic import Field, model_validator

from configs.access import ApiKeyConfig
from configs.section import Section


class IngressConfig(Section):
    """The HTTP front."""

    host: str = Field("127.0.0.1", description="Address the endpoint listens on.")
    port: int = Field(8000, ge=1, le=65535, description="TCP port of the endpoint.")
    num_replicas: int = Field(
        1, ge=1, description="Ingress replicas; the fewest, with max_replicas."
    )
    max_replicas: int | None = Field(
        None,
        ge=1,
        le=256,
        description="Most ingress replicas: as many serve as target_lag_ms takes; null = always num_replicas.",
    )
    target_lag_ms: float = Field(
        20.0,
        gt=0,
        description="Milliseconds a token may wait in the front before another replica starts; in fractions of "
        "seconds.",
    )
    up_after_s: float = Field(
        10.0, ge=0, description="How long tokens must wait longer before one starts, in seconds."
    )
    down_after_s: float = Field(
        300.0, ge=0, description="How long one fewer must do before one ends, in seconds."
    )
    node_resource: str | None = Field(
        None,
        min_length=1,
        description="Ray resource that marks the nodes for ingress replicas; null = any node.",
    )
    request_timeout_s: float = Field(
        600.0, gt=0, description="Longest a request may take, in seconds."
    )
    keep_alive_s: float = Field(
        15.0,
        ge=0,
        description="Silence of a streamed answer after which it sends a comment, so that proxies do not cut it, in "
        "seconds; 0 = never.",
    )
    max_stop_strings: int = Field(16, ge=1, description="Stop strings one request may carry.")
    reservation_timeout_s: float = Field(
        5.0, gt=0, description="Longest the ingress waits for a rank's answer, seconds."
    )
    default_max_tokens: int = Field(
        1024,
        ge=1,
        description="Output tokens of a chat request that names no limit (at most the context).",
    )
    stall_timeout_s: float = Field(
        30.0,
        gt=0,
        description="Silence of a running stream after which it is replayed, in seconds.",
    )
    replay_timeout_s: float = Field(
        60.0,
        gt=0,
        description="Longest a stream waits for a rank to go on after it lost its own, in seconds.",
    )
    max_fruitless_replays: int = Field(
        5,
        ge=0,
        description="Attempts in a row to go on with a stream on another rank that may end without a new token, before "
        "it is given up: a request that kills whoever serves it must not kill every rank in turn. 0 = never replayed.",
    )
    allow_rank_hint: bool = Field(
        False,
        description='Whether a request may name its rank ("dspark": {"rank": "target-0"}); for benchmarks and drills.',
    )
    max_choices: int = Field(16, ge=1, description="Choices (n) of one prompt, in streams.")
    max_request_tokens: int = Field(
        131072,
        ge=16,
        description="Tokens that all choices of one request may take together, prompts included.",
    )
    max_body_bytes: int = Field(
        16 * 2**20, ge=1024, description="Longest body of a request, in bytes."
    )
    api_keys: tuple[ApiKeyConfig, ...] = Field(
        (),
        strict=False,  # YAML has lists only
        description="Keys that open the endpoint: name, sha256, requests_per_minute, max_share. None = no key needed.",
    )
    cors_origins: tuple[str, ...] = Field(
        (),
        strict=False,
        description="Origins whose pages a browser lets call the endpoint; none = CORS is off.",
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        strict=False,
        description="Names by which the endpoint may be called, beside localhost and addresses; none = no other where "
        "host is loopback, any elsewhere; * = any.",
    )
    tool_parser: Literal["hermes", "json"] = Field(
        "hermes",
        description="How the model writes tool calls: hermes = <tool_call> tags; json = nothing but an object.",
    )
    proxy: Literal["auto", "haproxy", "python"] = Field(
        "auto",
        description="Serve proxy; auto = HAProxy where it starts, else Serve's Python proxy.",
    )

    @model_validator(mode="after")
    def _bounds(self) -> IngressConfig:
        if self.max_replicas is not None and self.max_replicas < self.num_replicas:
            raise ValueError(
                f"max_replicas={self.max_replicas} lies below num_replicas={self.num_replicas}, the fewest; "
                "raise it, or leave it out"
            )
        return self

    @property
    def most_replicas(self) -> int:
        """That ever serve at once."""
        return self.max_replicas or self.num_replicas

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        if self.host.rstrip(".").lower() == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def warning(self) -> str:
        """What whoever starts this should know; empty: nothing."""
        if self.is_loopback or self.api_keys:
            return ""
        return (
            f"ingress.host={self.host} can be reached from other machines and ingress.api_keys is empty: everybody "
            "who reaches it may use it; name keys in ingress.api_keys, or set ingress.host=127.0.0.1"
        )

    @property
    def host_names(self) -> tuple[str, ...] | None:
        """Host names that requests may be for, addresses aside; None: any."""
        is_open = not self.allowed_hosts and not self.is_loopback
        if is_open or "*" in self.allowed_hosts:
            return None
        return (*self.allowed_hosts, "localhost", self.host)

    def endpoint(self, address: str = "127.0.0.1") -> str:
        """The URL of the API for a client; `address` is one at which a wildcard host is reached."""
        host = address if self.host in ("0.0.0.0", "::") else self.host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}/v1"
