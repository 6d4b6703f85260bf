"""Which buckets a worker needs: those that touch the boxes of the parameters that it holds. No torch.

The trainer's layout and an actor's are independent: a tensor-parallel worker asks for what its part lies in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from torchtitan.weight_sync.layout_tables import Box, numbered
from torchtitan.weight_sync.manifest import DTYPE_BYTES, Layout, LayoutError

# Rank -> ranges of buckets, in order, that do not touch each other; None: all buckets of all ranks.
Needs = dict[int, list[tuple[int, int]]] | None


def intersection(first: Box, second: Box) -> Box | None:
    """The elements that two boxes of one tensor share, None without any."""
    offset, shape = [], []
    for low, size, other_low, other_size in zip(first.offset, first.shape, second.offset, second.shape, strict=True):
        start, end = max(low, other_low), min(low + size, other_low + other_size)
        if start >= end:
            return None
        offset.append(start)
        shape.append(end - start)
    return Box(tuple(offset), tuple(shape))


def needed_buckets(layout: Layout, boxes: Mapping[str, Box]) -> dict[int, list[tuple[int, int]]]:
    """Exactly the buckets with at least one byte of `boxes` (parameter name -> the part that is held).

    Raises LayoutError for a parameter that the layout does not have, or a box outside of it.
    """
    held, held_of = _held_boxes(layout, boxes)
    needs = {}
    for rank in range(len(layout.ranks)):
        edges = np.flatnonzero(np.diff(_touched(layout, rank, held, held_of), prepend=False, append=False))
        ranges = [(int(low), int(high)) for low, high in zip(edges[::2], edges[1::2], strict=True)]
        if ranges:
            needs[rank] = ranges
    return needs


def _held_boxes(layout: Layout, boxes: Mapping[str, Box]) -> tuple[tuple[Box, ...], np.ndarray]:
    """(distinct boxes, int64 [parameters]: which of them is held of each, -1 for none)."""
    parameters = layout.parameters
    numbers = {name: index for index, name in enumerate(parameters.names)}
    unknown = boxes.keys() - numbers.keys()
    if unknown:
        raise LayoutError(f"the trainer sends no parameter {min(unknown)}")
    held, which = numbered(boxes.values())
    index = np.fromiter(map(numbers.__getitem__, boxes), np.int64, len(boxes))
    # One parameter stands for all of its shape of which the same box is held.
    _, first = np.unique(which * len(parameters.kinds) + parameters.kind[index], return_index=True)
    for row in first.tolist():
        entry, box = parameters[int(index[row])], held[which[row]]
        if len(box.shape) != len(entry.shape) or any(
            low < 0 or low + size > full for low, size, full in zip(box.offset, box.shape, entry.shape, strict=True)
        ):
            raise LayoutError(f"{entry.name}: {box} lies outside of a tensor of {entry.shape}")
    held_of = np.full(len(parameters), -1, np.int64)
    held_of[index] = which
    return held, held_of


def _touched(layout: Layout, rank: int, held: tuple[Box, ...], held_of: np.ndarray) -> np.ndarray:
    """bool [buckets of the rank]: whether a byte of what is held lies there."""
    shards, size = layout.ranks[rank].shards, layout.bucket_bytes
    # +1 where a run of needed buckets begins, -1 behind its end.
    steps = np.zeros(layout.bucket_count(rank) + 1, np.int64)
    wanted = held_of[shards.parameter]
    widths = np.array([DTYPE_BYTES[dtype] for dtype, _ in layout.parameters.kinds], np.int64)
    width = widths[layout.parameters.kind[shards.parameter]]
    # Shards that are cut alike, of which the same is held, differ only in where they begin.
    pair = np.where(wanted < 0, -1, (wanted * len(shards.boxes) + shards.box) * 8 + width)
    distinct, first = np.unique(pair, return_index=True)
    for alike, row in zip(distinct.tolist(), first.tolist(), strict=True):
        box = shards.boxes[shards.box[row]]
        common = intersection(held[wanted[row]], box) if alike >= 0 else None
        if common is not None:
            starts, length = _runs(box, common)
            lows, highs = _spans(starts * width[row], length * width[row], size)
            begin = shards.byte_offset[pair == alike][:, None]
            steps += np.bincount(((begin + lows) // size).reshape(-1), minlength=len(steps))
            steps -= np.bincount(((begin + highs - 1) // size + 1).reshape(-1), minlength=len(steps))
    return np.cumsum(steps[:-1]) > 0


def _spans(starts: np.ndarray, length: int, bucket_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """(first bytes, ends) of runs of `length` bytes, put together where no bucket fits between two of them."""
    breaks = np.flatnonzero(np.diff(starts) - length >= bucket_bytes)
    return starts[np.concatenate(([0], breaks + 1))], starts[np.concatenate((breaks, [len(starts) - 1]))] + length


def _runs(shard: Box, part: Box) -> tuple[np.ndarray, int]:
    """(first elements, length) of the contiguous runs of which `part` consists in the shard's memory."""
    strides = [math.prod(shard.shape[dim + 1 :]) for dim in range(len(shard.shape))]
    # Dimensions behind the last one that is not whole belong to one run.
    last = max((dim for dim, size in enumerate(part.shape) if size != shard.shape[dim]), default=0)
    starts = np.zeros(1, np.int64)
    for dim in range(last):
        within = (part.offset[dim] - shard.offset[dim] + np.arange(part.shape[dim])) * strides[dim]
        starts = (starts[:, None] + within[None, :]).reshape(-1)
    if not part.shape:
        return starts, 1
    starts = starts + (part.offset[last] - shard.offset[last]) * strides[last]
    return starts, part.shape[last] * strides[last]


def all_keys(layout: Layout, needs: Needs) -> list[tuple[int, int]]:
    """The needed (rank, bucket) pairs, in order."""
    if needs is None:
        return [(rank, bucket) for rank in range(len(layout.ranks)) for bucket in range(layout.bucket_count(rank))]
    return [
        (rank, bucket)
        for rank, ranges in sorted(needs.items())
        for first, end in ranges
        for bucket in range(first, end)
    ]
