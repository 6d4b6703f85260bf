"""What hostile actors say: messages of arbitrary content, and connections that carry any bytes past the handshake."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Sequence
from typing import Any

from torchtitan.weight_sync.wire.handshake import Identity
from torchtitan.weight_sync.wire.messages import SCHEMA
from torchtitan.weight_sync.wire.runtime import LENGTH, Message, encode

VALUES: list[Any] = [
    None, True, -1, 0, 1, 2, 3, 10**30, 1.5, -2.5, float("nan"), float("inf"), "", "x", "a\n\x1b[2J", "y" * 3000, [],
    {}, [[0, 1]], [[0, 10**9]], [1, [2]], {"epoch": "e1"}, {"transfer_s": "x"}, {"bytes_full": float("nan")},
    {"pause_s": 0.1}, "staged", "gone", "refused", "127.0.0.1:1", "e1",
]  # fmt: skip


def message(rng: random.Random, version: int, digest: str, serials: Sequence[int]) -> Message:
    """A message of any type: about half of those that an actor may send are well-formed, and name these snapshots and
    this version."""
    plausible: dict[str, Any] = {
        "serial": rng.choice([0, 1, *serials]), "version": version,
        "digest": digest, "outcome": rng.choice(("staged", "gone", "lost", "refused")),
        "reason": "why", "figures": rng.choice(({}, {"transfer_s": 0.0}, {"transfer_s": 1e7, "source": "trainer"})),
        "pull": rng.randint(0, 3), "buckets": rng.choice(([], [[0, 1]])), "bytes": rng.randint(0, 2**40),
    }  # fmt: skip
    kind = rng.choice(("ping", "pulling", "ended", "serving", "poisoned", "open", *rng.sample(sorted(SCHEMA), 2)))
    found: Message = {"type": kind}
    names = [field.rstrip("?") for field in SCHEMA[kind]]
    wrong = rng.choice(names) if names and rng.random() < 0.3 else ""
    for name in names:
        odd = name == wrong or name not in plausible
        found[name] = rng.choice(VALUES) if odd else plausible[name]
    if rng.random() < 0.05:
        found[rng.choice(("type", "more", "version"))] = rng.choice(VALUES)
    return found


def receive(client: socket.socket) -> Message:
    """The next message. Raises ConnectionError where the connection has ended."""

    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            # With a timeout, MSG_WAITALL does not wait for all.
            if not (piece := client.recv(count - len(data))):
                raise ConnectionError("closed")
            data += piece
        return data

    found: Message = json.loads(exactly(*LENGTH.unpack(exactly(LENGTH.size))))
    return found


def hello(challenge: Message, identity: Identity, fields: Message) -> Message:
    """The answer of one who has the key of this identity."""
    proof = identity.proof("client", challenge["nonce"], "n")
    names = {"role": identity.role, "name": identity.name}
    return {"type": "hello", **names, "nonce": "n", "proof": proof, "fields": fields}


def enter(client: socket.socket, identity: Identity, fields: Message) -> Message:
    """The handshake on a new connection; what ends it: a welcome, or a refusal."""
    client.sendall(encode(hello(receive(client), identity, fields)))
    return receive(client)
