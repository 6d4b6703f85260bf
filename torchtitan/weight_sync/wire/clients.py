"""Connections to a server, above all to the registry, made again when it is lost, silent or replaced."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from torchtitan.weight_sync.wire import runtime as wire
from torchtitan.weight_sync.wire.handshake import Dialer, Identity
from torchtitan.weight_sync.wire.runtime import RETRY_SECONDS, SILENCE_SECONDS, Channel, Message, Runtime

logger = logging.getLogger(__name__)


class ServerConnection:
    """A connection to a server, dialled again when it is lost. A subclass decides when to dial and what to send.

    fields: the contents of the hello.
    """

    def __init__(self, runtime: Runtime, address: str, identity: Identity, fields: Message):
        self._runtime, self.address, self._identity, self._fields = runtime, address, identity, fields
        self._channel: Channel | None = None
        self._stop: Callable[[], object] | None = None
        """Cancels the call in progress or the wait for the next one; None if there is neither"""

    def tell(self, message: Message) -> None:
        """Send if connected. What must not be lost is sent again on the next connection."""
        if self._channel is not None:
            self._channel.send(message)

    def drop(self, reason: str) -> None:
        """Close the connection without dialling again. When this returns, nothing writes for it any more."""
        stop, channel = self._stop, self._channel
        self._stop = self._channel = None
        if stop is not None:
            stop()
        if channel is not None:
            channel.close(reason)

    def _try(self) -> None:
        """Dial if there is a reason to."""
        raise NotImplementedError

    def _opened(self, channel: Channel, fields: Message) -> None:
        """Handle a new connection; close it if it is the wrong server. fields: what the server says of itself."""
        raise NotImplementedError

    def _lost(self, reason: str) -> None:
        """Handle a connection that has closed, or could not be made."""
        raise NotImplementedError

    def _on_message(self, channel: Channel, message: Message) -> None:
        raise NotImplementedError

    def _dial(self) -> None:
        names = self.address, self._identity, self._fields
        self._stop = Dialer(self._runtime, *names, self._welcomed, self._failed).cancel

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


class RegistryClient(ServerConnection):
    """The connection to the registry. on_join(): called when connected to a registry, which knows nothing of this
    client yet. on_message(message): called for each of its messages. retry_for_s: how long it may be unreachable, or
    say what this client cannot act on, before `failure` is set and dialling stops. beat(): called every
    HEARTBEAT_SECONDS; returns the fields of the ping. One without any is left out while other messages come and go."""

    retry_s = RETRY_SECONDS

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
        self._on_join, self._on_registry_message, self._retry_for_s, self._beat = on_join, on_message, retry_for_s, beat
        self.failure = ""
        self.ready: Callable[[], bool] = lambda: True
        """Whether this client may join yet"""
        self._term = 0
        self._lost_by = ""
        """Why the registry is out of reach; said once"""
        self._heard_at = self._joined_at = runtime.now()
        """When it said something last, and when this client last acted on what it said"""
        self._sent_at = 0.0
        self._closed = False

    def tell(self, message: Message) -> None:
        if self.connected:
            self._sent_at = self._runtime.now()
        super().tell(message)

    def start(self) -> None:
        """Begin to dial."""
        self._try()
        self._heartbeat()

    def close(self, reason: str) -> None:
        """Close the connection for good."""
        self._closed = True
        self.drop(reason)

    @property
    def connected(self) -> bool:
        """Return whether there is a connection."""
        return self._channel is not None

    def hang_up(self, reason: str) -> None:
        """Close this connection and dial again."""
        if self._channel is not None:
            self._channel.close(reason)

    def _try(self) -> None:
        if self.ready():
            self._dial()
        else:
            # No call was made, and retry_for_s bounds only the registry's absence.
            self._joined_at = self._runtime.now()
            self._try_in(self.retry_s)

    def _opened(self, channel: Channel, fields: Message) -> None:
        term = fields.get("term")
        if type(term) is not int or term < self._term:
            # This registry has been replaced, and does not know it yet.
            channel.close(f"it is of term {term}, and term {self._term} has begun")
            return
        self._term, self._heard_at, self._lost_by = term, self._runtime.now(), ""
        if self.ready():
            self._on_join()
        else:
            channel.close("not ready any more")

    def _lost(self, reason: str) -> None:
        away_s = self._runtime.now() - self._joined_at
        if away_s > self._retry_for_s:
            self.failure = f"not joined at {self.address} for {away_s:.0f} s: {reason}"
            logger.error("%s gives up: %s", self._identity.name, self.failure)
            return
        if reason != self._lost_by:
            logger.info("%s: registry out of reach: %s", self._identity.name, reason)
        self._lost_by = reason
        self._try_in(self.retry_s)

    def _on_message(self, _channel: Channel, message: Message) -> None:
        self._heard_at = self._runtime.now()
        if message["type"] != "pong":
            self._on_registry_message(message)
        # What raises above ends the connection, however often it is made again.
        self._joined_at = self._runtime.now()

    def _heartbeat(self) -> None:
        if self._closed:
            return
        self._runtime.call_later(wire.HEARTBEAT_SECONDS, self._heartbeat)
        # The loop reads sockets before it runs timers: after a pause of this process, waiting answers have been read.
        if self._runtime.now() - self._heard_at > SILENCE_SECONDS:
            self.hang_up(f"the registry said nothing for {SILENCE_SECONDS:g} s")
        about = self._beat()
        # Whatever was said and heard lately is a sign of life, too.
        if about or self._runtime.now() - min(self._sent_at, self._heard_at) >= 2 * wire.HEARTBEAT_SECONDS:
            self.tell({"type": "ping", **about})
