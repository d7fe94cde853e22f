"""The link the cluster runs on: ZeroMQ over TCP, authenticated and encrypted with CURVE.

Every process binds one PULL inbox and opens one PUSH socket per peer at the first message to it. The inbox has a key
of its own that travels in the `Endpoint`, so a sender knows whom it talks to; it accepts only senders that hold the
cluster's membership key.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from actors.core.messages import Endpoint, Message
from actors.link.base import LinkCounters, Membership, Role, new_epoch
from actors.link.codec import encode
from actors.link.local import Frames, decode_all

log = logging.getLogger(__name__)

CONNECT_GRACE_S = 2.0  # a peer that takes nothing for so long counts as gone
FORGET_AFTER_S = 30.0  # and its socket is closed after so much more
MAX_PENDING = 256  # messages kept for a peer that is still connecting
SEND_HIGH_WATER = 64
RECEIVE_HIGH_WATER = 256  # messages of one sender; a full queue pushes back to it
MAX_FRAME_BYTES = 256 << 20
HEARTBEAT_MS = 2000
MAX_PER_POLL = 1024


@dataclass
class _Peer:
    to: Endpoint
    socket: zmq.Socket[bytes]
    pending: deque[list[bytes]] = field(default_factory=deque)
    stuck_since: float | None = None  # when it first took nothing; None while messages flow
    gone: bool = False


class _Gatekeeper(threading.Thread):
    """Answers libzmq's question whether the key of a connecting sender is the cluster's (ZAP, RFC 27)."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], accepted_key: bytes) -> None:
        super().__init__(name="link-gatekeeper", daemon=True)
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind("inproc://zeromq.zap.01")
        self._accepted_key = accepted_key
        self.num_rejected = 0

    def run(self) -> None:
        try:
            while True:
                version, request_id, _domain, address, _id, mechanism, *keys = (
                    self._socket.recv_multipart()
                )
                allowed = mechanism == b"CURVE" and keys == [self._accepted_key]
                if not allowed:
                    self.num_rejected += 1
                    log.warning("turned away a sender at %s: not a member", address.decode())
                status, text = (b"200", b"OK") if allowed else (b"400", b"not a member")
                user = b"member" if allowed else b""
                self._socket.send_multipart([version, request_id, status, text, user, b""])
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close()


class ZmqLink:
    """See `Link`. Only the polling thread touches the sockets; it is also the one that closes the link.

    Args:
        name: unique in the cluster, stable over restarts.
        role: what this process is.
        membership: the cluster's key pair.
        host: address to listen on, which the peers can reach.
    """

    def __init__(self, name: str, role: Role, membership: Membership, host: str) -> None:
        self.counters = LinkCounters()
        self._membership = membership
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gatekeeper = _Gatekeeper(self._context, z85.decode(membership.public_key.encode()))
        self._gatekeeper.start()
        public, secret = zmq.curve_keypair()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.linger = 0
        self._inbox.rcvhwm = RECEIVE_HIGH_WATER
        self._inbox.maxmsgsize = MAX_FRAME_BYTES
        self._inbox.curve_server = True
        self._inbox.curve_secretkey = secret
        self._inbox.zap_domain = b"dspark"
        self._inbox.bind(f"tcp://{host}:*")
        uri = self._inbox.getsockopt_string(zmq.LAST_ENDPOINT)
        self.endpoint = Endpoint(name, role, uri, public.decode(), new_epoch())
        self._peers: dict[str, _Peer] = {}
        self._outbox: deque[tuple[Endpoint, list[bytes]]] = deque()
        self._waker, self._wake_signal = socket.socketpair()
        self._waker.setblocking(False)
        self._wake_signal.setblocking(False)
        self._owner: int | None = None  # the polling thread; nobody before the first poll
        self._lost: list[Endpoint] = []
        self._woken = False
        self._closed = False

    # --- sending ----------------------------------------------------------------------------------------------------

    def send(self, to: Endpoint, message: Message) -> None:
        frames = encode(message)
        if self._closed:
            self.counters.num_dropped += 1
        elif threading.get_ident() == self._owner:
            self._send_now(to, frames)
        else:
            self._outbox.append((to, frames))
            self._signal()

    def _send_now(self, to: Endpoint, frames: list[bytes]) -> None:
        peer = self._peer(to)
        self._flush(peer)
        if not peer.pending and self._try_send(peer, frames):
            return
        if peer.gone or len(peer.pending) >= MAX_PENDING:
            self.counters.num_dropped += 1
        else:
            peer.pending.append(frames)

    def _try_send(self, peer: _Peer, frames: Sequence[bytes]) -> bool:
        try:
            peer.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            if peer.stuck_since is None:
                peer.stuck_since = time.monotonic()
            return False
        self.counters.num_sent += 1
        peer.stuck_since = None
        peer.gone = False
        return True

    def _flush(self, peer: _Peer) -> None:
        while peer.pending and self._try_send(peer, peer.pending[0]):
            peer.pending.popleft()
        if peer.stuck_since is None or peer.gone:
            return
        if time.monotonic() - peer.stuck_since > CONNECT_GRACE_S:
            peer.gone = True
            self._lost.append(peer.to)
            self.counters.num_dropped += len(peer.pending)
            log.warning("%s is gone: dropped %d messages", peer.to.name, len(peer.pending))
            peer.pending.clear()

    def _peer(self, to: Endpoint) -> _Peer:
        peer = self._peers.get(to.name)
        if peer is not None and peer.to.uri == to.uri and peer.to.public_key == to.public_key:
            return peer
        if peer is not None:  # a new incarnation: nothing meant for the old one may reach it
            self._forget(peer)
        outgoing = self._context.socket(zmq.PUSH)
        outgoing.linger = 0
        outgoing.sndhwm = SEND_HIGH_WATER
        # A message waits here, where it is counted, until the peer has proved its key.
        outgoing.immediate = True
        outgoing.reconnect_ivl = 100
        outgoing.reconnect_ivl_max = 2000
        # Notices a peer whose machine vanished without a word.
        outgoing.heartbeat_ivl = HEARTBEAT_MS
        outgoing.heartbeat_timeout = 3 * HEARTBEAT_MS
        outgoing.curve_serverkey = to.public_key.encode()
        outgoing.curve_publickey = self._membership.public_key.encode()
        outgoing.curve_secretkey = self._membership.secret_key.encode()
        outgoing.connect(to.uri)
        self._peers[to.name] = peer = _Peer(to, outgoing)
        return peer

    def lost(self) -> list[Endpoint]:
        lost, self._lost = self._lost, []
        return lost

    def _forget(self, peer: _Peer) -> None:
        self.counters.num_dropped += len(peer.pending)
        peer.socket.close()
        del self._peers[peer.to.name]

    # --- receiving --------------------------------------------------------------------------------------------------

    def poll(self, timeout_s: float | None) -> list[Message]:
        if self._closed:
            return []
        self._owner = threading.get_ident()
        self._send_outbox()
        received = self._drain()
        if not received and timeout_s != 0:
            received = self._wait(timeout_s)
        return decode_all(received, self.counters)

    def _send_outbox(self) -> None:
        while self._outbox:
            self._send_now(*self._outbox.popleft())
        for peer in list(self._peers.values()):
            if peer.stuck_since is not None:
                self._flush(peer)
                if peer.gone and time.monotonic() - peer.stuck_since > FORGET_AFTER_S:
                    self._forget(peer)

    def _drain(self) -> list[Frames]:
        received: list[Frames] = []
        while len(received) < MAX_PER_POLL:
            try:
                frames = self._inbox.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            received.append([frame.buffer for frame in frames])
        return received

    def _wait(self, timeout_s: float | None) -> list[Frames]:
        """What arrives in time; meanwhile deliver to peers as they connect."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0 and not self._woken:
            self._await_event(left_s)
            self._send_outbox()
            if received := self._drain():
                return received
        self._woken = False
        return []

    def _await_event(self, timeout_s: float) -> None:
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        poller.register(self._waker, zmq.POLLIN)
        for peer in self._peers.values():
            if peer.pending:
                poller.register(peer.socket, zmq.POLLOUT)
                timeout_s = min(timeout_s, CONNECT_GRACE_S)
        ready = dict(poller.poll(None if timeout_s == math.inf else math.ceil(timeout_s * 1000)))
        if self._waker.fileno() in ready:
            self._clear_signal()

    # --- waking and closing -----------------------------------------------------------------------------------------

    def wake(self) -> None:
        self._woken = True
        self._signal()

    def _signal(self) -> None:
        try:
            self._wake_signal.send(b"!")
        except BlockingIOError:
            pass  # enough signals are waiting already
        except OSError:
            assert self._closed

    def _clear_signal(self) -> None:
        try:
            while self._waker.recv(4096):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for peer in list(self._peers.values()):
            self._forget(peer)
        self._inbox.close()
        self._context.term()
        self._gatekeeper.join()
        self._waker.close()
        self._wake_signal.close()
