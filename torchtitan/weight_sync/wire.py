"""What the processes of the weight synchronisation have in common: messages as bytes, addresses, checked fields.

Nothing that arrives is unpickled or evaluated. A connection starts with a challenge and response over a per-job token,
in both directions, before any other message is read; sizes are limited before and after.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
import struct
from typing import Any

Message = dict[str, Any]

LENGTH = struct.Struct("!I")
MAXIMUM_HELLO_BYTES = 16 * 1024
MAXIMUM_MESSAGE_BYTES = 512 * 1024 * 1024
TOKEN_VARIABLE = "TORCHTITAN_WEIGHT_SYNC_TOKEN"


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


def new_nonce() -> str:
    """A fresh challenge."""
    return secrets.token_hex(16)


def as_bytes(text: str) -> bytes:
    """For a proof. JSON can hold half a surrogate pair, which plain UTF-8 refuses."""
    return text.encode("utf-8", "surrogatepass")


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


def field_of(fields: Any, name: str, kind: type) -> Any:
    """A field of what has come from elsewhere, of exactly this type; a number fits the system's own unsigned
    type. Raises ProtocolError."""
    value = fields.get(name) if isinstance(fields, dict) else None
    if type(value) is not kind or (isinstance(value, int) and not 0 <= value < 2**64):
        raise ProtocolError(f"a reference needs field {name!r} of type {kind.__name__}")
    return value
