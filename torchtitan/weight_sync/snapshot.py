"""How shards get into a slot: as device work that can be queued, and is not waited for here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from torchtitan.weight_sync.layout_tables import ShardEntry
from torchtitan.weight_sync.staging import TORCH_DTYPES

# What a snapshot needs on the device beside the parameters, where slots are in host memory.
SCRATCH_BYTES = 64 << 20
Index = tuple[int | slice, ...]


class SlotFiller(Protocol):
    """Knows the slots and what goes where in them."""

    def fill(self, slot: int, sources: list[torch.Tensor]) -> None:
        """Copy and cast one tensor per shard into a slot."""


def slot_filler(
    slots: Sequence[torch.Tensor], shards: Iterable[ShardEntry], dtype: str, where: torch.device
) -> SlotFiller:
    """slots: one uint8 tensor each; where: the device of the parameters."""
    if all(slot.device == where for slot in slots):
        return DirectFiller(slots, shards, dtype)
    return ScratchFiller(slots, shards, dtype, where, SCRATCH_BYTES)


class DirectFiller:
    """Slots and parameters are in the same memory: one foreach copy, which also casts."""

    def __init__(self, slots: Sequence[torch.Tensor], shards: Iterable[ShardEntry], dtype: str):
        shards = list(shards)
        self._views = [[_view(slot, shard.byte_offset, dtype, shard.shape) for shard in shards] for slot in slots]

    @torch.no_grad()
    def fill(self, slot: int, sources: list[torch.Tensor]) -> None:
        if sources:
            torch._foreach_copy_(self._views[slot], sources)


@dataclass
class _Part:
    """Bytes start:end of a slot, which come through the scratch in one go."""

    start: int
    end: int
    pieces: list[tuple[int, Index]]
    """(shard, which part of it)"""
    views: list[torch.Tensor]
    """Where in the scratch each piece goes"""
    whole: bool = False
    """No byte between two pieces"""


class ScratchFiller:
    """Slots are in host memory, parameters on a device.

    Pieces of the parameters are cast into a scratch on the device that looks like a part of the slot, and one copy
    takes that part to the host: the bus carries the inference dtype, in long copies, however small the parameters are.
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
        size, limit = TORCH_DTYPES[dtype].itemsize, len(self._scratch)
        parts: list[_Part] = []
        for number, shard in enumerate(shards):
            position = shard.byte_offset
            for index, shape in cut_rows(shard.shape, limit // size):
                end = position + math.prod(shape) * size
                if not parts or end - parts[-1].start > limit:
                    parts.append(_Part(position, position, [], [], True))
                part = parts[-1]
                part.whole &= position == part.end
                part.pieces.append((number, index))
                part.views.append(_view(self._scratch, position - part.start, dtype, shape))
                part.end = position = end
        return parts

    @torch.no_grad()
    def fill(self, slot: int, sources: list[torch.Tensor]) -> None:
        for part in self._parts:
            pieces = [sources[number][index] if index else sources[number] for number, index in part.pieces]
            scratch = self._scratch[: part.end - part.start]
            if not part.whole:
                scratch.zero_()  # the bytes between shards are part of the version too: always the same
            torch._foreach_copy_(part.views, pieces)
            self._slots[slot][part.start : part.end].copy_(scratch, non_blocking=True)


def cut_rows(shape: tuple[int, ...], limit: int) -> Iterator[tuple[Index, tuple[int, ...]]]:
    """Cut a tensor into pieces of at most `limit` elements that follow each other in row-major order.

    Yields (index, shape of the piece). A tensor that is not contiguous can be cut so too.
    """
    elements = math.prod(shape)
    if elements <= limit:
        yield (), shape
        return
    row = elements // shape[0]
    if row > limit:
        for first in range(shape[0]):
            for index, piece in cut_rows(shape[1:], limit):
                yield (first, *index), piece
        return
    rows = limit // row
    for start in range(0, shape[0], rows):
        end = min(start + rows, shape[0])
        yield (slice(start, end),), (end - start, *shape[1:])


def _view(memory: torch.Tensor, start: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind = TORCH_DTYPES[dtype]
    return memory[start : start + math.prod(shape) * kind.itemsize].view(kind).view(shape)
