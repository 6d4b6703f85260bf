"""Slots as tensors: on the device for transports that read them there (nccl, ipc), else over shared memory.

For ipc on a GPU, slots are named by CUDA IPC handles, which actors on the same machine open. Only peers that have
proved their key get handles, and a received handle is checked field by field: nothing is unpickled. The actor verifies
its copy, so a slot may even be overwritten while it is read.

Their checksum is of kind "sum", a reduction that is cheap on a GPU and gives the same result on every device. Over the
bytes as 32-bit words w[i] (the last one padded with zeros), it is the sum of w[i] and the sum of w[i] * (2i + 1), both
modulo 2^64. These are integers, so the order of additions does not matter. A flipped bit changes the second sum by an
odd multiple of a power of two below 2^32. Two different words that swap places change it by the product of their
difference (below 2^32) and twice their distance (below 2^32), which is not divisible by 2^64; the same holds for
swapped halves of words. It detects accidents; authentication guards against dishonest peers.
"""

from __future__ import annotations

from collections.abc import Callable
from mmap import mmap
from typing import Any

import numpy
import torch

from torchtitan.distributed import device
from torchtitan.distributed.device import in_background, use
from torchtitan.weight_sync.memory.slots import SharedSlots, SlotWords
from torchtitan.weight_sync.wire.runtime import Message, ProtocolError, field_of

_WORD_BYTES = 4
# All rows share one row of weights, and this many rows fit a cache (the fastest on a CPU: 1.7 GB/s per core).
_ROW_WORDS = 1 << 14
_ROWS_AT_A_TIME = 64


class DeviceSlots(SlotWords):
    """Slots in a device's memory; their shard server must be a thread of this process."""

    def __init__(self, words_fd: int, tensors: list[torch.Tensor]):
        super().__init__(words_fd, len(tensors), len(tensors[0]))
        self.tensors = tensors
        self.exports: list[Message] | None = None
        """References to each tensor's memory for other processes, once a transport has asked for them (ipc)"""

    def slot(self, index: int) -> torch.Tensor:
        """Return a slot's bytes, one-dimensional."""
        return self.tensors[index]


Slots = SharedSlots | DeviceSlots


def create_slots(count: int, slot_bytes: int, where: torch.device, on_device: bool) -> Slots:
    """Create slots that are all free and zero. where: the parameters' device; on a CPU, processes share the memory."""
    if not on_device or where.type != "cuda":
        return SharedSlots.create(count, slot_bytes)
    tensors = [torch.zeros(slot_bytes, dtype=torch.uint8, device=where) for _ in range(count)]
    return DeviceSlots(SlotWords.new_file(count), tensors)


def memory_tensor(memory: bytes | bytearray | memoryview | mmap | torch.Tensor) -> torch.Tensor:
    """Return a one-dimensional uint8 tensor over memory. Read-only memory is copied, because torch warns of it."""
    if isinstance(memory, torch.Tensor):
        return memory
    if memoryview(memory).readonly:
        memory = bytearray(memory)
    return torch.from_numpy(numpy.frombuffer(memory, numpy.uint8))


def slot_tensors(slots: Slots) -> list[torch.Tensor]:
    """Return each slot as a one-dimensional uint8 tensor."""
    if isinstance(slots, DeviceSlots):
        return slots.tensors
    return [memory_tensor(slots.slot(index)) for index in range(slots.count)]


def pin(slots: Slots) -> None:
    """Pin slots in host memory for asynchronous copies by the device. Raises UserError if that fails."""
    if isinstance(slots, SharedSlots):
        device.pin_host_memory(memory_tensor(slots.map).data_ptr(), len(slots.map))


def unpin(slots: Slots) -> None:
    """Undo pin(), before the slots' memory is released."""
    if isinstance(slots, SharedSlots):
        device.unpin_host_memory(memory_tensor(slots.map).data_ptr())


def sum_checksum(data: bytes | bytearray | memoryview | torch.Tensor) -> str:
    """Return the checksum as 32 hexadecimal digits. data: host memory or a one-dimensional uint8 tensor on any
    device."""
    tensor = memory_tensor(data)
    with in_background(tensor.device):
        words = _words(tensor)
        whole = len(words) // _ROW_WORDS * _ROW_WORDS
        weights = 2 * torch.arange(_ROW_WORDS, dtype=torch.int64, device=tensor.device) + 1
        parts = [*words[:whole].view(-1, _ROW_WORDS).split(_ROWS_AT_A_TIME), words[whole:].view(1, -1)]
        sums = torch.cat([_row_sums(part, weights) for part in parts], 1).cpu()
    plain, weighted = (numpy.asarray(row, dtype=numpy.uint64) for row in sums.numpy().view(numpy.uint64))
    # Row r starts at word r * _ROW_WORDS, so its weights are larger by twice that.
    starts = 2 * _ROW_WORDS * numpy.arange(len(plain), dtype=numpy.uint64)
    total = (weighted + starts * plain).sum(dtype=numpy.uint64)
    return f"{int(plain.sum(dtype=numpy.uint64)):016x}{int(total):016x}"


def _words(data: torch.Tensor) -> torch.Tensor:
    if len(data) % _WORD_BYTES or data.storage_offset() % _WORD_BYTES or data.data_ptr() % _WORD_BYTES:
        padded = torch.zeros(-(-len(data) // _WORD_BYTES) * _WORD_BYTES, dtype=torch.uint8, device=data.device)
        padded[: len(data)] = data
        data = padded
    return data.view(torch.int32)


def _row_sums(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return [2, rows] int64: plain sums, and sums weighted by 2 * column + 1."""
    return torch.stack((rows.sum(1, dtype=torch.int64), (rows * weights[: rows.shape[1]]).sum(1)))


def device_references(slots: DeviceSlots) -> Callable[[int, int, int], Message]:
    """Return a function (slot, start, end) that makes the reference to these bytes of a slot, for other processes."""
    # Exported once for all actors and restarts, because torch keeps state for every export of a tensor.
    if slots.exports is None:
        uuid = str(torch.cuda.get_device_properties(slots.tensors[0].device).uuid)
        slots.exports = [_exported(tensor, uuid) for tensor in slots.tensors]
    exports = slots.exports
    return lambda slot, start, _end: {"memory": exports[slot], "offset": start}


# The fields after the device of a storage that another process opens: handle, length, offset, counter, counter offset,
# event, whether the event is needed. Bytes are sent in hexadecimal.
_STORAGE = (bytes, int, int, bytes, int, bytes, bool)


def _exported(tensor: torch.Tensor, uuid: str) -> Message:
    _device, *storage = tensor.untyped_storage()._share_cuda_()
    return {"gpu": uuid, "storage": [one.hex() if isinstance(one, bytes) else one for one in storage]}


def open_device_memory(fields: Message) -> torch.Tensor:
    """Open a slot that another process has named. Raises ProtocolError for an invalid name, and whatever torch raises
    for a handle that it cannot open."""
    gpu = field_of(fields, "gpu", str)
    visible = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if gpu not in visible:
        raise ProtocolError(f"the trainer's slots are on GPU {gpu}, which this process does not see")
    where = torch.device("cuda", visible.index(gpu))
    use(where)
    storage = torch.UntypedStorage._new_shared_cuda(where.index, *_read_storage(field_of(fields, "storage", list)))
    return torch.empty(0, dtype=torch.uint8, device=where).set_(storage)


def copy_from_device(memory: torch.Tensor, target: memoryview | torch.Tensor) -> None:
    """Fill `target` with device memory, beside the device's other work. Returns when it is filled."""
    with in_background(memory.device):
        memory_tensor(target).copy_(memory, non_blocking=True)
        device.finish_background(memory.device)


def _read_storage(fields: list[Any]) -> list[Any]:
    try:
        named = {str(place): field for place, field in enumerate(fields)}
        found = [field_of(named, str(place), str if kind is bytes else kind) for place, kind in enumerate(_STORAGE)]
        return [bytes.fromhex(one) if kind is bytes else one for one, kind in zip(found, _STORAGE, strict=True)]
    except ValueError as error:
        raise ProtocolError("a handle is not hexadecimal") from error
