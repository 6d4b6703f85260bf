"""ipc: the receiver reads the sender's slots where they are: CUDA IPC on a GPU, a mapped file in its place on the CPU.

A frame's payload names the memory of a slot and the bucket's place in it. The receiver opens each memory once, copies
from it into its staging memory and verifies the copy, so it does not matter to it what becomes of the slot afterwards.
Handles go only to who knows the job's token (never into the hello, which is said before that is sure), and what comes
back is looked at field by field: nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy
import torch

from torchtitan.distributed.device import finish_background, in_background
from torchtitan.weight_sync.device_slots import DeviceSlots, Slots, memory_tensor
from torchtitan.weight_sync.slots import SharedSlots
from torchtitan.weight_sync.transports.base import (
    Area,
    BucketKey,
    Delivery,
    Payload,
    ReceiveContext,
    SendContext,
)
from torchtitan.weight_sync.wire import FULL, MAXIMUM_REFERENCE_BYTES, Message, ProtocolError

logger = logging.getLogger(__name__)

# Buckets that may wait for their acknowledgement: enough for the copy of one to hide the verifying of another.
WINDOW = 4
# Sizes, offsets, inodes: what fits the system's own unsigned type.
MAXIMUM_NUMBER = 2**64 - 1


class SharedMemorySendCarrier:
    """Points into this rank's slots. options: "slots"."""

    window: int | None = WINDOW

    def __init__(self, context: SendContext):
        slots: Slots = context.options["slots"]
        self._exports = _FileExports(slots) if isinstance(slots, SharedSlots) else _cuda_exports(slots)

    def hello(self) -> Message:
        return {}

    def connected(self, welcome: Message) -> None:
        """There is nothing to agree on."""

    def payload(self, delivery: Delivery, key: BucketKey) -> Payload | None:
        memory, offset = self._exports.find(memory_tensor(delivery.bucket(key)))
        data = json.dumps({"memory": memory, "offset": offset}).encode()
        assert len(data) <= MAXIMUM_REFERENCE_BYTES
        return Payload(FULL, memoryview(data))

    def acknowledged(self, delivery: Delivery, key: BucketKey) -> None:
        """Nothing is kept for a bucket."""

    def end(self, delivery: Delivery, released: Callable[[], None]) -> None:
        # A receiver that is still copying only reads; it will find that the bytes are not those that were promised.
        released()

    def heard(self, note: bytes) -> None:
        """Receivers have nothing to say but acknowledgements."""
        raise ProtocolError("not a note of this transport")

    def close(self) -> None:
        """The memory is the slots'."""


class _Order(NamedTuple):
    reference: bytes
    target: Area
    done: Callable[[str | None], None]


class SharedMemoryReceiveCarrier:
    """Opens memory that is named to it, and copies in a thread of its own."""

    inline = False
    acknowledges = True

    def __init__(self, context: ReceiveContext):
        self._opened: dict[str, _Memory] = {}
        self._closed = False
        self._work: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        name = f"weight-copies-{context.rank}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def welcome(self) -> Message:
        return {}

    def heard(self, note: bytes) -> None:
        """Senders have nothing to say but references."""
        raise ProtocolError("not a note of this transport")

    def fetch(self, reference: bytes, target: Area, done: Callable[[str | None], None]) -> None:
        self._work.put(_Order(reference, target, done))

    def close(self) -> None:
        self._closed = True
        self._work.put(None)

    # The carrier's thread

    def _run(self) -> None:
        over = False
        while not over:
            # What is there is launched in one go: a device is faster than one answer after the other.
            orders = [self._work.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    orders.append(self._work.get_nowait())
            over = None in orders
            self._copy_all([order for order in orders if order is not None])
        self._opened.clear()

    def _copy_all(self, orders: list[_Order]) -> None:
        errors = [self._copy(order) for order in orders]
        broken = None
        try:
            for memory in self._opened.values():
                memory.finish()
        except Exception as failure:
            # Whatever it is: the orders are answered, and the thread serves the next ones.
            logger.exception("copying from a sender's memory failed")
            broken = f"a copy has failed: {failure!r}"
        for order, error in zip(orders, errors, strict=True):
            order.done(error or broken)

    def _copy(self, order: _Order) -> str | None:
        if self._closed:
            return "the connection is over"
        try:
            self._launch(order.reference, order.target)
        except Exception as failure:
            # Numbers of another process go into system calls and torch: what they raise is not for us to list.
            return f"cannot read the sender's memory: {failure!r}"
        return None

    def _launch(self, reference: bytes, target: Area) -> None:
        try:
            fields = json.loads(reference)
            memory, offset = fields["memory"], fields["offset"]
        except (ValueError, TypeError, KeyError) as error:
            raise ProtocolError(f"malformed reference: {error!r}") from error
        name = json.dumps(memory, sort_keys=True)
        if name not in self._opened:
            self._opened[name] = _open(memory)
        if type(offset) is not int or not 0 <= offset <= self._opened[name].length - len(target):
            raise ProtocolError(f"a bucket of {len(target)} bytes at {offset!r} lies outside of the memory")
        self._opened[name].read(offset, target)


class _Exports(Protocol):
    """Names the memory of slots to other processes."""

    def find(self, bucket: torch.Tensor) -> tuple[Message, int]:
        """(what opens the memory that a bucket lies in, its offset there)."""


class _Memory(Protocol):
    """Memory of another process."""

    length: int

    def read(self, offset: int, target: Area) -> None:
        """Begin to copy."""

    def finish(self) -> None:
        """Block until what was begun is done."""


def _open(fields: Any) -> _Memory:
    """Raises ProtocolError for what is no handle, and whatever the system raises for one that does not open."""
    if not isinstance(fields, dict) or fields.get("kind") not in ("file", "cuda"):
        raise ProtocolError("unknown kind of memory")
    return _FileMemory(fields) if fields["kind"] == "file" else _CudaMemory(fields)


def _field(fields: Message, name: str, kind: type) -> Any:
    value = fields.get(name)
    if type(value) is not kind or (isinstance(value, int) and not 0 <= value <= MAXIMUM_NUMBER):
        raise ProtocolError(f"a memory needs field {name!r} of type {kind.__name__}")
    return value


# On the CPU: the slots' unnamed file, opened through the sender's entry in /proc


class _FileExports:
    def __init__(self, slots: SharedSlots):
        status = os.fstat(slots.data_fd)
        self._base = torch.frombuffer(slots.map, dtype=torch.uint8).data_ptr()
        self._fields: Message = {
            "kind": "file",
            "process": os.getpid(),
            "descriptor": slots.data_fd,
            "device": status.st_dev,
            "inode": status.st_ino,
        }

    def find(self, bucket: torch.Tensor) -> tuple[Message, int]:
        return self._fields, bucket.data_ptr() - self._base


class _FileMemory:
    def __init__(self, fields: Message):
        process, descriptor = _field(fields, "process", int), _field(fields, "descriptor", int)
        opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(opened)
            # Numbers of processes and descriptors are used again: it must still be the file that was meant.
            meant = (_field(fields, "device", int), _field(fields, "inode", int), os.geteuid())
            if (status.st_dev, status.st_ino, status.st_uid) != meant:
                raise ProtocolError("the sender's slots are not there any more, or another user's")
            self._map = mmap.mmap(opened, status.st_size, prot=mmap.PROT_READ)
        finally:
            os.close(opened)
        self.length = len(self._map)
        self._bytes = numpy.frombuffer(self._map, numpy.uint8)

    def read(self, offset: int, target: Area) -> None:
        if not isinstance(target, memoryview):
            raise ProtocolError("the sender's slots are in host memory, this actor's staging memory is not")
        numpy.copyto(memory_tensor(target).numpy(), self._bytes[offset : offset + len(target)])

    def finish(self) -> None:
        """Copies of the CPU are done when they return."""


# On a GPU: CUDA IPC


def _cuda_exports(slots: DeviceSlots) -> _CudaExports:
    # Once for all receivers: every export of a tensor adds to what torch keeps for it.
    if slots.exports is None:
        uuid = str(torch.cuda.get_device_properties(slots.device).uuid)
        slots.exports = [_exported(tensor, uuid) for tensor in slots.tensors]
    return _CudaExports(slots.tensors, slots.exports)


class _CudaExports:
    def __init__(self, tensors: list[torch.Tensor], fields: list[Message]):
        self._tensors, self._fields = tensors, fields

    def find(self, bucket: torch.Tensor) -> tuple[Message, int]:
        for tensor, fields in zip(self._tensors, self._fields, strict=True):
            offset = bucket.data_ptr() - tensor.data_ptr()
            if 0 <= offset < len(tensor):
                return fields, offset
        raise AssertionError("a bucket that is in no slot")


def _exported(tensor: torch.Tensor, uuid: str) -> Message:
    _, handle, length, offset, counter, counter_offset, event, event_needed = tensor.untyped_storage()._share_cuda_()
    return {
        "kind": "cuda",
        "gpu": uuid,
        "handle": handle.hex(),
        "length": length,
        "offset": offset,
        "counter": counter.hex(),
        "counter_offset": counter_offset,
        "event": event.hex(),
        "event_needed": event_needed,
    }


class _CudaMemory:
    def __init__(self, fields: Message):
        gpu = _field(fields, "gpu", str)
        visible = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
        if gpu not in visible:
            raise ProtocolError(f"the sender's memory is on GPU {gpu}, which this process does not see")
        self._where = torch.device("cuda", visible.index(gpu))
        self.length = _field(fields, "length", int)
        torch.cuda.init()
        with torch.cuda.device(self._where):
            storage = torch.UntypedStorage._new_shared_cuda(
                self._where.index,
                _bytes(fields, "handle"),
                self.length,
                _field(fields, "offset", int),
                _bytes(fields, "counter"),
                _field(fields, "counter_offset", int),
                _bytes(fields, "event"),
                _field(fields, "event_needed", bool),
            )
        self._tensor = torch.empty(0, dtype=torch.uint8, device=self._where).set_(storage)

    def read(self, offset: int, target: Area) -> None:
        with in_background(self._where):
            memory_tensor(target).copy_(self._tensor[offset : offset + len(target)], non_blocking=True)

    def finish(self) -> None:
        with in_background(self._where):
            finish_background(self._where)


def _bytes(fields: Message, name: str) -> bytes:
    try:
        return bytes.fromhex(_field(fields, name, str))
    except ValueError as error:
        raise ProtocolError(f"{name} is not hexadecimal") from error
