"""ipc: actors on the trainer's machine open the memory of the slots and copy from it, on a GPU by CUDA's handles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torchtitan.weight_sync.memory.slots import ReferencedMemory, SharedSlots, open_shared
from torchtitan.weight_sync.transports.transport import Transport, in_host_memory
from torchtitan.weight_sync.wire.runtime import Message

if TYPE_CHECKING:
    import torch

    from torchtitan.config.job_config import JobConfig


class Ipc(Transport):
    """Shared memory on one machine."""

    name = "ipc"
    reference = "memory"

    def __init__(self, options: Message | None = None):
        super().__init__(options)
        self._shared = ReferencedMemory(lambda memory: memoryview(open_shared(memory)))
        self._on_devices = ReferencedMemory(_open_device_memory)

    @staticmethod
    def problems(config: JobConfig, engine_python: Callable[[], str | None]) -> Iterator[tuple[str, str]]:
        from torchtitan.config.gpu_defaults import trains_on_gpu

        spec = config.inference.spec
        started = spec.on_gpus and not spec.in_ranks and not config.inference.servers
        # A process can only open the memory of devices that it sees.
        if started and not config.shares_devices and not config.rollout.replay and trains_on_gpu():
            yield (
                "weight_sync.transport",
                "engines that the run starts see only their own GPUs and cannot open the memory of the ranks' GPUs: "
                "use tcp, or inference.sleep_level (engines share the ranks' GPUs), or servers that see all GPUs "
                "(inference.servers)",
            )

    def sending(self, runtime: Any, slots: Any, *about: Any) -> dict[str, Any]:
        if isinstance(slots, SharedSlots):
            return {"refer": slots.refer}
        from torchtitan.weight_sync.memory.device_slots import device_references

        return {"refer": device_references(slots)}

    def fetch(self, reference: Message, target: Any) -> None:
        if isinstance(reference["memory"], dict) and "storage" in reference["memory"]:
            from torchtitan.weight_sync.memory.device_slots import copy_from_device

            copy_from_device(self._on_devices.part(reference, len(target)), target)
        else:
            in_host_memory(target)[:] = self._shared.part(reference, len(target))


def _open_device_memory(memory: Message) -> torch.Tensor:
    # The process of a shard server, which opens no slots, does without torch.
    from torchtitan.weight_sync.memory import device_slots

    return device_slots.open_device_memory(memory)


TRANSPORT = Ipc
