"""Who sends and receives messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Endpoint:
    """Where a process receives messages. `epoch` changes when the process is a new incarnation."""

    name: str
    role: Literal["target", "drafter", "allocator", "ingress", "supervisor"]
    uri: str
    public_key: str
    epoch: str
