"""The receiving end of one sender rank's connection: bucket frames straight into staging memory."""

from __future__ import annotations

import selectors
import socket
from typing import Protocol

from torchtitan.weight_sync.event_loop import EventLoop
from torchtitan.weight_sync.wire import BUCKET_HEADER, BUCKET_MAGIC, ProtocolError

# One connection gives the loop back after this much, so that other ranks and the control connection are served too.
READ_BYTES = 4 << 20


class BucketSink(Protocol):
    """Who decides where a frame goes."""

    def place(self, attempt: int, rank: int, bucket: int, length: int) -> memoryview | None:
        """Memory of exactly `length` bytes, None to drop the frame, or ProtocolError to close the connection."""

    def arrived(self, attempt: int, rank: int, bucket: int) -> None:
        """The whole frame is in the memory that place() gave."""

    def lost(self, stream: BucketStream, reason: str) -> None:
        """The connection is over."""


class BucketStream:
    """Reads frames without blocking."""

    def __init__(self, loop: EventLoop, sock: socket.socket, rank: int, sink: BucketSink):
        self.loop, self.socket, self.rank, self.sink = loop, sock, rank, sink
        self.closed = False
        self.received_bytes = 0
        self.frame_attempt: int | None = None
        self._bucket = 0
        self._header = memoryview(bytearray(BUCKET_HEADER.size))
        self._header_fill = 0
        self._target: memoryview | None = None
        self._fill = 0
        self._length = 0
        self._scratch: memoryview | None = None
        loop.watch(sock, selectors.EVENT_READ, self._ready)

    def close(self, reason: str) -> None:
        """Close and tell the sink, once."""
        if self.closed:
            return
        self.closed = True
        self.loop.forget(self.socket)
        self.socket.close()
        self._target = None
        self.sink.lost(self, reason)

    def drop_frame(self) -> None:
        """What is left of the current frame must not be stored."""
        self._target = None

    def _ready(self, _events: int) -> None:
        budget = READ_BYTES
        try:
            while budget > 0 and not self.closed:
                budget -= self._read_some(budget)
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            self.close(str(error))

    def _read_some(self, budget: int) -> int:
        if self.frame_attempt is None:
            count = self._receive(self._header[self._header_fill :])
            self._header_fill += count
            if self._header_fill == BUCKET_HEADER.size:
                self._begin_frame()
            return max(count, 1)
        left = min(budget, self._length - self._fill)
        if self._target is not None:
            count = self._receive(self._target[self._fill : self._fill + left])
            self.received_bytes += count
        else:
            count = self._receive(self._dump()[:left])
        self._fill += count
        if self._fill == self._length:
            self._end_frame()
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
        magic, attempt, rank, bucket, length = BUCKET_HEADER.unpack(self._header)
        if magic != BUCKET_MAGIC or rank != self.rank or length == 0:
            raise ProtocolError("malformed bucket header")
        self._header_fill = 0
        self.frame_attempt, self._bucket, self._length, self._fill = attempt, bucket, length, 0
        self._target = self.sink.place(attempt, rank, bucket, length)

    def _end_frame(self) -> None:
        attempt, stored = self.frame_attempt, self._target is not None
        self.frame_attempt, self._target = None, None
        if stored and attempt is not None:
            self.sink.arrived(attempt, self.rank, self._bucket)
