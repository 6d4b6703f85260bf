"""A sender's connection to one worker of an actor: frames of one delivery at a time, never copied, never blocking.

Senders are couriers (role "courier", buckets of one rank) and actors that relay (role "peer", buckets of all ranks).
"""

from __future__ import annotations

import logging
import selectors
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from torchtitan.weight_sync import faults
from torchtitan.weight_sync.connection import Connection, dial
from torchtitan.weight_sync.event_loop import EventLoop
from torchtitan.weight_sync.manifest import Layout
from torchtitan.weight_sync.needs import Needs, needs_bucket, needs_from_json
from torchtitan.weight_sync.transports import send_carrier
from torchtitan.weight_sync.transports.base import BucketKey, Delivery, SendCarrier, SendContext
from torchtitan.weight_sync.wire import (
    ACKNOWLEDGEMENT,
    ACKNOWLEDGEMENT_MAGIC,
    BUCKET_HEADER,
    BUCKET_MAGIC,
    MAXIMUM_REFERENCE_BYTES,
    NOTE,
    NOTE_MAGIC,
    Message,
    ProtocolError,
)

logger = logging.getLogger(__name__)

# One connection gives the loop back after this much, so that a fast actor does not keep the others waiting.
SEND_BYTES = 4 << 20
# A throttled connection (fault injection) sends its share so often.
THROTTLE_SLICES_PER_SECOND = 50


@dataclass(frozen=True)
class LinkSettings:
    """What all links of a sender have in common.

    role: courier or peer; rank: whose buckets (a peer's: -1); transport and options: which carrier, and its keys of
    [weight_sync]; streams: connections per worker, which share the buckets.
    """

    role: str
    epoch: str
    rank: int
    layout: Layout
    transport: str
    options: Message
    streams: int
    connect_timeout_s: float


@dataclass
class _Progress:
    """How far a delivery has come."""

    delivery: Delivery
    waiting: deque[BucketKey] | None = None
    """Buckets not yet begun; None before the worker has said which it needs"""
    unacknowledged: set[BucketKey] = field(default_factory=set)
    frame: tuple[memoryview, memoryview] | None = None
    sent: int = 0
    """Bytes of the current frame that are on their way, header included"""


class Link:
    """Sends one delivery at a time.

    `on_end(delivery, error)` is called exactly once per delivery, when its memory is not touched any more. error: None
    when all is sent (and acknowledged, where the transport does that), a reason when the connection failed, "" after
    abort().
    """

    def __init__(
        self,
        loop: EventLoop,
        address: str,
        token: str,
        settings: LinkSettings,
        actor: str,
        worker: int,
        stream: int,
        on_end: Callable[[Delivery, str | None], None],
        source: str = "",
    ):
        self.loop, self.address, self.settings = loop, address, settings
        self.actor, self.worker, self.stream, self.source = actor, worker, stream, source
        self._token, self._on_end = token, on_end
        self._socket: socket.socket | None = None
        self._carrier: SendCarrier | None = None
        self._needs: Needs | None = None
        self._cancel_dial: Callable[[], None] | None = None
        self._pause_cancel: Callable[[], None] | None = None
        self._stalled = False
        self._generation = 0
        self._progress: _Progress | None = None
        self._incoming = bytearray()
        self._notes: deque[memoryview] = deque()
        """Whole frames, apart from the first, which may have begun to leave"""
        self._sent_bytes = 0
        """Bytes of buckets that have left over this connection, headers included"""

    @property
    def delivery(self) -> Delivery | None:
        """What is being delivered."""
        return None if self._progress is None else self._progress.delivery

    def sent(self, delivery: Delivery) -> Message:
        """What the coordinator is told after a delivery: the bytes that have left since the last one."""
        count, self._sent_bytes = self._sent_bytes, 0
        fields = {"attempt": delivery.attempt, "version": delivery.version, "actor": self.actor}
        return {"type": "sent", **fields, "bytes": count}

    def send(self, delivery: Delivery) -> None:
        """Begin a delivery; one that is still going on is given up."""
        self.abort()
        self._progress = _Progress(delivery)
        if self._socket is not None:
            self._begin()
        else:
            self.connect()

    def connect(self) -> None:
        """Connect ahead of the first delivery. A failure ends a delivery that has begun; the next one tries again."""
        if self._socket is not None or self._cancel_dial is not None:
            return
        settings = self.settings
        carrier = self._carrier = send_carrier(settings.transport, self._context())
        fields: Message = {
            "rank": settings.rank,
            "epoch": settings.epoch,
            "actor": self.actor,
            "worker": self.worker,
            "stream": self.stream,
            "transport": settings.transport,
            **({"source": self.source} if self.source else {}),
            "carrier": carrier.hello(),
        }
        self._cancel_dial = dial(
            self.loop,
            self.address,
            self._token,
            settings.role,
            fields,
            self._connected,
            self._not_connected,
            settings.connect_timeout_s,
        )

    def _context(self) -> SendContext:
        settings = self.settings
        self._generation += 1
        generation = self._generation

        def on_loop(call: Callable[[], None]) -> None:
            # What a carrier of an earlier connection still says is not about this one.
            self.loop.call_from_thread(lambda: call() if generation == self._generation else None)

        return SendContext(
            loop=self.loop,
            epoch=settings.epoch,
            rank=settings.rank,
            actor=self.actor,
            worker=self.worker,
            stream=self.stream,
            layout=settings.layout,
            options=settings.options,
            wake=lambda: on_loop(self._woken),
            fail=lambda reason: on_loop(partial(self._fail, reason)),
            tell=lambda note: on_loop(partial(self._tell, note)),
        )

    def abort(self) -> None:
        """Give up the current delivery. A frame cannot be stopped half-way, so the connection goes with it."""
        if self._progress is not None:
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
        self._incoming.clear()
        self._notes.clear()
        self._end("the connection was closed")
        if self._carrier is not None:
            self._generation += 1
            self._carrier.close()
            self._carrier = None

    def _end(self, error: str | None) -> None:
        progress, self._progress = self._progress, None
        if progress is None:
            return
        progress.frame = None

        def released() -> None:
            self.loop.call_from_thread(partial(self._on_end, progress.delivery, error))

        if self._carrier is not None:
            self._carrier.end(progress.delivery, released)
        else:
            released()

    def _fail(self, reason: str) -> None:
        self._end(reason)
        self.disconnect()

    def _connected(self, connection: Connection, fields: Message) -> None:
        assert self._carrier is not None
        self._cancel_dial = None
        try:
            self._socket = connection.detach()
            self._needs = needs_from_json(fields.get("buckets"))
            self._carrier.connected(fields.get("carrier", {}))
        except ProtocolError as error:
            connection.close(str(error))  # where it was not detached
            self._fail(str(error))
            return
        except Exception as error:
            logger.exception("%s: the actor's answer could not be handled", self.address)
            self._fail(repr(error))
            return
        self._begin()

    def _not_connected(self, reason: str) -> None:
        self._cancel_dial = None
        self._fail(reason)

    # Sending

    def _begin(self) -> None:
        """Connection and delivery are there: choose this stream's share of what the worker needs."""
        progress = self._progress
        if progress is not None and progress.waiting is None:
            needed = [key for key in progress.delivery.keys() if needs_bucket(self._needs, key)]  # noqa: SIM118
            progress.waiting = deque(needed[self.stream :: self.settings.streams])
            self._stalled = False
            self._end_if_done(progress)
        self._watch()

    def _woken(self) -> None:
        self._stalled = False
        self._watch()

    def _watch(self) -> None:
        if self._socket is None:
            return
        progress = self._progress
        sending = self._pause_cancel is None and (
            bool(self._notes)
            or (
                progress is not None
                and (progress.frame is not None or (bool(progress.waiting) and self._window_open(progress)))
                and not self._stalled
            )
        )
        self.loop.watch(self._socket, selectors.EVENT_READ | (selectors.EVENT_WRITE if sending else 0), self._ready)

    def _window_open(self, progress: _Progress) -> bool:
        assert self._carrier is not None
        window = self._carrier.window
        return window is None or len(progress.unacknowledged) < window

    def _ready(self, events: int) -> None:
        assert self._socket is not None
        try:
            if events & selectors.EVENT_READ:
                self._read(self._socket)
            if events & selectors.EVENT_WRITE and self._socket is not None:
                if self._progress is None:
                    self._send_notes(self._socket)
                    self._watch()
                else:
                    self._send_some(self._socket, self._progress)
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            self._fail(str(error))
        except Exception as error:
            # It ends this connection, not the loop that serves everybody.
            logger.exception("%s: a data connection failed", self.address)
            self._fail(repr(error))

    def _read(self, sock: socket.socket) -> None:
        assert self._carrier is not None
        try:
            data = sock.recv(4096)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("the actor closed the connection")
        if self._carrier.window is None:
            raise ProtocolError("the actor spoke on a data connection")
        self._incoming += data
        # A note may end the connection, and the carrier with it.
        while len(self._incoming) >= ACKNOWLEDGEMENT.size and self._carrier is not None:
            magic, attempt, rank, bucket = ACKNOWLEDGEMENT.unpack_from(self._incoming)
            if magic == NOTE_MAGIC and bucket <= MAXIMUM_REFERENCE_BYTES:
                end = ACKNOWLEDGEMENT.size + bucket
                if len(self._incoming) < end:
                    break
                note = bytes(self._incoming[ACKNOWLEDGEMENT.size : end])
                del self._incoming[:end]
                self._carrier.heard(note)
                continue
            del self._incoming[: ACKNOWLEDGEMENT.size]
            if magic != ACKNOWLEDGEMENT_MAGIC:
                raise ProtocolError("malformed acknowledgement")
            progress = self._progress
            if progress is None or attempt != progress.delivery.attempt:
                continue
            if (rank, bucket) not in progress.unacknowledged:
                raise ProtocolError(f"bucket {bucket} of rank {rank} is acknowledged without having been sent")
            progress.unacknowledged.remove((rank, bucket))
            self._carrier.acknowledged(progress.delivery, (rank, bucket))
            self._end_if_done(progress)
        self._watch()

    def _send_some(self, sock: socket.socket, progress: _Progress) -> None:
        slowest = faults.bytes_per_second(
            self._phase, version=progress.delivery.version, actor=self.actor, rank=self.settings.rank
        )
        allowance = max(1, slowest // THROTTLE_SLICES_PER_SECOND) if slowest else SEND_BYTES
        while allowance > 0:
            if progress.sent == 0:
                self._send_notes(sock)
            frame = progress.frame or self._next_frame(progress)
            if frame is None:
                self._end_if_done(progress)
                break
            header, payload = frame
            if progress.sent < len(header):
                parts = [header[progress.sent :], payload[:allowance]]
            else:
                start = progress.sent - len(header)
                parts = [payload[start : start + allowance]]
            count = sock.sendmsg(parts)
            progress.sent += count
            self._sent_bytes += count
            allowance -= count
            if progress.sent == len(header) + len(payload):
                progress.frame, progress.sent = None, 0
                if self._end_if_done(progress):
                    break
        if slowest:
            self._pause_cancel = self.loop.call_later(1 / THROTTLE_SLICES_PER_SECOND, self._resume).cancel
        self._watch()

    def _tell(self, note: bytes) -> None:
        header = BUCKET_HEADER.pack(BUCKET_MAGIC, 0, max(self.settings.rank, 0), 0, NOTE, len(note))
        self._notes.append(memoryview(header + note))
        self._watch()

    def _send_notes(self, sock: socket.socket) -> None:
        """Between two frames. Raises BlockingIOError with a part of a note left, which goes before anything else."""
        while self._notes:
            sent = sock.send(self._notes[0])
            if sent == len(self._notes[0]):
                self._notes.popleft()
            else:
                self._notes[0] = self._notes[0][sent:]

    def _resume(self) -> None:
        self._pause_cancel = None
        self._watch()

    def _end_if_done(self, progress: _Progress) -> bool:
        done = not progress.waiting and progress.frame is None and not progress.unacknowledged
        if done:
            self._end(None)
        return done

    @property
    def _phase(self) -> str:
        return "relay" if self.settings.role == "peer" else "send"

    def _next_frame(self, progress: _Progress) -> tuple[memoryview, memoryview] | None:
        assert self._carrier is not None and progress.waiting is not None
        if not progress.waiting or not self._window_open(progress):
            return None
        delivery, key = progress.delivery, progress.waiting[0]
        payload = self._carrier.payload(delivery, key)
        if payload is None:
            self._stalled = True
            return None
        progress.waiting.popleft()
        rank, bucket = key
        data = payload.data
        asked = faults.at(self._phase, version=delivery.version, actor=self.actor, rank=rank, bucket=bucket)
        if "corrupt" in asked:
            data = faults.damaged(data)
        if "drop" in asked:
            # As if the network had lost it: this bucket never arrives.
            return self._next_frame(progress)
        if self._carrier.window is not None:
            progress.unacknowledged.add(key)
        header = BUCKET_HEADER.pack(BUCKET_MAGIC, delivery.attempt, rank, bucket, payload.encoding, len(data))
        progress.frame = (memoryview(header), data)
        return progress.frame
