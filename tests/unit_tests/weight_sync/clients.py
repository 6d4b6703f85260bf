"""A client of the weight synchronisation that says what a test has it say."""

from __future__ import annotations

from typing import Any

from tests.deterministic.machine import Machine, Process
from tests.deterministic.parts import TOKEN
from torchtitan.weight_sync.wire.handshake import GUEST, Dialer, Identity
from torchtitan.weight_sync.wire.runtime import Channel, Message, PayloadTarget

GUEST_TOKEN = "what guests know"


class Client:
    """A connection to a server: what it has heard, and why it was refused or closed."""

    def __init__(self, machine: Machine, server: str, role: str, name: str, beats: bool = True, **fields: Any):
        self.machine, self.over = machine, ""
        self.heard: list[Message] = []
        self.process = Process(machine, f"{role} {name}")
        self.channel: Channel | None = None
        identity = Identity.of(GUEST_TOKEN if role == GUEST else TOKEN, role, name)
        Dialer(self.process.runtime, server, identity, {"epoch": "e1", **fields}, self._ready, self._closed)
        self._beats = beats
        machine.run(machine.now + 0.1)

    def _ready(self, channel: Channel, _fields: Message) -> None:
        self.channel = channel
        channel.on_message = lambda _channel, message: self.heard.append(message)
        channel.on_close = lambda _channel, reason: self._closed(reason)
        channel.payload_target = lambda _channel, message: PayloadTarget(
            [memoryview(bytearray(message["bytes"]))], lambda _parts: None
        )
        self._beat()

    def _beat(self) -> None:
        if self._beats and not self.over:
            self.machine.at(0.5, self.process, self._beat)
            self.send({"type": "ping"})

    def _closed(self, reason: str) -> None:
        self.over = reason

    def send(self, message: Message) -> None:
        assert self.channel is not None, self.over
        self.channel.send(message)

    def say(self, kind: str, **fields: Any) -> None:
        """Send, and let things happen for 50 ms."""
        self.send({"type": kind, **fields})
        self.machine.run(self.machine.now + 0.05)

    def last(self, kind: str) -> Message:
        """The newest message of this type; of a status, with all that earlier ones have said of actors."""
        found = [message for message in self.heard if message["type"] == kind]
        if kind == "status":
            return {**found[-1], "actors": {name: row for message in found for name, row in message["actors"].items()}}
        return found[-1]

    def count(self, kind: str) -> int:
        return sum(message["type"] == kind for message in self.heard)
