"""Messages between the processes of the weight synchronisation: length-prefixed JSON, and raw bucket frames.

Nothing that arrives is unpickled or evaluated. A connection starts with a challenge and response over a per-job token,
in both directions, before any other message is read; sizes are limited before and after.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import secrets
import struct
from typing import Any

Message = dict[str, Any]

LENGTH = struct.Struct("!I")
MAXIMUM_HELLO_BYTES = 16 * 1024
MAXIMUM_MESSAGE_BYTES = 512 * 1024 * 1024
# Actors and couriers show the coordinator, and workers their leader, so often that they live; the coordinator answers.
HEARTBEAT_SECONDS = 0.5
# A coordinator or a worker that says nothing for this long is taken for dead.
SILENCE_SECONDS = 10.0
TOKEN_VARIABLE = "TORCHTITAN_WEIGHT_SYNC_TOKEN"

# magic, attempt, rank whose bucket it is, bucket index, encoding, payload bytes
BUCKET_HEADER = struct.Struct("!4sQIIBQ")
BUCKET_MAGIC = b"TWB2"
# The other way, where a transport asks for it: this bucket is in the actor's memory, and verified.
ACKNOWLEDGEMENT = struct.Struct("!4sQII")
ACKNOWLEDGEMENT_MAGIC = b"TWA1"
# The payload is the bucket's bytes (or a reference to them); any other encoding is weight_sync/delta.py's.
FULL = 0
# Not a bucket but a note to the other half of the transport; the other way an acknowledgement's header with this magic,
# and the note's length in place of the bucket.
NOTE = 255
NOTE_MAGIC = b"TWN1"
# A payload (or note) that only says where the bytes are is no longer than this.
MAXIMUM_REFERENCE_BYTES = 4096

# What each message must hold; a field that may be None may be left out. Every message may also carry epoch and term.
_NUMBER, _TEXT, _LIST, _OBJECT, _FLAG = int, str, list, dict, bool
# Fields that are lists of texts, wherever they occur.
_TEXT_LISTS = frozenset(("data", "parts"))
_MAYBE_NUMBER, _MAYBE_TEXT, _MAYBE_LIST = (int, type(None)), (str, type(None)), (list, type(None))
_MAYBE_FLAG = (bool, type(None))
SCHEMA: dict[str, dict[str, type | tuple[type, ...]]] = {
    # handshake
    "challenge": {"nonce": _TEXT},
    "hello": {"role": _TEXT, "nonce": _TEXT, "proof": _TEXT, "fields": _OBJECT},
    "welcome": {"proof": _TEXT},
    "admitted": {"fields": _OBJECT},
    "refuse": {"reason": _TEXT},
    # courier -> coordinator
    "layout": {"layout": _OBJECT},
    "snapped": {"serial": _NUMBER, "version": _NUMBER, "checksums": _LIST},
    "failed": {"serial": _NUMBER, "version": _NUMBER},
    "need_slot": {},
    # courier, or the actor that relays -> coordinator; sent: bytes of buckets that have left, whatever became of them
    "sent": {"attempt": _NUMBER, "actor": _TEXT, "version": _NUMBER, "bytes": _NUMBER},
    "broken": {"attempt": _NUMBER, "reason": _TEXT},
    # coordinator -> courier
    "publish": {"serial": _NUMBER, "version": _NUMBER, "digest": _TEXT, "layout_id": _TEXT},
    "drop": {"serial": _NUMBER},
    "lease": {"serial": _NUMBER, "attempts": _LIST},
    # data: one host:port per worker of the actor; base_serial: the slot that a delta is taken against
    "send": {"attempt": _NUMBER, "actor": _TEXT, "data": _LIST, "serial": _NUMBER, "base_serial": _MAYBE_NUMBER},
    # keep this published snapshot's slot as a base of deltas, and no other
    "retain": {"serial": _MAYBE_NUMBER},
    # this actor is there and may be offered a version: connect where that takes long
    "connect": {"actor": _TEXT, "data": _LIST},
    # this actor will not come back: close what is open to it
    "forget": {"actor": _TEXT},
    # coordinator -> courier or the actor that serves the attempt (abort: to the receiving actor too)
    "release": {"attempt": _NUMBER},
    # coordinator -> actor that is to pass on the version it holds
    "relay": {"attempt": _NUMBER, "actor": _TEXT, "version": _NUMBER, "digest": _TEXT, "data": _LIST},
    # coordinator -> actor; base: [version, digest] that a delta may be taken against; source: the actor that sends
    "offer": {
        "attempt": _NUMBER,
        "version": _NUMBER,
        "layout_id": _TEXT,
        "checksums": _LIST,
        "digest": _TEXT,
        "base": _MAYBE_LIST,
        "source": _MAYBE_TEXT,
    },
    "abort": {"attempt": _NUMBER, "reason": _TEXT},
    "apply": {"attempt": _NUMBER},
    "evict": {"reason": _TEXT},
    # actor -> coordinator, and worker of an actor -> its leader; base: whether the offered base is held
    "ready": {"layout_id": _TEXT, "parts": _MAYBE_LIST},
    "accept": {"attempt": _NUMBER, "base": _MAYBE_FLAG},
    "decline": {"attempt": _NUMBER, "reason": _TEXT},
    "progress": {"attempt": _NUMBER, "bytes": _NUMBER},
    "staged": {"attempt": _NUMBER, "digest": _TEXT},
    "refused": {"attempt": _NUMBER, "reason": _TEXT},
    "applied": {"attempt": _NUMBER, "version": _NUMBER, "digest": _TEXT, "figures": _OBJECT},
    "poisoned": {"attempt": _NUMBER, "reason": _TEXT},
    # actor or courier -> coordinator, and its answer
    "ping": {},
    "pong": {},
    # trainer (rank 0) <-> coordinator; status: an actor has "figures" only where they have changed
    "pin": {"version": _NUMBER},
    "unpin": {},
    "status": {"actors": _OBJECT, "newest": (_NUMBER, type(None)), "dropped": _LIST},
}


class ProtocolError(Exception):
    """A peer sent something that the protocol does not allow: its connection is closed."""


class Encoded:
    """A long value that goes into many messages: encoded once."""

    def __init__(self, value: Any):
        self.text = _json(value)


def _json(value: Any) -> str:
    return value.text if isinstance(value, Encoded) else json.dumps(value, separators=(",", ":"))


def encode(message: Message) -> bytes:
    """Bytes of one framed message; its values may be Encoded."""
    body = ("{" + ",".join(f"{_json(name)}:{_json(value)}" for name, value in message.items()) + "}").encode()
    return LENGTH.pack(len(body)) + body


def validate(message: Any) -> Message:
    """The message itself, once its type is known and its required fields are there. Raises ProtocolError."""
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ProtocolError("a message is not an object with a type")
    fields = SCHEMA.get(message["type"])
    if fields is None:
        raise ProtocolError(f"unknown message type {message['type']!r}")
    for name, kind in fields.items():
        if not isinstance(message.get(name), kind):
            raise ProtocolError(f"message {message['type']!r} needs field {name!r} of type {kind}")
        if name in _TEXT_LISTS and not all(type(element) is str for element in message.get(name) or ()):
            raise ProtocolError(f"message {message['type']!r} needs a list of texts as {name!r}")
    return message


class MessageReader:
    """Cuts a byte stream into messages. `limit` is the longest message accepted, in bytes."""

    def __init__(self, limit: int = MAXIMUM_HELLO_BYTES):
        self.limit = limit
        self._buffer = bytearray()

    @property
    def pending_bytes(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        """Add bytes that arrived."""
        self._buffer += data

    def next(self) -> Message | None:
        """The next whole message, or None. Raises ProtocolError for one that is too long or malformed."""
        if len(self._buffer) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._buffer)
        if length > self.limit:
            raise ProtocolError(f"a message of {length} bytes exceeds the limit of {self.limit}")
        end = LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[LENGTH.size : end])
        del self._buffer[:end]
        try:
            return validate(json.loads(body))
        except (ValueError, RecursionError) as error:
            # ValueError: not UTF-8, not JSON, or a number with too many digits.
            raise ProtocolError(f"a message is not JSON: {error}") from error


def new_nonce() -> str:
    """A fresh challenge."""
    return secrets.token_hex(16)


def _bytes(text: str) -> bytes:
    # JSON can hold half a surrogate pair, which plain UTF-8 refuses.
    return text.encode("utf-8", "surrogatepass")


def _proof(token: str, side: str, role: str, server_nonce: str, client_nonce: str) -> str:
    text = _bytes("\n".join((side, role, server_nonce, client_nonce)))
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest()


def client_proof(token: str, role: str, server_nonce: str, client_nonce: str) -> str:
    """What a client answers to a challenge: only who knows the token can."""
    return _proof(token, "client", role, server_nonce, client_nonce)


def server_proof(token: str, role: str, server_nonce: str, client_nonce: str) -> str:
    """What a server answers to a hello, so that a client does not obey a stranger."""
    return _proof(token, "server", role, server_nonce, client_nonce)


def check_proof(expected: str, given: str) -> bool:
    """Constant-time comparison of proofs."""
    return hmac.compare_digest(_bytes(expected), _bytes(given))


def parse_address(address: str) -> tuple[str, int]:
    """`host:port` -> (host, port). Raises ProtocolError when it is neither."""
    host, separator, port = address.rpartition(":")
    digits = port.isascii() and port.isdigit() and len(port) <= 5
    if not separator or not host or not digits or not 0 < int(port) < 65536:
        raise ProtocolError(f"not an address of the form host:port: {address!r}")
    return host.strip("[]"), int(port)


def parse_data_address(address: str) -> tuple[str, int]:
    """A data port's address: its host is numeric, because who connects looks nothing up. Raises ProtocolError."""
    host, port = parse_address(address)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ProtocolError(f"a data address needs a numeric host: {address!r}") from None
    return host, port


def format_address(host: str, port: int) -> str:
    """What parse_address reads; an IPv6 host is put into brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
