"""What the parts of the weight synchronisation need from the machine: time, timers, threads and channels.

Registry, shard server and puller reach the machine through a Runtime alone. Production gives them one over sockets and
threads (sockets.py); the tests give them one with a virtual clock and a network of their own, and drive the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torchtitan.weight_sync.wire import Message, ProtocolError

Done = Callable[[Any, BaseException | None], None]
"""Called with the result of a piece of work, or with what it raised."""


Place = tuple[memoryview, Callable[[memoryview], None]]
"""Memory of exactly as many bytes as arrive, and what is called with each piece of it that has been filled."""


class Timer(Protocol):
    """A call in the future."""

    def cancel(self) -> None:
        """Make it a no-op."""


class Channel:
    """Messages in both directions, any of which may carry bytes. Sending never blocks.

    Who uses a channel sets its callbacks: on_message(channel, message): a message has arrived, with the bytes that it
    carries. place(channel, message): where what is about to arrive goes, or None to drop it, message included.
    on_close(channel, reason): the channel is over; called once.
    """

    def __init__(self) -> None:
        self.on_message: Callable[[Channel, Message], None] = no_message
        self.on_close: Callable[[Channel, str], None] = lambda _channel, _reason: None
        self.place: Callable[[Channel, Message], Place | None] = _no_payload
        self.closed = False
        self.throttle: Callable[[], int] | None = None
        """Fault injection: how many payload bytes per second may leave, 0 for as many as can"""

    def send(
        self, message: Message, payload: memoryview | None = None, on_sent: Callable[[], None] | None = None
    ) -> None:
        """Queue a message. The payload is not copied: it is read until `on_sent` is called or the channel closes."""
        raise NotImplementedError

    def trust(self) -> None:
        """The peer has proved who it is: accept long messages and payloads from now on."""
        raise NotImplementedError

    def close(self, reason: str) -> None:
        """Close now; what is queued is lost."""
        raise NotImplementedError


def no_message(_channel: Channel, _message: Message) -> None:
    """For a channel on which nothing may arrive yet."""
    raise ProtocolError("a message came before the handshake was over")


def _no_payload(_channel: Channel, message: Message) -> Place | None:
    raise ProtocolError(f"a {message['type']!r} carries no bytes")


class Runtime(Protocol):
    """All callbacks run on one thread, one after the other."""

    def now(self) -> float:
        """Seconds of a clock that never jumps."""

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Run `callback` after `seconds`."""

    def work(self, lane: str, function: Callable[[], Any], done: Done) -> None:
        """Run `function` on a thread kept for such work, then `done` as a callback. No order is promised."""

    def dial(
        self, address: str, on_open: Callable[[Channel], None], on_failure: Callable[[str], None]
    ) -> Callable[[], None]:
        """Connect to `host:port`, where the host is numeric. Calls one of the two, unless the returned function is
        called first, as it has to be once this takes too long."""

    def listen(self, where: Any, accept: Callable[[Channel], None]) -> Callable[[], None]:
        """Accept channels at `where` (a listening socket). The returned function ends it."""
