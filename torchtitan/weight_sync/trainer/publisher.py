"""The trainer thread's part: reserve a slot, fill it at the step boundary, ring the shard server's bell. Nothing else.

It takes no lock, sends nothing that could block, and computes no checksum. Copying shards into a slot is queued device
work. Another thread waits for the copy, and then the slot becomes READY. Before parameters change, fence() waits for
the copy too: on a GPU the compute stream waits, on the CPU the trainer thread itself.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from torchtitan.distributed import device
from torchtitan.distributed.boxes import Index, cut_rows
from torchtitan.distributed.device import Fence, SideStream
from torchtitan.distributed.placement import LocalTensors, StackPart, unique_parameters
from torchtitan.utils.dtypes import DTYPES
from torchtitan.weight_sync.memory.device_slots import DeviceSlots, create_slots, pin, slot_tensors, unpin
from torchtitan.weight_sync.memory.layout_tables import ShardEntry
from torchtitan.weight_sync.memory.manifest import Layout
from torchtitan.weight_sync.memory.slots import SlotWriter
from torchtitan.weight_sync.trainer.plan import placed_parameters, plan_rank
from torchtitan.weight_sync.wire import hook

logger = logging.getLogger(__name__)

# Device memory that a snapshot needs beside the parameters if slots are in host memory.
SCRATCH_BYTES = 64 << 20
SnapshotInFlight = tuple[int, int, float]
"""Slot, version, and when its copy was queued, in seconds since 1970"""


class DirectFiller:
    """For slots in the same memory as the parameters: one foreach copy, which also casts."""

    def __init__(self, slots: Sequence[torch.Tensor], shards: Iterable[ShardEntry], dtype: str):
        shards = list(shards)
        self._views: list[list[torch.Tensor]] = []
        for slot in slots:
            self._views.append([_view(slot, shard.byte_offset, dtype, shard.shape) for shard in shards])

    @torch.no_grad()
    def fill(self, slot: int, sources: list[torch.Tensor]) -> None:
        """Copy and cast one tensor per shard into a slot."""
        if sources:
            torch._foreach_copy_(self._views[slot], sources)


@dataclass
class _Part:
    """Bytes start:end of a slot, which pass through the scratch in one copy."""

    start: int
    end: int
    pieces: list[tuple[int, Index]]
    """(shard, index of the piece in it)"""
    views: list[torch.Tensor]
    """Where in the scratch each piece goes"""


class ScratchFiller:
    """For slots in host memory and parameters on a device.

    Pieces of the parameters are cast into a scratch on the device, laid out like a part of the slot, and one copy moves
    that part to the host. So the bus carries the inference dtype in long copies, however small the parameters are.
    """

    def __init__(
        self,
        slots: Sequence[torch.Tensor],
        shards: Iterable[ShardEntry],
        dtype: str,
        where: torch.device,
        scratch_bytes: int,
    ):
        self._slots = slots
        self._scratch = torch.zeros(scratch_bytes, dtype=torch.uint8, device=where)
        self._parts = self._cut(shards, dtype)

    def _cut(self, shards: Iterable[ShardEntry], dtype: str) -> list[_Part]:
        size, limit = DTYPES[dtype].itemsize, len(self._scratch)
        parts: list[_Part] = []
        position = 0
        for number, shard in enumerate(shards):
            for index, shape in cut_rows(shard.shape, limit // size):
                end = position + math.prod(shape) * size
                if not parts or end - parts[-1].start > limit:
                    parts.append(_Part(position, position, [], []))
                part = parts[-1]
                part.pieces.append((number, index))
                part.views.append(_view(self._scratch, position - part.start, dtype, shape))
                part.end = position = end
        return parts

    @torch.no_grad()
    def fill(self, slot: int, sources: list[torch.Tensor]) -> None:
        """Copy and cast one tensor per shard into a slot."""
        for part in self._parts:
            pieces: list[torch.Tensor] = []
            for number, index in part.pieces:
                source = sources[number]
                pieces.append(source[index] if index else source)
            scratch = self._scratch[: part.end - part.start]
            torch._foreach_copy_(part.views, pieces)
            self._slots[slot][part.start : part.end].copy_(scratch, non_blocking=True)


def _view(memory: torch.Tensor, start: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind = DTYPES[dtype]
    return memory[start : start + math.prod(shape) * kind.itemsize].view(kind).view(shape)


# More than there are slots; bounded because possibly nobody takes them out.
MAX_SNAPSHOTS = 64


class Snapshot(NamedTuple):
    """One copy into a slot, from when it was queued to its fence, in seconds since 1970."""

    version: int
    begin: float
    end: float


class Publisher:
    """This rank's slots and what goes into them.

    parameters: checkpoint name -> parameter (tensor or DTensor), in the same order on every rank; tied ones are sent
    once. dtype: what actors hold. on_device: slots are on the parameters' device instead of in host memory. stream:
    where snapshots are queued. Raises UserError for parameters that cannot be sent shard by shard.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor | StackPart],
        *,
        rank: int,
        dtype: str,
        num_slots: int,
        bucket_bytes: int,
        on_device: bool = False,
        stream: SideStream | None = None,
    ):
        unique = unique_parameters(parameters)
        planned = plan_rank(placed_parameters(unique), rank, dtype, bucket_bytes)
        everything = list(unique.values())
        first = LocalTensors(everything[:1]).now()
        where = first[0].device if first else torch.device("cpu")
        shards = planned.ranks[0]
        self.slots = create_slots(num_slots, shards.slot_bytes, where, on_device)
        # "sum" is the kind that can be computed on a device.
        kind = "sum" if isinstance(self.slots, DeviceSlots) else "xxh3"
        self.layout: Layout = replace(planned, checksum=kind)
        self._locals = LocalTensors([everything[shard.parameter] for shard in shards])
        for local, shard in zip(self._locals.now(), shards, strict=True):
            if tuple(local.shape) != shard.shape:
                name = self.layout.parameters[shard.parameter].name
                raise RuntimeError(f"{name}: planned a shard of {shard.shape}, holds {tuple(local.shape)}")
        self.rank = rank
        self._writer = SlotWriter(self.slots.state_words)
        self.reserve, self.release = self._writer.reserve, self._writer.release
        self.memory = slot_tensors(self.slots)
        # The first write to each page is slow: do it before training instead of in the first snapshots.
        for memory in self.memory:
            memory.zero_()
        pin(self.slots)
        self._filler: DirectFiller | ScratchFiller
        if all(memory.device == where for memory in self.memory):
            self._filler = DirectFiller(self.memory, shards, dtype)
        else:
            self._filler = ScratchFiller(self.memory, shards, dtype, where, SCRATCH_BYTES)
        self._stream = stream or device.side_stream(where)
        self._fence: Fence = device.REACHED
        self.failure = ""
        """Why no further snapshot will become READY, else empty"""
        self._under_way: queue.SimpleQueue[tuple[Fence, SnapshotInFlight] | None] = queue.SimpleQueue()
        self._waiter = threading.Thread(target=self._wait, args=(where,), name="weight-snapshots", daemon=True)
        self._waiter.start()
        self.doorbell, self.server_bell = socket.socketpair()
        self.doorbell.setblocking(False)
        self.snapshots: deque[Snapshot] = deque(maxlen=MAX_SNAPSHOTS)
        """The last snapshots whose fence was reached, until take_snapshots() removes them"""

    def snapshot(self, version: int, serial: int) -> None:
        """Queue the copy and cast of every shard into the reserved slot. The parameters must not change before fence().

        Raises RuntimeError without a reservation.
        """
        index = self._writer.begin(version, serial)
        under_way = index, version, time.time()
        hook.at("snapshot", version=version, rank=self.rank)
        sources = self._locals.now()
        self._fence = self._stream.run(lambda: self._filler.fill(index, sources))
        if self._fence.done():
            self._finish(*under_way)
        else:
            self._under_way.put((self._fence, under_way))

    def fence(self) -> None:
        """Call right before parameters change: device work queued from now on waits for the last snapshot.

        On the CPU this thread waits.
        """
        self._fence.hold()

    def _wait(self, where: torch.device) -> None:
        """Wait for the fences one after the other, on a thread of its own."""
        try:
            device.use(where)
            while (item := self._under_way.get()) is not None:
                item[0].wait()
                self._finish(*item[1])
        except Exception as error:
            self.failure = f"a snapshot has failed: {error!r}"
            logger.exception("%s", self.failure)

    def _finish(self, index: int, version: int, started_at: float) -> None:
        # Another process reads host memory as soon as the word says READY.
        self._writer.finish(index)
        self._ring()
        self.snapshots.append(Snapshot(version, started_at, time.time()))

    def fail(self, version: int, serial: int) -> None:
        """Report that this rank has no slot for a snapshot that all ranks take: it must be dropped everywhere."""
        self.slots.set_failed(serial, version)
        self._ring()

    def _ring(self) -> None:
        """Wake the shard server. It reads everything from the shared words, so a lost ring loses nothing."""
        # The send is refused if a ring is pending, or the shard server is restarting and will look by itself.
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            self.doorbell.send(b"!")

    def close(self, timeout: float = 1.0) -> None:
        """Close files and sockets. Waits at most `timeout` seconds for a snapshot that is under way.

        A snapshot that takes longer keeps its memory, which is still being written, and the bell that it will ring.
        """
        self._under_way.put(None)
        self._waiter.join(timeout)
        with contextlib.ExitStack() as closing:
            closing.callback(self.slots.close_files)
            closing.callback(self.server_bell.close)
            if self._waiter.is_alive():
                logger.warning("a snapshot was under way for more than %g s at the end", timeout)
            else:
                closing.callback(self.doorbell.close)
                closing.callback(unpin, self.slots)
