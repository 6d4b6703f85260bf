"""The interfaces between the parts of the weight synchronisation, and between them and the machine.

Messages are JSON objects with a type; some carry bytes. Nothing that arrives is unpickled or evaluated. A connection
starts with a challenge and response in both directions, over keys from a per-job token, before any other message is
read. Message sizes are limited before and after.

Time, timers, threads and channels are accessed only through a Runtime. In production it uses sockets and threads
(sockets.py); in tests it has a virtual clock and a simulated network, and runs the same code.
"""

from __future__ import annotations

import ipaddress
import json
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torchtitan.utils.rate_limiter import RateLimiter

Message = dict[str, Any]

LENGTH = struct.Struct("!I")
MAXIMUM_HELLO_BYTES = 16 * 1024
MAXIMUM_MESSAGE_BYTES = 512 * 1024 * 1024
# Of an actor: figures, a reason, or an entry of a link. A request for buckets has so many bytes more for each bucket
# that there is: it has at most one range for every two of them.
MAXIMUM_ACTOR_BYTES, BYTES_PER_BUCKET = 72 * 1024, 16
# How many messages of an actor are handled at once, and per second from then on; one also counts as a message per so
# many bytes. A connection costs as much as so many messages. Later ones wait, in the end at their sender.
MESSAGES_AT_ONCE, MESSAGES_PER_SECOND, BYTES_PER_MESSAGE, MESSAGES_PER_CONNECTION = 2000.0, 500.0, 1024, 10
TOKEN_VARIABLE = "TORCHTITAN_WEIGHT_SYNC_TOKEN"
# Of actors that the run does not start.
ACTOR_TOKEN_VARIABLE = "TORCHTITAN_ACTOR_TOKEN"

# How often servers check for peers that are silent, late or idle, and how often clients send a sign of life.
TICK_SECONDS, HEARTBEAT_SECONDS = 0.2, 0.5
# A peer that says nothing for this long is considered dead.
SILENCE_SECONDS = 3.0
RETRY_SECONDS = 0.2


class ProtocolError(Exception):
    """A peer sent something that the protocol does not allow; its connection is closed."""


_encode = json.JSONEncoder(separators=(",", ":")).encode


class BroadcastMessage(Message):
    """A message to many, encoded once: it must not change after it has been sent."""

    frame = b""


def encode(message: Message) -> bytes:
    """Return one framed message."""
    if isinstance(message, BroadcastMessage) and message.frame:
        return message.frame
    body = _encode(message).encode()
    frame = LENGTH.pack(len(body)) + body
    if isinstance(message, BroadcastMessage):
        message.frame = frame
    return frame


def as_bytes(text: str) -> bytes:
    """Encode text for a proof. JSON can hold half a surrogate pair, which plain UTF-8 refuses."""
    return text.encode("utf-8", "surrogatepass")


def parse_address(address: str) -> tuple[str, int]:
    """Parse `host:port` to (host, port). Raises ProtocolError for anything else."""
    host, separator, port = address.rpartition(":")
    digits = port.isascii() and port.isdigit() and len(port) <= 5
    if not separator or not host or not digits or not 0 < int(port) < 65536:
        raise ProtocolError(f"not an address of the form host:port: {address!r}")
    return host.strip("[]"), int(port)


def parse_data_address(address: str) -> tuple[str, int]:
    """Parse a data port's address, whose host must be numeric because dialling resolves no names. Raises
    ProtocolError."""
    host, port = parse_address(address)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ProtocolError(f"a data address needs a numeric host: {address!r}") from None
    return host, port


def format_address(host: str, port: int) -> str:
    """Format an address for parse_address; an IPv6 host gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def field_of(fields: Any, name: str, kind: type) -> Any:
    """Return a field of received data, of exactly this type; a number must fit an unsigned 64-bit integer. Raises
    ProtocolError."""
    value = fields.get(name) if isinstance(fields, dict) else None
    if type(value) is not kind or (isinstance(value, int) and not 0 <= value < 2**64):
        raise ProtocolError(f"a reference needs field {name!r} of type {kind.__name__}")
    return value


OnDone = Callable[[Any, BaseException | None], None]
"""Called with the result of a function that ran on a thread, or with the exception that it raised"""


# So many pieces of memory are filled at a time: systems refuse more than 1,024.
MAX_PIECES = 512


class PayloadTarget:
    """Pieces of memory that the bytes behind a message fill, one piece after the other. They are exactly as many bytes
    as arrive. take(parts): called with the parts of pieces that have been filled, in order."""

    def __init__(self, pieces: Sequence[memoryview], take: Callable[[list[memoryview]], None]):
        self.size = sum(map(len, pieces))
        self._empty = deque(pieces)
        self._take = take

    def room(self, count: int) -> list[memoryview]:
        """Return where the next bytes go: parts of pieces with `count` bytes at most."""
        parts: list[memoryview] = []
        for piece in self._empty:
            if count <= 0 or len(parts) == MAX_PIECES:
                break
            parts.append(piece[:count])
            count -= len(parts[-1])
        return parts

    def filled(self, count: int) -> None:
        """Handle that the next `count` bytes of the room have been filled."""
        parts: list[memoryview] = []
        while count:
            piece = self._empty.popleft()
            parts.append(piece[:count])
            if count < len(piece):
                self._empty.appendleft(piece[count:])
            count -= len(parts[-1])
        self._take(parts)

    def fill(self, data: memoryview) -> None:
        """Copy these bytes to where they go. Raises ProtocolError if they are too many."""
        while data:
            count = 0
            for part in self.room(len(data)):
                part[:] = data[count : count + len(part)]
                count += len(part)
            if not count:
                raise ProtocolError(f"{len(data)} bytes arrive behind the end of their memory")
            self.filled(count)
            data = data[count:]


class Timer(Protocol):
    """A scheduled call."""

    def cancel(self) -> None:
        """Cancel the call."""


class Channel:
    """Messages in both directions, any of which may carry bytes. Sending never blocks.

    The user of a channel sets its callbacks. on_message(channel, message): called when a message and its bytes have
    arrived. payload_target(channel, message): returns where the bytes that follow go, or None to drop them and the
    message. on_close(channel, reason): called once, when the channel has closed.
    """

    def __init__(self) -> None:
        self.on_message: Callable[[Channel, Message], None] = _no_message
        self.on_close: Callable[[Channel, str], None] = lambda _channel, _reason: None
        self.payload_target: Callable[[Channel, Message], PayloadTarget | None] = _no_payload
        self.closed = False
        self.limiter: RateLimiter | None = None
        """None: the peer may send as much as it wants to"""
        self.throttle: Callable[[], int] | None = None
        """For fault injection: returns how many payload bytes per second may be sent; 0: unlimited"""
        self.peer_host = ""
        """The address that the connection comes from"""
        self.moved = 0
        """Bytes of payloads that have been handed to the network"""

    def send(
        self, message: Message, payload: memoryview | None = None, on_sent: Callable[[], None] | None = None
    ) -> None:
        """Queue a message. The payload is not copied: it is read until `on_sent` is called or the channel closes."""
        raise NotImplementedError

    def spend(self, messages: float) -> None:
        """Count what a message has cost beyond itself."""
        if self.limiter is not None:
            self.limiter.spend(messages)

    def use_thread(self) -> None:
        """Have a thread of this channel's own move payloads from now on, where there are threads."""

    def trust(self, longest: int = MAXIMUM_MESSAGE_BYTES) -> None:
        """Accept messages of up to `longest` bytes and payloads from now on: the peer has proved who it is."""
        raise NotImplementedError

    def close(self, reason: str) -> None:
        """Close immediately; queued messages are lost."""
        raise NotImplementedError


def _no_message(_channel: Channel, _message: Message) -> None:
    """For channels on which no message may arrive yet."""
    raise ProtocolError("a message came before the handshake was over")


def _no_payload(_channel: Channel, message: Message) -> PayloadTarget | None:
    raise ProtocolError(f"a {message['type']!r} carries no bytes")


class Runtime(Protocol):
    """All callbacks run on one thread, one after the other."""

    def now(self) -> float:
        """Return seconds on a monotonic clock."""

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Run `callback` after `seconds`."""

    def work(self, name: str, function: Callable[[], Any], done: OnDone) -> None:
        """Run `function` on the thread of this name, kept for such work, then `done` as a callback, in any order.
        Raises RuntimeError if the system has no thread left: neither is called then."""

    def dial(
        self, address: str, on_open: Callable[[Channel], None], on_failure: Callable[[str], None]
    ) -> Callable[[], object]:
        """Connect to `host:port`, where the host is numeric. Calls one of the two callbacks, unless the returned
        function is called first. The caller must call it if connecting takes too long."""

    def listen(self, where: Any, accept: Callable[[Channel], None]) -> Callable[[], None]:
        """Accept channels at `where` (a listening socket). The returned function stops that."""
