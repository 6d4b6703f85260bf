"""ipc on a GPU: slots in a device's memory, named by CUDA IPC handles, and opened by actors on the same machine.

Handles go only to who has proved its key, and what comes back is looked at field by field: nothing is unpickled. The
actor verifies its copy, so it does not matter to it what becomes of the slot meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from torchtitan.distributed.device import finish_background, in_background, use
from torchtitan.weight_sync.device_slots import DeviceSlots
from torchtitan.weight_sync.wire import Message, ProtocolError, field_of


def device_references(slots: DeviceSlots) -> Callable[[int, int, int], Message]:
    """What names bytes [start, end) of a slot to other processes: a function of (slot, start, end)."""
    # Once for all actors and restarts: every export of a tensor adds to what torch keeps for it.
    if slots.exports is None:
        uuid = str(torch.cuda.get_device_properties(slots.device).uuid)
        slots.exports = [_exported(tensor, uuid) for tensor in slots.tensors]
    exports = slots.exports
    return lambda slot, start, _end: {"memory": exports[slot], "offset": start}


def _exported(tensor: torch.Tensor, uuid: str) -> Message:
    _, handle, length, offset, counter, counter_offset, event, event_needed = tensor.untyped_storage()._share_cuda_()
    return {
        "gpu": uuid,
        "handle": handle.hex(),
        "length": length,
        "offset": offset,
        "counter": counter.hex(),
        "counter_offset": counter_offset,
        "event": event.hex(),
        "event_needed": event_needed,
    }


class DeviceMemories:
    """Memory of shard servers, opened when it is first named."""

    def __init__(self) -> None:
        self._opened: dict[str, torch.Tensor] = {}

    def copy(self, reference: Any, target: torch.Tensor) -> None:
        """Fill `target`, one-dimensional uint8 on any device. Raises ProtocolError for what names no such memory, and
        whatever torch raises for a handle that does not open."""
        memory, offset = reference["memory"], field_of(reference, "offset", int)
        name = json.dumps(memory, sort_keys=True)
        if name not in self._opened:
            self._opened[name] = _open(memory)
        opened = self._opened[name]
        if offset > len(opened) - len(target):
            raise ProtocolError(f"{len(target)} bytes at {offset} lie outside of the memory")
        with in_background(opened.device):
            target.copy_(opened[offset : offset + len(target)], non_blocking=True)
            finish_background(opened.device)


def _open(fields: Message) -> torch.Tensor:
    gpu = field_of(fields, "gpu", str)
    visible = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if gpu not in visible:
        raise ProtocolError(f"the trainer's slots are on GPU {gpu}, which this process does not see")
    where = torch.device("cuda", visible.index(gpu))
    use(where)
    storage = torch.UntypedStorage._new_shared_cuda(
        where.index,
        _bytes(fields, "handle"),
        field_of(fields, "length", int),
        field_of(fields, "offset", int),
        _bytes(fields, "counter"),
        field_of(fields, "counter_offset", int),
        _bytes(fields, "event"),
        field_of(fields, "event_needed", bool),
    )
    return torch.empty(0, dtype=torch.uint8, device=where).set_(storage)


def _bytes(fields: Message, name: str) -> bytes:
    try:
        return bytes.fromhex(field_of(fields, name, str))
    except ValueError as error:
        raise ProtocolError(f"{name} is not hexadecimal") from error
