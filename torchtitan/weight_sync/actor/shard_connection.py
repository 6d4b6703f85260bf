"""An actor's connections to the shard servers, each made again when its server is lost or replaced."""

from __future__ import annotations

import logging
from typing import Protocol

from torchtitan.weight_sync.memory.manifest import BucketKey
from torchtitan.weight_sync.memory.transfer import Transfer, TransferTarget
from torchtitan.weight_sync.wire import runtime as wire
from torchtitan.weight_sync.wire.clients import ServerConnection
from torchtitan.weight_sync.wire.handshake import Identity
from torchtitan.weight_sync.wire.runtime import Channel, Message, PayloadTarget, ProtocolError, Runtime

logger = logging.getLogger(__name__)


class Wanting(Protocol):
    """What wants buckets: a Puller."""

    engine: TransferTarget
    transfer: Transfer | None

    def requests(self, source: ShardServerConnection) -> list[Message]:
        """Return what to ask for over this connection now."""

    def payload_target(self, source: ShardServerConnection, message: Message) -> PayloadTarget | None:
        """Return where the bytes behind a message go."""

    def bucket(self, source: ShardServerConnection, message: Message) -> None:
        """Handle a bucket that has arrived."""

    def gone(self, message: Message) -> None:
        """Handle the end of a snapshot."""

    def lost(self, source: ShardServerConnection) -> None:
        """Handle the end of a connection: nothing that was asked for comes."""

    def leave_peer(self) -> bool:
        """Ask the trainer from now on. Returns whether there was a peer to leave."""


MAX_RETRY_SECONDS = 2.0


class ShardServerConnection(ServerConnection):
    """A connection to a rank's shard server, or to the actor that relays for it. It dials while something is wanted,
    and keeps the connection from one version to the next. number, count: of several connections to this server, it
    carries every count-th bucket, and a thread of its own moves them."""

    def __init__(
        self, runtime: Runtime, identity: Identity, epoch: str, rank: int, wanted: Wanting, number: int, count: int
    ):
        super().__init__(runtime, "", identity, {"epoch": epoch, "rank": rank})
        self.rank, self._wanted = rank, wanted
        self.number, self.count = number, count
        self._failures = 0

    def carries(self, key: BucketKey) -> bool:
        """Return whether a bucket, or a rank's checksum table, comes over this connection."""
        rank, bucket = key
        return rank == self.rank and max(0, bucket) % self.count == self.number

    def move(self, address: str, identity: Identity) -> None:
        """Use this address ("": none) and identity from now on."""
        if (address, identity) != (self.address, self._identity):
            self.address, self._identity = address, identity
            self.drop("the shard server has moved")
            self.ask()

    def ask(self) -> None:
        """Request what is wanted, over a new channel if there is none."""
        requests = self._wanted.requests(self)
        if self._channel is not None:
            for request in requests:
                self._channel.send(request)
        elif requests and self.address and self._stop is None:
            self._dial()

    _try = ask

    def drop(self, reason: str) -> None:
        super().drop(reason)
        self._wanted.lost(self)

    def succeeded(self) -> None:
        """Reset the retry delay: something good has arrived."""
        self._failures = 0

    def _opened(self, channel: Channel, fields: Message) -> None:
        rank = fields.get("rank")
        if rank != self.rank:
            channel.close(f"{self.address} is the shard server of rank {rank}, not of rank {self.rank}")
            return
        if self.count > 1:
            channel.use_thread()
        channel.payload_target = lambda _channel, message: self._wanted.payload_target(self, message)
        self.ask()

    def _lost(self, reason: str) -> None:
        if self._wanted.transfer is not None:  # between two versions it is idle, and the server closes it
            logger.info("no connection to the shard server of rank %d: %s", self.rank, reason)
        self._wanted.lost(self)
        # The first retry is immediate, because a channel also closes when the snapshot that it was sending is gone. A
        # connection that is reset is no reason to leave an actor that relays, but one that cannot be made again is.
        if self._failures == 0 or not self._wanted.leave_peer():
            self._try_in(min(wire.RETRY_SECONDS * (2**self._failures - 1), MAX_RETRY_SECONDS))
            self._failures = min(self._failures + 1, 10)

    def _on_message(self, channel: Channel, message: Message) -> None:
        kind = message["type"]
        if kind == "bucket":
            self._wanted.bucket(self, message)
        elif kind == "gone":
            self._wanted.gone(message)
        elif kind == "entry":
            self._wanted.engine.linked(channel, message)
        else:
            raise ProtocolError(f"a shard server does not send {kind!r} to an actor")
