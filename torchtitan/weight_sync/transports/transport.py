"""What a transport is: one object that knows both sides of the way of a bucket's bytes. No torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.config.transports import TRANSPORTS
from torchtitan.weight_sync.wire.runtime import Channel, Message, ProtocolError

if TYPE_CHECKING:
    import torch

    from torchtitan.config.job_config import JobConfig, WeightSync
    from torchtitan.weight_sync.memory.manifest import Layout  # imports numpy


class Transport:
    """Moves buckets from a rank's slots to an actor's staging memory. A rank makes one from the configuration, and its
    registry and shard server processes make theirs from the same `options`; an actor makes one without options.

    This class moves nothing itself: a bucket's bytes then follow its message on the channel. A subclass overrides what
    differs, and names the file that it is in. docs/adding_a_transport.md is written along it.
    """

    name: str
    reference = ""
    """The field by which an actor tells this transport's references and entries from others'; empty: it sends none"""
    threaded = False
    """Whether the shard server must be a thread of the rank (it always is with slots on a GPU)"""

    needs_keys = False
    """Whether its processes need the user's keys to other services"""

    def __init__(self, options: Message | None = None):
        self.options = options or {}

    # Before the start

    @classmethod
    def configured(cls, config: WeightSync, run_dir: Path) -> Transport:
        """Make a rank's. Its options are plain JSON: all that a process needs to know."""
        return cls()

    @staticmethod
    def problems(config: JobConfig, engine_python: Callable[[], str | None]) -> Iterator[tuple[str, str]]:
        """Yield (key, reason) of each key that cannot be as it is with this transport. engine_python(): the interpreter
        of the engine that the run starts, if there is one."""
        yield from ()

    # Trainer

    def to_json(self) -> Message:
        """Return what another process of the job makes its own from."""
        return {"transport": self.name, "options": self.options, "needs_keys": self.needs_keys}

    def claim(self, epoch: str) -> None:
        """Reserve for this job what two jobs may not share. Runs on rank 0. Raises UserError."""

    def close(self) -> None:
        """Undo claim(). May be called twice."""

    def catalogue(self, runtime: Any, epoch: str) -> Any:
        """Return what the registry tells of published versions, see disk.Catalogue; None: nothing is to be told."""

    def sending(self, runtime: Any, slots: Any, layout: Layout, epoch: str, rank: int, ranks: int, /) -> dict[str, Any]:
        """Return the arguments of ShardServer that say how bytes leave: refer, make_link and persist."""
        return {}

    # Actor

    def linked(self, channel: Channel, message: Message, post: Callable[..., None], where: torch.device) -> None:
        """Handle an entry from the other end of a link, on the loop's thread. post(function): runs it there; where: the
        device of staging memory. Raises ProtocolError."""
        raise ProtocolError(f"{self.name} has no links")

    def fetch(self, reference: Message, target: memoryview | torch.Tensor) -> None:
        """Fill `target` with the bytes that a reference leads to. Blocks.

        Raises ConnectionError if a link is broken (its channel is then closed), ProtocolError for an invalid reference,
        and the system's own error if memory cannot be opened.
        """
        raise NotImplementedError


def load_transport(name: str) -> type[Transport]:
    """Return the class of a transport that config/transports.py names."""
    return importlib.import_module(f"torchtitan.weight_sync.transports.{name}").TRANSPORT


def off_device() -> str:
    """Return the transports that need no device, for messages."""
    return " or ".join(name for name, descriptor in TRANSPORTS.items() if not descriptor.on_device)


def in_host_memory(target: memoryview | torch.Tensor) -> memoryview:
    """Return `target`, for a transport that reads and fills host memory. Raises ProtocolError if it is on a device."""
    if not isinstance(target, memoryview):
        raise ProtocolError("the trainer's slots are in host memory, this actor's staging memory is not")
    return target
