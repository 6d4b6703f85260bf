"""An actor's way to one shard server: found again when it is lost, asked again for what is missing."""

from __future__ import annotations

import logging
from typing import Protocol

from torchtitan.weight_sync.handshake import Call, Identity
from torchtitan.weight_sync.runtime import Channel, Place, Runtime, Timer
from torchtitan.weight_sync.wire import RETRY_SECONDS, Message, ProtocolError

logger = logging.getLogger(__name__)

LONGEST_RETRY_SECONDS = 2.0


class Wanted(Protocol):
    """Who wants buckets; called on the loop's thread."""

    def requests(self, rank: int) -> list[Message]:
        """What to ask this rank's shard server for now."""

    def gone(self, message: Message) -> None:
        """What the pull of this message was for does not live any more."""

    def place(self, source: Source, message: Message) -> Place | None:
        """Where a bucket's bytes go, None to drop them. May raise ProtocolError."""

    def bucket(self, source: Source, message: Message) -> None:
        """A bucket is there, or a reference to it. May raise ProtocolError."""

    def linked(self, channel: Channel, message: Message) -> None:
        """An entry has come: the other end of a link wants to meet. Raises ProtocolError where it makes no sense."""

    def troubled(self, source: Source) -> bool:
        """It could not be reached, or has closed the channel. True where the source has been moved elsewhere."""

    def lost(self, rank: int) -> None:
        """What was arriving from this rank does not arrive any more, and nothing writes for it."""


class Source:
    """Dials as long as something is wanted; keeps the channel from one version to the next."""

    def __init__(self, runtime: Runtime, identity: Identity, epoch: str, rank: int, wanted: Wanted):
        self._runtime, self._identity, self._epoch = runtime, identity, epoch
        self.rank, self._wanted = rank, wanted
        self.address = ""
        self._channel: Channel | None = None
        self._call: Call | None = None
        self._again: Timer | None = None
        self._failures = 0

    def move(self, address: str, identity: Identity) -> None:
        """What is wanted is at this address ("": nowhere), for who has this identity."""
        if (address, identity) != (self.address, self._identity):
            self.address, self._identity = address, identity
            self.drop("the shard server has moved")
            self.ask()

    def ask(self) -> None:
        """Ask for what is wanted, over a new channel where there is none."""
        requests = self._wanted.requests(self.rank)
        if not requests:
            return
        if self._channel is not None:
            for request in requests:
                self._channel.send(request)
        elif self._call is None and self._again is None and self.address:
            fields = {"epoch": self._epoch, "rank": self.rank}
            self._call = Call(self._runtime, self.address, self._identity, fields, self._ready, self._failed)

    def tell(self, message: Message) -> None:
        """Send where there is a channel; without one there is nothing to tell."""
        if self._channel is not None:
            self._channel.send(message)

    def drop(self, reason: str) -> None:
        """Close the channel. Nothing writes for it any more when this returns."""
        if self._call is not None:
            self._call.cancel()
            self._call = None
        if self._again is not None:
            self._again.cancel()
            self._again = None
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close(reason)
            self._wanted.lost(self.rank)

    def succeeded(self) -> None:
        """Something good has come over the channel."""
        self._failures = 0

    def _ready(self, channel: Channel, fields: Message) -> None:
        self._call = None
        if fields.get("rank") != self.rank:
            channel.close("another rank")
            self._failed(f"{self.address} is the shard server of rank {fields.get('rank')}, not of rank {self.rank}")
            return
        self._channel = channel
        channel.on_message, channel.on_close = self._on_message, self._on_close
        channel.place = lambda _channel, message: self._wanted.place(self, message)
        self.ask()

    def _failed(self, reason: str) -> None:
        self._call = None
        logger.info("shard server of rank %d out of reach: %s", self.rank, reason)
        self._retry()

    def _on_close(self, channel: Channel, reason: str) -> None:
        if channel is self._channel:
            logger.info("connection to the shard server of rank %d over: %s", self.rank, reason)
            self._channel = None
            self._wanted.lost(self.rank)
            self._retry()

    def _retry(self) -> None:
        if self._wanted.troubled(self):
            return
        # At once the first time: a channel also ends because what it was sending has gone.
        wait = min(RETRY_SECONDS * (2**self._failures - 1), LONGEST_RETRY_SECONDS)
        self._failures = min(self._failures + 1, 10)
        if self._again is not None:
            self._again.cancel()
        self._again = self._runtime.call_later(wait, self._ask_again)

    def _ask_again(self) -> None:
        self._again = None
        self.ask()

    def _on_message(self, channel: Channel, message: Message) -> None:
        if channel is not self._channel:
            return
        kind = message["type"]
        if kind == "bucket":
            self._wanted.bucket(self, message)
        elif kind == "gone":
            self._wanted.gone(message)
        elif kind == "entry":
            self._wanted.linked(channel, message)
        elif kind != "granted":
            raise ProtocolError(f"a shard server does not send {kind!r} to an actor")
