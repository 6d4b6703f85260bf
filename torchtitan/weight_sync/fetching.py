"""How an actor gets at a bucket whose bytes do not come over its channel: by what the bucket's message refers to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchtitan.weight_sync.device_memory import DeviceMemories
from torchtitan.weight_sync.device_slots import memory_tensor
from torchtitan.weight_sync.disk import FileReader
from torchtitan.weight_sync.nccl import ReceivingLink
from torchtitan.weight_sync.runtime import Channel
from torchtitan.weight_sync.shared_files import SharedFiles
from torchtitan.weight_sync.transfer import BucketKey
from torchtitan.weight_sync.wire import Message, ProtocolError


class Fetcher:
    """post(): has a function run on the loop's thread."""

    def __init__(self, post: Callable[[Callable[[], None]], None]):
        self._post = post
        self.where = torch.device("cpu")
        """Of staging memory"""
        self.files: FileReader | None = None
        """Of the disk transport, for the layout that there is"""
        self._shared, self._memories = SharedFiles(), DeviceMemories()
        self._links: dict[str, ReceivingLink] = {}

    def linked(self, channel: Channel, message: Message) -> None:
        """The other end of a communicator wants to meet, over this channel: its link lives as long as that does. On the
        loop's thread. Raises ProtocolError."""
        name = message["link"]
        if name not in self._links:
            link = self._links[name] = ReceivingLink(name, self._post, channel, self.where)
            tell = channel.on_close

            def closed(channel: Channel, reason: str) -> None:
                del self._links[name]
                link.close()
                tell(channel, reason)

            channel.on_close = closed
        self._links[name].heard(message)

    def copy(self, key: BucketKey, reference: Any, target: memoryview | torch.Tensor) -> None:
        """Fill `target` with what a reference leads to. Blocks.

        Raises ConnectionError where the way is broken, and its channel is closed then; ProtocolError for what is no
        reference; whatever the system raises for memory that does not open.
        """
        if not isinstance(reference, dict):
            raise ProtocolError("a reference is an object")
        if "link" in reference:
            link = self._links.get(reference["link"])
            if link is None:
                raise ConnectionError("the channel of this reference is over")
            link.fetch(reference, memory_tensor(target))
        elif isinstance(reference.get("memory"), dict) and "handle" in reference["memory"]:
            self._memories.copy(reference, memory_tensor(target))
        elif isinstance(target, memoryview) and "file" in reference and self.files is not None:
            self.files.copy(reference, key, target)
        elif isinstance(target, memoryview):
            self._shared.copy(reference, target)
        else:
            raise ProtocolError("the trainer's slots are in host memory, this actor's staging memory is not")
