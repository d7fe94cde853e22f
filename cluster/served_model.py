"""What one endpoint serves, and whom it lets in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from cluster.api_errors import ApiError
from cluster.api_keys import KeyRing
from cluster.text import TextCodec


@dataclass(frozen=True)
class ServedModel:
    """What /v1/models says."""

    name: str
    created: int  # seconds since 1970
    fingerprint: str
    max_model_len: int

    def card(self, codec: TextCodec) -> dict[str, Any]:
        """OpenAI's entry of a model, with what a client may want to know of ours."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "dspark",
            "root": self.name,
            "parent": None,
            "max_model_len": self.max_model_len,
            "vocab_size": codec.vocab_size,
            "eos_token_ids": list(codec.eos_token_ids),
            "has_chat_template": codec.has_chat_template,
            "default_sampling": dict(codec.default_sampling),
        }


@dataclass(frozen=True)
class Access:
    """Who may call, from where, and with how large a body."""

    keys: KeyRing = field(default_factory=KeyRing)
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 2**20
    host_names: tuple[str, ...] | None = None  # that requests may be for; None: any

    def check_origin(self, origin: str | None, host: str | None) -> None:
        """Refuse a page of another site: a browser sends some of its requests without asking first (CORS).

        Raises:
            ApiError: 403, naming the origin and the setting that lets it in.
        """
        if origin is None or origin in self.cors_origins or "*" in self.cors_origins:
            return
        if _netloc(origin) != host:
            raise ApiError(
                403,
                f"pages of {origin} may not call this endpoint; its operator can name them in ingress.cors_origins",
                code="origin_not_allowed",
            )


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None  # no browser sends it
