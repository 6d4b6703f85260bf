"""nccl: buckets go through a communicator of their own, in small chunks (gloo takes NCCL's place on the CPU).

One communicator per connection, created when the connection is, used by one thread on each side. A chunk is launched
only when the receiver has posted its receive and said so over the connection (a credit): a peer that is frozen gives
none, so nothing that it could hold is on the sender's device. What was credited and still does not move is aborted
after `chunk_timeout_s`, which is the longest time that a peer can hold a device-wide call of the sender.
"""

from __future__ import annotations

import json
import logging
import queue
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from torchtitan.weight_sync.device_slots import memory_tensor, slots_device
from torchtitan.weight_sync.transports.base import Area, BucketKey, Delivery, Payload, ReceiveContext, SendContext
from torchtitan.weight_sync.transports.communicator import (
    Broken,
    Communicator,
    PairStore,
    Pending,
    backend_for,
    connect,
)
from torchtitan.weight_sync.wire import FULL, MAXIMUM_REFERENCE_BYTES, Message, ProtocolError

logger = logging.getLogger(__name__)

# Buckets that may wait for their acknowledgement, and chunks that a receiver posts: enough to hide verifying and notes.
WINDOW = 4
CHUNKS = 4
_LENGTH = struct.Struct("!Q")
_CREDIT, _ENTRY = b"C", b"S"


class _Meeting:
    """What both halves do to get a communicator: entries of a PairStore travel as notes."""

    def __init__(self, tell: Callable[[bytes], None], rank: int, where: torch.device, seconds: float):
        self._tell, self._rank, self._where = tell, rank, where
        self.store = PairStore(self._entry, seconds)

    def _entry(self, key: str, value: bytes) -> None:
        note = _ENTRY + json.dumps([key, value.hex()]).encode()
        if len(note) > MAXIMUM_REFERENCE_BYTES:
            raise Broken(f"an entry of {len(value)} bytes is too long")
        self._tell(note)

    def heard(self, note: bytes) -> None:
        """Raises ProtocolError."""
        try:
            key, value = json.loads(note[1:])
            self.store.heard(str(key), bytes.fromhex(value))
        except (ValueError, TypeError) as error:
            raise ProtocolError(f"malformed entry: {error}") from error

    def communicator(self) -> Communicator:
        """Blocks until the other half is there. Raises Broken."""
        return connect(self.store, self._rank, self._where)


class _Bucket(NamedTuple):
    """To be sent."""

    delivery: Delivery
    memory: torch.Tensor


class _End(NamedTuple):
    """A delivery is over; everything before it in the queue has been dealt with."""

    released: Callable[[], None]


class CollectiveSendCarrier:
    """Rank 0 of the pair."""

    window: int | None = WINDOW

    def __init__(self, context: SendContext):
        self._context = context
        self._chunk_bytes, self._timeout_s = context.options["chunk_bytes"], context.options["chunk_timeout_s"]
        self._where: torch.device = slots_device(context.options["slots"])
        self._meeting = _Meeting(context.tell, 0, self._where, context.options["connect_timeout_s"])
        self._work: queue.SimpleQueue[_Bucket | _End | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._credits = 0
        self._over: Delivery | None = None
        self._ready = self._closed = False
        self._thread: threading.Thread | None = None
        self._communicator: Communicator | None = None

    def hello(self) -> Message:
        return {
            "backend": backend_for(self._where),
            "chunk_bytes": self._chunk_bytes,
            "chunk_timeout_s": self._timeout_s,
            "connect_timeout_s": self._context.options["connect_timeout_s"],
        }

    def connected(self, welcome: Message) -> None:
        name = f"weight-chunks-{self._context.actor}-{self._context.worker}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def heard(self, note: bytes) -> None:
        """Notes of the receiver's half."""
        if note == _CREDIT:
            with self._changed:
                self._credits += 1
                self._changed.notify_all()
        elif note.startswith(_ENTRY):
            self._meeting.heard(note)
        else:
            raise ProtocolError("not a note of this transport")

    def payload(self, delivery: Delivery, key: BucketKey) -> Payload | None:
        if not self._ready:
            return None
        memory = memory_tensor(delivery.bucket(key))
        self._work.put(_Bucket(delivery, memory))
        return Payload(FULL, memoryview(_LENGTH.pack(len(memory))))

    def acknowledged(self, delivery: Delivery, key: BucketKey) -> None:
        """The chunks are gone already; nothing is kept for them."""

    def end(self, delivery: Delivery, released: Callable[[], None]) -> None:
        with self._changed:
            self._over = delivery
            self._changed.notify_all()
        if self._thread is None:
            released()
        else:
            self._work.put(_End(released))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._meeting.store.close()
        if self._communicator is not None:
            self._communicator.give_up()
        self._work.put(None)

    # The carrier's thread

    def _run(self) -> None:
        try:
            self._send_all()
            return
        except Broken as error:
            reason = str(error)
        except Exception as error:
            logger.exception("sending to %s failed", self._context.actor)
            reason = repr(error)
        self._context.fail(f"communicator with {self._context.actor}: {reason}")
        # What is delivered ends by that, and its memory is not touched any more.
        for item in self._items():
            if isinstance(item, _End):
                item.released()

    def _send_all(self) -> None:
        communicator = self._communicator = self._meeting.communicator()
        try:
            self._first_chunk(communicator)
            self._ready = True
            self._context.wake()
            for item in self._items():
                if isinstance(item, _Bucket):
                    self._send(communicator, item.delivery, item.memory)
                else:
                    item.released()
        finally:
            communicator.abort()

    def _items(self) -> Iterator[_Bucket | _End]:
        while (item := self._work.get()) is not None:
            yield item

    def _first_chunk(self, communicator: Communicator) -> None:
        # Whatever a communicator makes at its first use is made now, not in a transfer.
        if self._credit(None):
            communicator.send(torch.zeros(1, dtype=torch.uint8, device=self._where)).wait(self._timeout_s)

    def _send(self, communicator: Communicator, delivery: Delivery, memory: torch.Tensor) -> None:
        under_way: deque[Pending] = deque()
        for chunk in memory.split(self._chunk_bytes):
            # Whoever waits for credits has nothing under way that could be stuck.
            while under_way and self._credits == 0:
                under_way.popleft().wait(self._timeout_s)
            if not self._credit(delivery):
                break
            under_way.append(communicator.send(chunk))
        for pending in under_way:
            pending.wait(self._timeout_s)

    def _credit(self, delivery: Delivery | None) -> bool:
        """Wait for a posted receive. False when nobody wants the bytes any more.

        Without a deadline, since it holds nothing on the device: whoever runs the transport judges progress, and ends
        the delivery or the connection.
        """

        def over() -> bool:
            return self._closed or (delivery is not None and self._over is delivery)

        with self._changed:
            self._changed.wait_for(lambda: self._credits > 0 or over())
            if over():
                return False
            self._credits -= 1
            return True


class CollectiveReceiveCarrier:
    """Rank 1 of the pair."""

    inline = False
    acknowledges = True

    def __init__(self, context: ReceiveContext):
        hello = context.hello
        try:
            self._chunk_bytes = int(hello["chunk_bytes"])
            self._timeout_s, seconds = float(hello["chunk_timeout_s"]), float(hello["connect_timeout_s"])
            backend = str(hello["backend"])
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"malformed hello of a communicator: {error!r}") from error
        self._where = torch.device(context.where)
        if self._chunk_bytes < 1 or not 0 < self._timeout_s < 3600 or not 0 < seconds < 3600:
            raise ProtocolError("a communicator's figures make no sense")
        if backend != backend_for(self._where):
            raise ProtocolError(f"the sender uses {backend}, this actor's staging memory is on {self._where}")
        self._context = context
        self._meeting = _Meeting(context.tell, 1, self._where, seconds)
        self._work: queue.SimpleQueue[tuple[bytes, torch.Tensor, Callable[[str | None], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._communicator: Communicator | None = None
        self._closed = False

    def welcome(self) -> Message:
        return {}

    def heard(self, note: bytes) -> None:
        """Notes of the sender's half."""
        if not note.startswith(_ENTRY):
            raise ProtocolError("not a note of this transport")
        self._meeting.heard(note)
        if self._thread is None:
            # Not earlier: now the connection carries notes in both directions.
            self._thread = threading.Thread(target=self._run, name=f"weight-chunks-{self._context.rank}", daemon=True)
            self._thread.start()

    def fetch(self, reference: bytes, target: Area, done: Callable[[str | None], None]) -> None:
        self._work.put((reference, memory_tensor(target), done))

    def close(self) -> None:
        self._closed = True
        self._meeting.store.close()
        if self._communicator is not None:
            self._communicator.give_up()
        self._work.put(None)
        if self._thread is None:
            self._refuse_rest("the connection is over")

    # The carrier's thread

    def _run(self) -> None:
        try:
            self._receive_all()
            return
        except Broken as error:
            reason = str(error)
        except Exception as error:
            logger.exception("receiving from rank %d failed", self._context.rank)
            reason = repr(error)
        # The sender finds its end broken, or gets no credit: both end this connection.
        self._refuse_rest(reason)

    def _receive_all(self) -> None:
        communicator = self._communicator = self._meeting.communicator()
        try:
            self._receive(communicator, torch.zeros(1, dtype=torch.uint8, device=self._where))
            for order in iter(self._work.get, None):
                self._fetch(communicator, *order)
        finally:
            communicator.abort()

    def _fetch(
        self, communicator: Communicator, reference: bytes, target: torch.Tensor, done: Callable[[str | None], None]
    ) -> None:
        try:
            if self._closed:
                raise Broken("the connection is over")
            if len(reference) != _LENGTH.size or _LENGTH.unpack(reference) != (len(target),):
                raise Broken("a bucket of another size was announced")
            self._receive(communicator, target)
        except Exception as error:
            try:
                communicator.abort()  # before it nobody may say that the target is not written any more
            finally:
                done(str(error) if isinstance(error, Broken) else repr(error))
            raise
        done(None)

    def _receive(self, communicator: Communicator, target: torch.Tensor) -> None:
        posted: deque[Pending] = deque()
        for chunk in target.split(self._chunk_bytes):
            if len(posted) == CHUNKS:
                posted.popleft().wait(self._timeout_s)
            posted.append(communicator.receive(chunk))
            self._context.tell(_CREDIT)
        for pending in posted:
            pending.wait(self._timeout_s)

    def _refuse_rest(self, reason: str) -> None:
        for _reference, _target, done in iter(self._work.get, None):
            done(reason)
