"""The ways to the registry and to the shard servers: found again when they are lost, silent or replaced."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchtitan.weight_sync import wire
from torchtitan.weight_sync.handshake import Call, Identity
from torchtitan.weight_sync.wire import RETRY_SECONDS, SILENCE_SECONDS, Channel, Message, ProtocolError, Runtime

if TYPE_CHECKING:
    from torchtitan.weight_sync.puller import Puller

logger = logging.getLogger(__name__)


class Way:
    """A connection to a server, which is dialled again when it is lost. A subclass says when, and what is said over it.

    fields: of the hello.
    """

    def __init__(self, runtime: Runtime, address: str, identity: Identity, fields: Message):
        self._runtime, self.address, self._identity, self._fields = runtime, address, identity, fields
        self._channel: Channel | None = None
        self._stop: Callable[[], object] | None = None
        """Ends what leads to a connection: a call, or the wait for the next one; None where there is neither"""

    def tell(self, message: Message) -> None:
        """Send where there is a connection. What counts is said when there is one again."""
        if self._channel is not None:
            self._channel.send(message)

    def drop(self, reason: str) -> None:
        """Close the connection; no other one follows by itself. Nothing writes for it any more when this returns."""
        stop, channel = self._stop, self._channel
        self._stop = self._channel = None
        if stop is not None:
            stop()
        if channel is not None:
            channel.close(reason)

    def _try(self) -> None:
        """Dial, if there is a reason to."""
        raise NotImplementedError

    def _opened(self, channel: Channel, fields: Message) -> None:
        """There is a connection. fields: what the server says of itself; the wrong one is hung up on."""
        raise NotImplementedError

    def _lost(self, reason: str) -> None:
        """The connection is over, or could not be made."""
        raise NotImplementedError

    def _on_message(self, channel: Channel, message: Message) -> None:
        raise NotImplementedError

    def _dial(self) -> None:
        names = self.address, self._identity, self._fields
        self._stop = Call(self._runtime, *names, self._welcomed, self._failed).cancel

    def _try_in(self, seconds: float) -> None:
        def try_again() -> None:
            self._stop = None
            self._try()

        self._stop = self._runtime.call_later(seconds, try_again).cancel

    def _welcomed(self, channel: Channel, fields: Message) -> None:
        self._stop, self._channel = None, channel
        channel.on_message, channel.on_close = self._on_message, self._on_close
        self._opened(channel, fields)

    def _failed(self, reason: str) -> None:
        self._stop = None
        self._lost(reason)

    def _on_close(self, channel: Channel, reason: str) -> None:
        if channel is self._channel:
            self._channel = None
            self._lost(reason)


class RegistryClient(Way):
    """on_join(): a registry is there, which knows nothing of this client. on_message(message): what it says.
    retry_for_s: how long it may be out of reach before `failure` says so, and nothing is tried any more. beat(): asked
    every HEARTBEAT_SECONDS; what the ping is to say.
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
        super().__init__(runtime, address, identity, fields)
        self._on_join, self._on_said, self._retry_for_s, self._beat = on_join, on_message, retry_for_s, beat
        self.failure = ""
        self.ready: Callable[[], bool] = lambda: True
        """Whether this client may join yet"""
        self._term = 0
        self._heard_at = runtime.now()
        self._closed = False

    def start(self) -> None:
        """Begin to look for it."""
        self._try()
        self._heartbeat()

    def close(self, reason: str) -> None:
        """Close the connection, for good."""
        self._closed = True
        self.drop(reason)

    @property
    def connected(self) -> bool:
        """Whether it is in reach."""
        return self._channel is not None

    def hang_up(self, reason: str) -> None:
        """Close this connection; another one follows."""
        if self._channel is not None:
            self._channel.close(reason)

    def _try(self) -> None:
        if self.ready():
            self._dial()
        else:
            # Nobody was asked: what retry_for_s bounds is the registry's absence.
            self._heard_at = self._runtime.now()
            self._try_in(RETRY_SECONDS)

    def _opened(self, channel: Channel, fields: Message) -> None:
        term = fields.get("term")
        if type(term) is not int or term < self._term:
            # One that was replaced, and does not know it yet.
            channel.close(f"it is of term {term}, and term {self._term} has begun")
            return
        self._term, self._heard_at = term, self._runtime.now()
        if self.ready():
            self._on_join()
        else:
            channel.close("not ready any more")

    def _lost(self, reason: str) -> None:
        silent = self._runtime.now() - self._heard_at
        if silent > self._retry_for_s:
            self.failure = f"not joined at {self.address} for {silent:.0f} s: {reason}"
            logger.error("%s gives up: %s", self._identity.name, self.failure)
            return
        logger.info("%s: registry out of reach: %s", self._identity.name, reason)
        self._try_in(RETRY_SECONDS)

    def _on_message(self, _channel: Channel, message: Message) -> None:
        self._heard_at = self._runtime.now()
        if message["type"] != "pong":
            self._on_said(message)

    def _heartbeat(self) -> None:
        if self._closed:
            return
        self._runtime.call_later(wire.HEARTBEAT_SECONDS, self._heartbeat)
        # The loop reads sockets before it runs timers: after a pause of this process, waiting answers have been read.
        if self._runtime.now() - self._heard_at > SILENCE_SECONDS:
            self.hang_up(f"the registry said nothing for {SILENCE_SECONDS:g} s")
        self.tell({"type": "ping", **self._beat()})


LONGEST_RETRY_SECONDS = 2.0


class Source(Way):
    """To a rank's shard server. It dials as long as something is wanted, and keeps the connection from one version to
    the next."""

    def __init__(self, runtime: Runtime, identity: Identity, epoch: str, rank: int, wanted: Puller):
        super().__init__(runtime, "", identity, {"epoch": epoch, "rank": rank})
        self.rank, self._wanted = rank, wanted
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
        if self._channel is not None:
            for request in requests:
                self._channel.send(request)
        elif requests and self.address and self._stop is None:
            self._dial()

    _try = ask

    def drop(self, reason: str) -> None:
        super().drop(reason)
        self._wanted.lost(self.rank)

    def succeeded(self) -> None:
        """Something good has come over the channel."""
        self._failures = 0

    def _opened(self, channel: Channel, fields: Message) -> None:
        rank = fields.get("rank")
        if rank != self.rank:
            channel.close(f"{self.address} is the shard server of rank {rank}, not of rank {self.rank}")
            return
        channel.place = lambda _channel, message: self._wanted.place(self, message)
        self.ask()

    def _lost(self, reason: str) -> None:
        logger.info("no connection to the shard server of rank %d: %s", self.rank, reason)
        self._wanted.lost(self.rank)
        if not self._wanted.leave_peer():
            # At once the first time: a channel also ends because what it was sending has gone.
            self._try_in(min(RETRY_SECONDS * (2**self._failures - 1), LONGEST_RETRY_SECONDS))
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
