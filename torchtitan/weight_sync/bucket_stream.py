"""The receiving end of one data connection: reads frames without blocking, and answers where the transport does."""

from __future__ import annotations

import logging
import selectors
import socket
from collections import deque
from typing import NamedTuple, Protocol

from torchtitan.weight_sync.event_loop import EventLoop
from torchtitan.weight_sync.transports.base import ReceiveCarrier
from torchtitan.weight_sync.wire import (
    ACKNOWLEDGEMENT,
    ACKNOWLEDGEMENT_MAGIC,
    BUCKET_HEADER,
    BUCKET_MAGIC,
    MAXIMUM_REFERENCE_BYTES,
    NOTE,
    NOTE_MAGIC,
    ProtocolError,
)

logger = logging.getLogger(__name__)

# One connection gives the loop back after this much, so that other ranks and the control connection are served too.
READ_BYTES = 8 << 20
# So much at a time is read and looked at while it is still in a core's cache.
PIECE_BYTES = 256 << 10
# A peer sends buckets of all ranks.
ANY_RANK = -1


class Frame(NamedTuple):
    """A bucket's header. `length`: bytes of the payload."""

    attempt: int
    rank: int
    bucket: int
    encoding: int
    length: int

    @property
    def key(self) -> tuple[int, int]:
        return self.rank, self.bucket


class BucketSink(Protocol):
    """Who decides where a frame goes."""

    def place(self, stream: BucketStream, frame: Frame) -> memoryview | None:
        """Memory of exactly `frame.length` bytes, None to drop the frame, or ProtocolError to close the connection."""

    def moved(self, frame: Frame, piece: memoryview) -> None:
        """The next piece is in the memory that place() gave."""

    def arrived(self, stream: BucketStream, frame: Frame, payload: memoryview) -> None:
        """The whole frame is in the memory that place() gave. May raise what place() may."""

    def lost(self, stream: BucketStream, reason: str) -> None:
        """The connection is over."""


class BucketStream:
    """Reads frames of `rank` (or ANY_RANK) and gives them to `sink`."""

    def __init__(
        self,
        loop: EventLoop,
        sock: socket.socket,
        rank: int,
        carrier: ReceiveCarrier,
        sink: BucketSink,
    ):
        self.loop, self.socket, self.rank, self.carrier, self.sink = loop, sock, rank, carrier, sink
        self.closed = False
        self.frame: Frame | None = None
        self._header = memoryview(bytearray(BUCKET_HEADER.size))
        self._header_fill = 0
        self._target: memoryview | None = None
        self._fill = 0
        self._scratch: memoryview | None = None
        self._answers: deque[memoryview] = deque()
        loop.watch(sock, selectors.EVENT_READ, self._ready)

    def close(self, reason: str) -> None:
        """Close and tell the sink, once."""
        if self.closed:
            return
        self.closed = True
        self.loop.forget(self.socket)
        self.socket.close()
        self._target = None
        self._answers.clear()
        self.carrier.close()
        self.sink.lost(self, reason)

    def acknowledge(self, frame: Frame) -> None:
        """Tell the sender that this bucket is verified."""
        self._answer(ACKNOWLEDGEMENT.pack(ACKNOWLEDGEMENT_MAGIC, frame.attempt, frame.rank, frame.bucket))

    def tell(self, note: bytes) -> None:
        """Send a note to the carrier's other half."""
        self._answer(ACKNOWLEDGEMENT.pack(NOTE_MAGIC, 0, 0, len(note)) + note)

    def _answer(self, data: bytes) -> None:
        if not self.closed:
            self._answers.append(memoryview(data))
            try:
                self._flush()
            except OSError as error:
                self.close(str(error))

    def _flush(self) -> None:
        try:
            while self._answers:
                sent = self.socket.send(self._answers[0])
                if sent == len(self._answers[0]):
                    self._answers.popleft()
                else:
                    self._answers[0] = self._answers[0][sent:]
        except BlockingIOError:
            pass
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._answers else 0)
        self.loop.watch(self.socket, events, self._ready)

    def _ready(self, events: int) -> None:
        budget = READ_BYTES
        try:
            if events & selectors.EVENT_WRITE:
                self._flush()
            while budget > 0 and not self.closed:
                budget -= self._read_some(budget)
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            self.close(str(error))
        except Exception as error:
            # It ends this connection, not the loop that serves everybody.
            logger.exception("a data connection failed")
            self.close(repr(error))

    def _read_some(self, budget: int) -> int:
        if self.frame is None:
            count = self._receive(self._header[self._header_fill :])
            self._header_fill += count
            if self._header_fill == BUCKET_HEADER.size:
                self._begin_frame()
            return max(count, 1)
        frame = self.frame
        left = min(budget, frame.length - self._fill, PIECE_BYTES)
        if self._target is not None:
            count = self._receive(self._target[self._fill : self._fill + left])
            if frame.encoding != NOTE:
                self.sink.moved(frame, self._target[self._fill : self._fill + count])
        else:
            count = self._receive(self._dump()[:left])
        self._fill += count
        if self._fill == frame.length:
            self._end_frame(frame)
        return count

    def _dump(self) -> memoryview:
        if self._scratch is None:
            self._scratch = memoryview(bytearray(1 << 16))
        return self._scratch

    def _receive(self, target: memoryview) -> int:
        count = self.socket.recv_into(target)
        if count == 0:
            raise ConnectionResetError("the sender closed the connection")
        return count

    def _begin_frame(self) -> None:
        magic, *fields = BUCKET_HEADER.unpack(self._header)
        frame = Frame(*fields)
        if magic != BUCKET_MAGIC or frame.length == 0:
            raise ProtocolError("malformed bucket header")
        self._header_fill = self._fill = 0
        self.frame = frame
        if frame.encoding == NOTE:
            if frame.length > MAXIMUM_REFERENCE_BYTES:
                raise ProtocolError("a note is too long")
            self._target = memoryview(bytearray(frame.length))
        elif self.rank not in (ANY_RANK, frame.rank):
            raise ProtocolError(f"a bucket of rank {frame.rank} came from rank {self.rank}")
        else:
            self._target = self.sink.place(self, frame)

    def _end_frame(self, frame: Frame) -> None:
        target, self._target = self._target, None
        if target is not None and frame.encoding == NOTE:
            self.carrier.heard(bytes(target))
        elif target is not None:
            self.sink.arrived(self, frame, target)
        self.frame = None
