"""A courier's connection to one actor: buckets from shared memory to the socket, never copied, never blocking."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass

from torchtitan.weight_sync.connection import Connection, dial
from torchtitan.weight_sync.event_loop import EventLoop
from torchtitan.weight_sync.faults import Faults
from torchtitan.weight_sync.wire import BUCKET_HEADER, BUCKET_MAGIC, Message

# One connection gives the loop back after this much, so that a fast actor does not keep the others waiting.
SEND_BYTES = 4 << 20


@dataclass
class Delivery:
    """One attempt's buckets of this rank."""

    attempt: int
    serial: int
    version: int
    memory: memoryview
    bucket_bytes: int
    bucket: int = 0
    sent: int = 0
    """Bytes of the current frame that are on their way, header included"""
    frame: tuple[memoryview, memoryview] | None = None


class CourierLink:
    """Sends one delivery at a time.

    `on_end(delivery, error)` is called exactly once per delivery, when its memory is not touched any more. error: None
    when all is sent, a reason when the connection failed, "" after abort().
    """

    def __init__(
        self,
        loop: EventLoop,
        address: str,
        token: str,
        fields: Message,
        rank: int,
        faults: Faults,
        connect_timeout_s: float,
        on_end: Callable[[Delivery, str | None], None],
    ):
        self.loop, self.address, self.rank, self.faults = loop, address, rank, faults
        self._token, self._fields, self._connect_timeout_s, self._on_end = token, fields, connect_timeout_s, on_end
        self._socket: socket.socket | None = None
        self._cancel_dial: Callable[[], None] | None = None
        self._pause_cancel: Callable[[], None] | None = None
        self.delivery: Delivery | None = None

    def send(self, delivery: Delivery) -> None:
        """Begin a delivery; one that is still going on is given up."""
        self.abort()
        self.delivery = delivery
        if self._socket is not None:
            self._watch()
        elif self._cancel_dial is None:
            self._cancel_dial = dial(
                self.loop,
                self.address,
                self._token,
                "courier",
                self._fields,
                self._connected,
                self._not_connected,
                self._connect_timeout_s,
            )

    def abort(self) -> None:
        """Give up the current delivery. A frame cannot be stopped half-way, so the connection goes with it."""
        if self.delivery is not None:
            self._end("")
            self.disconnect()

    def disconnect(self) -> None:
        """Close the connection. A delivery that is going on fails."""
        if self._cancel_dial is not None:
            self._cancel_dial()
            self._cancel_dial = None
        if self._pause_cancel is not None:
            self._pause_cancel()
            self._pause_cancel = None
        if self._socket is not None:
            self.loop.forget(self._socket)
            self._socket.close()
            self._socket = None
        if self.delivery is not None:
            self._end("the connection was closed")

    def _end(self, error: str | None) -> None:
        delivery, self.delivery = self.delivery, None
        if delivery is not None:
            delivery.frame = None
            self._on_end(delivery, error)

    def _connected(self, connection: Connection, _fields: Message) -> None:
        self._cancel_dial = None
        self._socket = connection.detach()
        self._watch()

    def _not_connected(self, reason: str) -> None:
        self._cancel_dial = None
        self._end(reason)

    def _watch(self) -> None:
        if self._socket is None:
            return
        sending = self.delivery is not None and self._pause_cancel is None
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if sending else 0)
        self.loop.watch(self._socket, events, self._ready)

    def _ready(self, events: int) -> None:
        assert self._socket is not None
        try:
            if events & selectors.EVENT_READ:
                # The receiver never speaks here: readable means closed.
                if not self._socket.recv(1):
                    raise ConnectionResetError("the actor closed the connection")
                raise ConnectionError("the actor spoke on a data connection")
            if self.delivery is not None:
                self._send_some(self._socket, self.delivery)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(str(error))
            self.disconnect()

    def _send_some(self, sock: socket.socket, delivery: Delivery) -> None:
        budget = SEND_BYTES
        if self.faults.bytes_per_second:
            budget = max(1, self.faults.bytes_per_second // 50)
        allowance = budget
        while allowance > 0:
            header, payload = delivery.frame or self._next_frame(delivery)
            if delivery.sent < len(header):
                parts = [header[delivery.sent :], payload[:allowance]]
            else:
                start = delivery.sent - len(header)
                parts = [payload[start : start + allowance]]
            count = sock.sendmsg(parts)
            delivery.sent += count
            allowance -= count
            if delivery.sent == len(header) + len(payload):
                delivery.frame, delivery.sent = None, 0
                delivery.bucket += 1
                if delivery.bucket * delivery.bucket_bytes >= len(delivery.memory):
                    self._end(None)
                    self._watch()
                    return
        if self.faults.bytes_per_second:
            self._pause_cancel = self.loop.call_later(1 / 50, self._resume).cancel
            self._watch()

    def _resume(self) -> None:
        self._pause_cancel = None
        self._watch()

    def _next_frame(self, delivery: Delivery) -> tuple[memoryview, memoryview]:
        start = delivery.bucket * delivery.bucket_bytes
        payload = delivery.memory[start : start + delivery.bucket_bytes]
        if self.faults.corrupts(delivery.version, delivery.bucket):
            damaged = bytearray(payload)
            damaged[len(damaged) // 2] ^= 0x10
            payload = memoryview(damaged)
        header = BUCKET_HEADER.pack(BUCKET_MAGIC, delivery.attempt, self.rank, delivery.bucket, len(payload))
        delivery.frame = (memoryview(header), payload)
        return delivery.frame
