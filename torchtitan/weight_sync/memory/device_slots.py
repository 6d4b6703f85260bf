"""Slots as tensors: on the device for transports that read them there (nccl, ipc), else over shared memory.

For ipc on a GPU, slots are named by CUDA IPC handles, which actors on the same machine open. Only peers that have
proved their key get handles, and a received handle is checked field by field: nothing is unpickled. The actor verifies
its copy, so a slot may even be overwritten while it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchtitan.distributed import device
from torchtitan.distributed.checksum import memory_tensor
from torchtitan.distributed.device import in_background, use
from torchtitan.weight_sync.memory.slots import SharedSlots, SlotWords
from torchtitan.weight_sync.wire.runtime import Message, ProtocolError, field_of


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
    return {"gpu": uuid, "storage": [field.hex() if isinstance(field, bytes) else field for field in storage]}


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
        storage: list[Any] = []
        for place, kind in enumerate(_STORAGE):
            if kind is bytes:
                storage.append(bytes.fromhex(field_of(named, str(place), str)))
            else:
                storage.append(field_of(named, str(place), kind))
        return storage
    except ValueError as error:
        raise ProtocolError("a handle is not hexadecimal") from error
