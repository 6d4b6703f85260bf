"""nccl: every channel has a link beside it, a communicator of two ranks that carries the bytes (links.py)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from torchtitan.utils.machine import wheel_version
from torchtitan.weight_sync.transports.transport import Transport, off_device
from torchtitan.weight_sync.wire.runtime import Channel, Message

if TYPE_CHECKING:
    from torchtitan.config.job_config import JobConfig
    from torchtitan.weight_sync.transports.links import ReceivingLink

# A bucket travels in chunks of this size. A frozen actor holds up a device-wide call of the trainer for at most the
# deadline of one.
CHUNK_BYTES, CHUNK_SECONDS = 4 * 1024 * 1024, 1.0


class Nccl(Transport):
    """NCCL between GPUs, gloo on the CPU."""

    name = "nccl"
    reference = "link"
    threaded = True

    def __init__(self, options: Message | None = None):
        super().__init__(options)
        self._links: dict[str, ReceivingLink] = {}

    @staticmethod
    def problems(config: JobConfig, engine_python: Callable[[], str | None]) -> Iterator[tuple[str, str]]:
        from torchtitan.config.device_memory import stages_on_device
        from torchtitan.config.gpu_defaults import trains_on_gpu

        key = "weight_sync.transport"
        if trains_on_gpu() and config.has_engines and not config.is_colocated and not stages_on_device(config):
            yield (
                key,
                f"must be {off_device()}: NCCL goes from GPU to GPU, and of the engines only vllm on one GPU receives "
                "there (its tensor_parallel_size = 1, and route = auto or direct)",
            )
        if (text := differing_nccl(config, engine_python())) is not None:
            yield key, text
        if config.shares_devices:
            text = "NCCL allows one member of a communicator per GPU"
            yield key, f"must be {off_device()} or ipc with inference.sleep_level: {text}"

    def sending(self, runtime: Any, slots: Any, *about: Any) -> dict[str, Any]:
        from torchtitan.distributed.checksum import memory_tensor
        from torchtitan.weight_sync.transports.links import Chunks, SendingLink

        chunks = Chunks(CHUNK_BYTES, CHUNK_SECONDS, memory_tensor(slots.slot(0)).device)
        return {"make_link": partial(SendingLink, runtime, chunks)}

    def linked(self, channel: Channel, message: Message, post: Any, where: Any) -> None:
        from torchtitan.weight_sync.transports.links import ReceivingLink

        name = message["link"]
        if name not in self._links:
            # The link lives as long as this channel.
            link = self._links[name] = ReceivingLink(name, post, channel, where)
            tell = channel.on_close

            def closed(channel: Channel, reason: str) -> None:
                del self._links[name]
                link.close()
                tell(channel, reason)

            channel.on_close = closed
        self._links[name].heard(message)

    def fetch(self, reference: Message, target: Any) -> None:
        from torchtitan.distributed.checksum import memory_tensor

        link = self._links.get(reference["link"])
        if link is None:
            raise ConnectionError("the channel of this reference is over")
        link.fetch(reference, memory_tensor(target))


def differing_nccl(config: JobConfig, engine_python: str | None) -> str | None:
    """Return a message if the engine that the run starts has another version of NCCL than the trainer: all members of a
    communicator need the same, and NCCL refuses others without a word about versions."""
    nccl = r"nvidia_nccl_cu\d+"
    own_version = wheel_version(sys.executable, nccl)
    engine_version = wheel_version(engine_python, nccl) if engine_python else None
    if not own_version or not engine_version or own_version == engine_version or engine_python is None:
        return None
    torch = (wheel_version(engine_python, "torch") or "").partition("+")[0]
    return (
        f"the trainer has NCCL {own_version} and {config.inference.backend} has {engine_version}: install the engine's "
        f"torch, {sys.executable} -m pip install torch=={torch}, or set weight_sync.transport to {off_device()}"
    )


TRANSPORT = Nccl
