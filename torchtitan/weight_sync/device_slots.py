"""Slots as tensors: on the device for transports that read them there (nccl, ipc), else over shared memory."""

from __future__ import annotations

import numpy
import torch

from torchtitan.distributed import device
from torchtitan.weight_sync.slots import SharedSlots, SlotWords
from torchtitan.weight_sync.wire import Message


class DeviceSlots(SlotWords):
    """Slots in a device's memory; only a thread of this process can read them."""

    def __init__(self, words_fd: int, tensors: list[torch.Tensor]):
        super().__init__(words_fd, len(tensors), len(tensors[0]))
        self.tensors = tensors
        self.exports: list[Message] | None = None
        """What names each tensor's memory to other processes, once a transport has asked for it (ipc)"""

    @classmethod
    def create(cls, count: int, slot_bytes: int, where: torch.device) -> DeviceSlots:
        """New slots, all free and zero."""
        tensors = [torch.zeros(slot_bytes, dtype=torch.uint8, device=where) for _ in range(count)]
        return cls(cls.new_file(count), tensors)

    @property
    def device(self) -> torch.device:
        """Where the slots are."""
        return self.tensors[0].device

    def slot(self, index: int) -> torch.Tensor:
        """A slot's bytes, one-dimensional."""
        return self.tensors[index]


Slots = SharedSlots | DeviceSlots


def create_slots(count: int, slot_bytes: int, where: torch.device, on_device: bool) -> Slots:
    """New slots. where: the parameters' device; on the CPU a device's memory is memory that processes can share."""
    if _are_on_device(where, on_device):
        return DeviceSlots.create(count, slot_bytes, where)
    return SharedSlots.create(count, slot_bytes)


def checksum_kind(where: torch.device, on_device: bool) -> str:
    """The kind of checksum that reads such slots where they are (checksums.py)."""
    return "sum" if _are_on_device(where, on_device) else "xxh3"


def _are_on_device(where: torch.device, on_device: bool) -> bool:
    return on_device and where.type == "cuda"


def memory_tensor(memory: memoryview | torch.Tensor) -> torch.Tensor:
    """A one-dimensional uint8 tensor over memory of either kind, not copied. Host memory must be writable."""
    if isinstance(memory, torch.Tensor):
        return memory
    return torch.from_numpy(numpy.frombuffer(memory, numpy.uint8))


def slots_device(slots: Slots) -> torch.device:
    """Where transports find the slots."""
    return slots.device if isinstance(slots, DeviceSlots) else torch.device("cpu")


def slot_tensors(slots: Slots) -> list[torch.Tensor]:
    """Each slot as a one-dimensional uint8 tensor."""
    if isinstance(slots, DeviceSlots):
        return slots.tensors
    memory = torch.frombuffer(slots.map, dtype=torch.uint8)
    return [memory[slots.offset(index) :][: slots.slot_bytes] for index in range(slots.count)]


def pin(slots: Slots) -> None:
    """Let the device copy into slots in host memory by itself. Raises UserError where it cannot."""
    if isinstance(slots, SharedSlots):
        device.pin_host_memory(_address(slots), len(slots.map))


def unpin(slots: Slots) -> None:
    """Before the slots' memory goes."""
    if isinstance(slots, SharedSlots):
        device.unpin_host_memory(_address(slots))


def _address(slots: SharedSlots) -> int:
    return torch.frombuffer(slots.map, dtype=torch.uint8).data_ptr()
