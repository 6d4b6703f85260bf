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
from collections.abc import Callable
from typing import Any, Protocol

Message = dict[str, Any]

LENGTH = struct.Struct("!I")
MAXIMUM_HELLO_BYTES = 16 * 1024
MAXIMUM_MESSAGE_BYTES = 512 * 1024 * 1024
TOKEN_VARIABLE = "TORCHTITAN_WEIGHT_SYNC_TOKEN"

# How often servers check for peers that are silent, late or idle, and how often clients send a sign of life.
TICK_SECONDS, HEARTBEAT_SECONDS = 0.2, 0.5
# A peer that says nothing for this long is considered dead.
SILENCE_SECONDS = 3.0
RETRY_SECONDS = 0.2
Fields = dict[str, type | tuple[type, ...]]
_MAYBE_NUMBER = (int, type(None))
# newest: serial of the last published snapshot; lanes: older serials that are still being pulled; room: whether another
# lane may begin; base: a serial that is kept for deltas; dropped: serials that will never be published. Once the
# trainer has said so, there is also `pinned`: the version that actors keep, if any.
_LIVE: Fields = {"newest": int, "lanes": list, "room": bool, "base": _MAYBE_NUMBER, "dropped": list}
# The fields that each message must have; one that may be None may be omitted.
SCHEMA: dict[str, Fields] = {
    # Handshake
    "challenge": {"nonce": str},
    "hello": {"role": str, "name": str, "nonce": str, "proof": str, "fields": dict},
    "welcome": {"proof": str, "fields": dict},
    "refuse": {"reason": str},
    # Any client -> registry, and the answer. bytes: how many a pulling actor has received
    "ping": {"bytes": _MAYBE_NUMBER},
    "pong": {},
    # Shard server -> registry. snapped may name the file that holds the snapshot; failed may say why there is none
    "layout": {"layout": dict},
    "snapped": {"serial": int, "version": int, "checksums": list},
    "failed": {"serial": int, "version": int},
    # Registry -> shard servers and actors
    "live": _LIVE,
    # Registry -> actor. servers: one address per rank; progress_s: [weight_sync] progress_timeout_s. newest is also
    # sent to an actor that joins, and may name another actor to pull from, as `source`
    "model": {"layout_id": str, "layout": dict, "servers": list, "progress_s": (int, float)},
    "newest": {**_LIVE, "version": int, "digest": str, "checksums": list},
    # Actor -> registry. ended: how a pull ended (staged, gone, lost), or that its version was refused, and why
    "pulling": {"serial": int, "version": int},
    "ended": {"version": int, "outcome": str, "reason": str},
    "serving": {"version": int, "digest": str, "figures": dict},
    "poisoned": {"version": int, "reason": str},
    # Actor -> shard server. buckets: ranges [first, end) of the rank's buckets; base: the snapshot that deltas may be
    # taken against; again (optional): an earlier copy was damaged or lost, and the bytes themselves are wanted
    "open": {"pull": int, "serial": int, "buckets": list, "base": _MAYBE_NUMBER},
    # Shard server -> actor. A bucket carries its bytes or a delta against the snapshot `base`, or says in `reference`
    # where the bytes are
    "gone": {"pull": int},
    "bucket": {"pull": int, "rank": int, "bucket": int},
    # Shard server <-> actor, for nccl. entry: what the two ends of a communicator need in order to connect (value in
    # hexadecimal); credit: the actor has posted the receive of another chunk. link: names the communicator
    "entry": {"link": str, "key": str, "value": str},
    "credit": {"link": str},
    # Leader -> worker: apply the version that all have staged
    "apply": {"version": int},
    # Trainer (rank 0) <-> registry
    "pin": {"version": _MAYBE_NUMBER},
    "status": {"actors": dict, "newest": _MAYBE_NUMBER, "dropped": list},
}


class ProtocolError(Exception):
    """A peer sent something that the protocol does not allow; its connection is closed."""


_encode = json.JSONEncoder(separators=(",", ":")).encode


class Encoded:
    """A long value that is part of many messages, encoded once."""

    def __init__(self, value: Any):
        self.text = _json(value)


def _json(value: Any) -> str:
    return value.text if isinstance(value, Encoded) else _encode(value)


def encode(message: Message) -> bytes:
    """Return one framed message; its values may be Encoded."""
    body = ("{" + ",".join(f"{_json(name)}:{_json(value)}" for name, value in message.items()) + "}").encode()
    return LENGTH.pack(len(body)) + body


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


def validate(message: Any) -> Message:
    """Return the message if its type is known and it has the required fields. Raises ProtocolError otherwise."""
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ProtocolError("a message is not an object with a type")
    kind = message["type"]
    fields = SCHEMA.get(kind)
    if fields is None:
        raise ProtocolError(f"unknown message type {kind!r}")
    for name, expected in fields.items():
        value = message.get(name)
        if not isinstance(value, expected) or (type(value) is bool and expected is not bool):
            raise ProtocolError(f"message {kind!r} needs field {name!r} of type {expected}")
    for name in ("lanes", "dropped") if kind in ("live", "newest") else ():
        if any(type(element) is not int for element in message[name]):
            raise ProtocolError(f"message {kind!r} needs a list of numbers as {name!r}")
    size = message.get("bytes", 0) if kind == "bucket" else 0
    if type(size) is not int or size < 0:
        raise ProtocolError(f"a bucket of {size!r} bytes")
    return message


def payload_bytes(message: Message) -> int:
    """Return how many bytes follow this message."""
    return message.get("bytes", 0) if message["type"] == "bucket" else 0


OnDone = Callable[[Any, BaseException | None], None]
"""Called with the result of a function that ran on a thread, or with the exception that it raised"""


PayloadTarget = tuple[memoryview, Callable[[memoryview], None]]
"""Memory of exactly as many bytes as arrive, and a callback for each piece of it that has been filled"""


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
        self.throttle: Callable[[], int] | None = None
        """For fault injection: returns how many payload bytes per second may be sent; 0: unlimited"""

    def send(
        self, message: Message, payload: memoryview | None = None, on_sent: Callable[[], None] | None = None
    ) -> None:
        """Queue a message. The payload is not copied: it is read until `on_sent` is called or the channel closes."""
        raise NotImplementedError

    def trust(self) -> None:
        """Accept long messages and payloads from now on, because the peer has proved who it is."""
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

    def work(self, lane: str, function: Callable[[], Any], done: OnDone) -> None:
        """Run `function` on a thread kept for such work, then `done` as a callback. The order is not guaranteed."""

    def dial(
        self, address: str, on_open: Callable[[Channel], None], on_failure: Callable[[str], None]
    ) -> Callable[[], object]:
        """Connect to `host:port`, where the host is numeric. Calls one of the two callbacks, unless the returned
        function is called first. The caller must call it if connecting takes too long."""

    def listen(self, where: Any, accept: Callable[[Channel], None]) -> Callable[[], None]:
        """Accept channels at `where` (a listening socket). The returned function stops that."""
