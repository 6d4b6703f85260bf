"""The ways to the registry and to the shard servers: found again when they are lost, silent or replaced."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchtitan.weight_sync import wire
from torchtitan.weight_sync.handshake import Call, Identity
from torchtitan.weight_sync.wire import RETRY_SECONDS, SILENCE_SECONDS, Channel, Message, ProtocolError, Runtime, Timer

if TYPE_CHECKING:
    from torchtitan.weight_sync.arrivals import Arrivals

logger = logging.getLogger(__name__)


class RegistryClient:
    """fields: of the hello. on_join(): a registry is there, which knows nothing of this client. on_message(message):
    what it says. retry_for_s: how long it may be out of reach before `failure` says so, and nothing is tried any more.
    beat(): asked every HEARTBEAT_SECONDS; what the ping is to say.
    """

    def __init__(
        self,
        runtime: Runtime,
        address: str,
        identity: Identity,
        fields: Message,
        on_join: Callable[[], None],
        on_message: Callable[[Message], None],
        retry_for_s: float = math.inf,
        beat: Callable[[], Message] = dict,
    ):
        self._runtime, self._address, self._identity, self._fields = runtime, address, identity, fields
        self._on_join, self._on_said, self._retry_for_s, self._beat = on_join, on_message, retry_for_s, beat
        self.failure = ""
        self.ready: Callable[[], bool] = lambda: True
        """Whether this client may join yet"""
        self._channel: Channel | None = None
        self._call: Call | None = None
        self._term = 0
        self._heard_at = self._reached_at = runtime.now()
        self._closed = False

    def start(self) -> None:
        """Begin to look for it."""
        self._dial()
        self._heartbeat()

    def close(self, reason: str) -> None:
        """Close the connection, for good."""
        self._closed = True
        if self._call is not None:
            self._call.cancel()
        if self._channel is not None:
            self._channel.close(reason)

    @property
    def connected(self) -> bool:
        """Whether it is in reach."""
        return self._channel is not None

    def tell(self, message: Message) -> None:
        """Send where it is in reach. Otherwise on_join() will say everything that counts."""
        if self._channel is not None:
            self._channel.send(message)

    def hang_up(self, reason: str) -> None:
        """Close this connection; another one follows."""
        if self._channel is not None:
            self._channel.close(reason)

    def _dial(self) -> None:
        if self._closed:
            return
        if not self.ready():
            # Nobody was asked: what retry_for_s bounds is the registry's absence.
            self._reached_at = self._runtime.now()
            self._runtime.call_later(RETRY_SECONDS, self._dial)
            return
        call = Call(self._runtime, self._address, self._identity, self._fields, self._welcomed, self._out_of_reach)
        self._call = call

    def _out_of_reach(self, reason: str) -> None:
        self._call, silent = None, self._runtime.now() - self._reached_at
        if silent > self._retry_for_s:
            self.failure = f"not joined at {self._address} for {silent:.0f} s: {reason}"
            logger.error("%s gives up: %s", self._identity.name, self.failure)
            return
        logger.info("registry out of reach: %s", reason)
        self._runtime.call_later(RETRY_SECONDS, self._dial)

    def _welcomed(self, channel: Channel, fields: Message) -> None:
        self._call, term = None, fields.get("term")
        if type(term) is not int or term < self._term:
            # One that was replaced, and does not know it yet.
            channel.close("an old term")
            self._out_of_reach(f"it is of term {term}, and term {self._term} has begun")
            return
        if not self.ready():
            channel.close("not ready any more")
            self._runtime.call_later(RETRY_SECONDS, self._dial)
            return
        self._term, self._channel = term, channel
        self._heard_at = self._reached_at = self._runtime.now()
        channel.on_message, channel.on_close = self._on_message, self._on_lost
        self._on_join()

    def _on_message(self, channel: Channel, message: Message) -> None:
        if channel is self._channel:
            self._heard_at = self._runtime.now()
            if message["type"] != "pong":
                self._on_said(message)

    def _on_lost(self, channel: Channel, reason: str) -> None:
        if channel is self._channel:
            logger.info("%s: registry connection over: %s", self._identity.name, reason)
            self._channel, self._reached_at = None, self._runtime.now()
            self._runtime.call_later(RETRY_SECONDS, self._dial)

    def _heartbeat(self) -> None:
        if self._closed:
            return
        self._runtime.call_later(wire.HEARTBEAT_SECONDS, self._heartbeat)
        # The loop reads sockets before it runs timers: after a pause of this process, waiting answers have been read.
        if self._is_silent():
            self.hang_up(f"the registry said nothing for {SILENCE_SECONDS:g} s")
        self.tell({"type": "ping", **self._beat()})

    def _is_silent(self) -> bool:
        return self._runtime.now() - self._heard_at > SILENCE_SECONDS


LONGEST_RETRY_SECONDS = 2.0


class Source:
    """Dials as long as something is wanted; keeps the channel from one version to the next."""

    def __init__(self, runtime: Runtime, identity: Identity, epoch: str, rank: int, wanted: Arrivals):
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
        if self._wanted.troubled():
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
        else:
            raise ProtocolError(f"a shard server does not send {kind!r} to an actor")
