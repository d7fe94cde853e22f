"""Who may call the endpoint: API keys, by their hash."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import Field

from configs.section import Section


class ApiKeyConfig(Section):
    """One API key: who it belongs to and how much of the server it may use. The key itself is never configured."""

    name: str = Field(
        min_length=1, max_length=64, description="Who uses the key; shown in counters."
    )
    sha256: str = Field(
        pattern="^[0-9a-f]{64}$",
        description="SHA-256 of the key in 64 hexadecimal digits: printf %s KEY | sha256sum.",
    )
    requests_per_minute: float = Field(
        0.0, ge=0, description="Requests a minute, in bursts of at most as many; 0 = any number."
    )
    max_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Part of the cluster's running places that its streams may take; 1 = any number of streams.",
    )


def key_conflicts(keys: Sequence[ApiKeyConfig]) -> Iterator[tuple[str, str, str]]:
    """(field, problem, remedy) of keys that cannot be told apart."""
    for name in ("name", "sha256"):
        values = [getattr(key, name) for key in keys]
        if len(set(values)) < len(values):
            yield "ingress.api_keys", f"two keys have the same {name}", "leave one of them out"
