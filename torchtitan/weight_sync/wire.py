"""What the processes of the weight synchronisation have in common: messages as bytes, proofs, addresses.

Nothing that arrives is unpickled or evaluated. A connection starts with a challenge and response over a per-job token,
in both directions, before any other message is read; sizes are limited before and after.
"""

from __future__ import annotations

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


def _bytes(text: str) -> bytes:
    # JSON can hold half a surrogate pair, which plain UTF-8 refuses.
    return text.encode("utf-8", "surrogatepass")


def _proof(token: str, side: str, role: str, server_nonce: str, client_nonce: str) -> str:
    text = _bytes("\n".join((side, role, server_nonce, client_nonce)))
    return hmac.digest(token.encode(), text, "sha256").hex()


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
