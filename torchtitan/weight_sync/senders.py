"""Connections of a worker's data port: which senders are admitted, and the stream and carrier of each."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass

from torchtitan.weight_sync.bucket_stream import ANY_RANK, BucketSink, BucketStream
from torchtitan.weight_sync.connection import HANDSHAKE_SECONDS, Connection, Server
from torchtitan.weight_sync.event_loop import EventLoop
from torchtitan.weight_sync.manifest import Layout
from torchtitan.weight_sync.needs import Needs, needs_to_json
from torchtitan.weight_sync.transports import receive_carrier
from torchtitan.weight_sync.transports.base import ReceiveCarrier, ReceiveContext
from torchtitan.weight_sync.wire import Message, ProtocolError

logger = logging.getLogger(__name__)

MAXIMUM_STREAMS = 64


@dataclass
class _Peer:
    """One sender's connection. key: (rank or ANY_RANK, relaying actor or "", stream)."""

    key: tuple[int, str, int]
    carrier: ReceiveCarrier
    stream: BucketStream | None = None
    """None until the admission is out"""


class Senders:
    """Admits couriers, and actors that relay, and gives their frames to `sink`. For the loop's thread."""

    def __init__(
        self,
        loop: EventLoop,
        listener: socket.socket,
        token: str,
        epoch: str,
        actor: str,
        worker: int,
        sink: BucketSink,
    ):
        self._loop, self._listener, self._token, self._sink = loop, listener, token, sink
        self._epoch, self._actor, self._worker = epoch, actor, worker
        self._layout: Layout | None = None
        self._needs: Needs = None
        self._where = "cpu"
        self._peers: dict[tuple[int, str, int], _Peer] = {}
        self._admitted: _Peer | None = None

    def start(self) -> None:
        """Begin to accept connections."""
        Server(self._loop, self._listener, self._token, self._admit, self._on_sender)

    def take(self, layout: Layout, needs: Needs, where: str) -> None:
        """From now on senders are told that these buckets are needed, and where the staging memory is."""
        self._layout, self._needs, self._where = layout, needs, where

    def close(self, reason: str, attempt: int | None = None, fetching: bool = False) -> None:
        """Close all connections; with an attempt only those within a frame of it, and where it is `fetching` those
        whose payloads are references."""
        for peer in list(self._peers.values()):
            frame = None if peer.stream is None else peer.stream.frame
            within = frame is not None and frame.attempt == attempt
            if attempt is None or within or (fetching and not peer.carrier.inline):
                self._close(peer, reason)

    def gone(self, stream: BucketStream) -> None:
        """This stream has closed itself."""
        for peer in list(self._peers.values()):
            if peer.stream is stream:
                del self._peers[peer.key]

    def shut_down(self) -> None:
        """Close all sockets. The loop has ended."""
        for peer in self._peers.values():
            if peer.stream is not None:
                peer.stream.socket.close()
            peer.carrier.close()
        self._listener.close()

    def _admit(self, role: str, fields: Message) -> Message:
        expected = {"epoch": self._epoch, "actor": self._actor, "worker": self._worker}
        for name, value in expected.items():
            if fields.get(name) != value:
                raise ProtocolError(f"this port takes buckets for {name} {value!r}, not {fields.get(name)!r}")
        rank, stream, source = fields.get("rank"), fields.get("stream"), fields.get("source", "")
        layout = self._layout
        if layout is None:
            raise ProtocolError("there is no layout yet")
        if role == "peer" and isinstance(source, str) and source:
            rank = ANY_RANK
        elif role != "courier" or type(rank) is not int or not 0 <= rank < len(layout.ranks):
            raise ProtocolError(f"no rank {rank!r} of role {role!r}")
        if type(stream) is not int or not 0 <= stream < MAXIMUM_STREAMS:
            raise ProtocolError(f"no stream {stream!r}")
        hello = fields.get("carrier", {})
        if not isinstance(hello, dict):
            raise ProtocolError("a carrier's fields are no object")

        def tell(note: bytes) -> None:
            self._loop.call_from_thread(lambda: peer.stream.tell(note) if peer.stream is not None else None)

        context = ReceiveContext(
            loop=self._loop,
            epoch=self._epoch,
            rank=rank,
            actor=self._actor,
            worker=self._worker,
            stream=stream,
            layout=layout,
            hello=hello,
            where=self._where,
            tell=tell,
        )
        try:
            carrier = receive_carrier(str(fields.get("transport")), context)
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        peer = self._admitted = _Peer((rank, source if rank == ANY_RANK else "", stream), carrier)
        needs = needs_to_json(self._needs, None if rank == ANY_RANK else rank)
        return {"buckets": needs, "carrier": carrier.welcome()}

    def _on_sender(self, connection: Connection, _role: str, _fields: Message) -> None:
        peer, self._admitted = self._admitted, None
        assert peer is not None
        old = self._peers.get(peer.key)
        if old is not None:
            self._close(old, "replaced")
        self._peers[peer.key] = peer

        def begin() -> None:
            late.cancel()
            if self._peers.get(peer.key) is not peer or connection.closed:
                connection.close("replaced")
                return
            try:
                sock = connection.detach()
                peer.stream = BucketStream(self._loop, sock, peer.key[0], peer.carrier, self._sink)
            except (ProtocolError, OSError) as error:
                logger.warning("%s: a sender's connection ended at once: %s", self._actor, error)
                connection.close(str(error))
                self._forget(peer)

        def gone(_connection: Connection, _reason: str) -> None:
            late.cancel()
            if peer.stream is None:
                self._forget(peer)

        connection.on_message, connection.on_close = _no_messages, gone
        late = self._loop.call_later(HANDSHAKE_SECONDS, lambda: connection.close("it does not read what is needed"))
        # What is needed has to be out before the socket changes its use.
        self._loop.call_from_thread(lambda: connection.when_sent(begin))

    def _forget(self, peer: _Peer) -> None:
        if self._peers.get(peer.key) is peer:
            del self._peers[peer.key]
        peer.carrier.close()

    def _close(self, peer: _Peer, reason: str) -> None:
        if peer.stream is not None:
            peer.stream.close(reason)
        else:
            self._forget(peer)


def _no_messages(_connection: Connection, _message: Message) -> None:
    raise ProtocolError("a sender sends buckets, not messages")
