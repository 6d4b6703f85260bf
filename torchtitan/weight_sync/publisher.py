"""The trainer-thread part: reserve a slot, fill it at the step boundary, ring the courier's bell. Nothing else.

It takes no lock, sends nothing that could block and computes no checksum.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from torchtitan.weight_sync.manifest import Layout
from torchtitan.weight_sync.parameters import local_tensor, placed_parameter, unique_parameters
from torchtitan.weight_sync.plan import plan_rank
from torchtitan.weight_sync.slots import SharedSlots
from torchtitan.weight_sync.staging import TORCH_DTYPES


class Publisher:
    """This rank's slots and what goes into them.

    parameters: checkpoint name -> parameter (tensor or DTensor), in the same order on every rank; tied ones are sent
    once. dtype: what actors hold. Raises PlanError for parameters that cannot be sent shard by shard.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        *,
        rank: int,
        dtype: str,
        num_slots: int,
        bucket_bytes: int,
        folder: Path,
    ):
        unique = unique_parameters(parameters)
        placed = [placed_parameter(name, parameter) for name, parameter in unique.items()]
        self.layout: Layout = plan_rank(placed, rank, dtype, bucket_bytes)
        own = self.layout.ranks[0]
        everything = list(unique.values())
        self._sources = [everything[shard.parameter] for shard in own.shards]
        self._locals: list[torch.Tensor] = []
        for source, shard in zip(self._sources, own.shards, strict=True):
            if tuple(local_tensor(source).shape) != shard.shape:
                name = self.layout.parameters[shard.parameter].name
                raise RuntimeError(
                    f"{name}: planned a shard of {shard.shape}, holds {tuple(local_tensor(source).shape)}"
                )
        self.slots = SharedSlots.create(num_slots, own.slot_bytes, folder)
        self._writer = self.slots.writer()
        self._views = [self._slot_views(index, dtype) for index in range(num_slots)]
        self._pages_touched()
        self.doorbell, self.courier_bell = socket.socketpair()
        self.doorbell.setblocking(False)
        self._reserved: int | None = None
        self.snapshot_seconds = 0.0

    def _slot_views(self, index: int, dtype: str) -> list[torch.Tensor]:
        kind, start = TORCH_DTYPES[dtype], self.slots.offset(index)
        return [
            torch.frombuffer(self.slots.map, dtype=kind, count=shard.elements, offset=start + shard.byte_offset).view(
                shard.shape
            )
            for shard in self.layout.ranks[0].shards
        ]

    def _pages_touched(self) -> None:
        # The first write to each page is slow; take that before training instead of in the first snapshots.
        for views in self._views:
            for view in views:
                view.zero_()

    def has_free_slot(self) -> bool:
        """Whether reserve() would succeed now."""
        return self._reserved is not None or self._writer.has_free()

    def reserve(self) -> bool:
        """Take a slot for the next snapshot. False (and the coordinator is told) when none is free."""
        if self._reserved is None:
            self._reserved = self._writer.reserve()
        if self._reserved is None:
            self.slots.count_miss()
            self._ring()
        return self._reserved is not None

    def release(self) -> None:
        """Give a reservation back. Without one a no-op."""
        if self._reserved is not None:
            self._writer.release(self._reserved)
            self._reserved = None

    def snapshot(self, version: int, serial: int) -> None:
        """Copy and cast every shard into the reserved slot. Returns once the copy is fenced.

        Raises RuntimeError without a reservation.
        """
        if self._reserved is None:
            raise RuntimeError("snapshot without a reserved slot")
        begun = time.perf_counter()
        index, self._reserved = self._reserved, None
        self._writer.begin(index, version, serial)
        sources = self._current_locals()
        if sources:
            with torch.no_grad():
                torch._foreach_copy_(self._views[index], sources)
            if sources[0].is_cuda:
                # Host memory is read by another process as soon as the word says READY.
                torch.cuda.current_stream().synchronize()
        self._writer.finish(index)
        self._ring()
        self.snapshot_seconds = time.perf_counter() - begun

    def fail(self, version: int, serial: int) -> None:
        """All ranks were told to snapshot, this one has no slot: the version must be dropped everywhere."""
        self.slots.set_failed(serial, version)
        self._ring()

    def _current_locals(self) -> list[torch.Tensor]:
        # FSDP2 may replace a parameter's local tensor (first forward, loading), but rarely does: look, do not rebuild.
        now = [source._local_tensor if hasattr(source, "_local_tensor") else source for source in self._sources]
        if len(self._locals) != len(now) or any(
            old.data_ptr() != new.data_ptr() for old, new in zip(self._locals, now, strict=True)
        ):
            self._locals = [local_tensor(source) for source in self._sources]
        return self._locals

    def _ring(self) -> None:
        """Wake the courier. It reads everything from the shared words, so a lost ring loses nothing."""
        # Refused: a ring is pending, or the courier is being restarted and will look by itself.
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            self.doorbell.send(b"!")

    def close(self) -> None:
        """Let go of files and sockets."""
        self.doorbell.close()
        self.courier_bell.close()
        self.slots.close_files()
