"""Hot messages between processes: one interface, three ways to carry it (contract C12).

`ZmqLink` is what the cluster runs on, `ActorLink` carries the same messages over plain Ray actor calls, `LocalLink`
connects parts inside one process for tests of logic. A message may be lost, repeated or late; the receivers survive
that by generations and lengths (C4), so a link never blocks its sender and never raises for a peer that has gone.
"""

from __future__ import annotations

from typing import Literal

from actors.link.base import Link, LinkCounters, Membership, Role
from actors.link.codec import RefusedMessageError, decode, encode
from actors.link.local import LocalHub, LocalLink
from actors.link.zmq_link import ZmqLink

__all__ = [
    "Link",
    "LinkCounters",
    "LocalHub",
    "LocalLink",
    "Membership",
    "RefusedMessageError",
    "Role",
    "ZmqLink",
    "decode",
    "encode",
    "open_link",
]


def open_link(
    kind: Literal["zmq", "actor"],
    name: str,
    role: Role,
    membership: Membership,
    host: str,
    own_actor: str | None = None,
) -> Link:
    """A link of the configured kind (`LinkConfig.kind`), ready to receive.

    Args:
        kind: which transport.
        name: unique in the cluster; stable over restarts of the same part.
        role: what this process is.
        membership: the cluster's key pair, from the supervisor.
        host: address of this node that the peers can reach.
        own_actor: for kind "actor" inside one of our actors: its "namespace/name".
    """
    if kind == "zmq":
        return ZmqLink(name, role, membership, host)
    from actors.link.actor_link import ActorLink  # imports Ray

    return ActorLink(name, role, own_actor)
