"""Hyper-rectangles of a tensor: which of its elements a rank, a shard or a piece holds. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

Index = tuple[int | slice, ...]


class Box(NamedTuple):
    """A hyper-rectangle of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def narrowed(box: Box, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Box | None:
    """Slice a box as torch slices a tensor; None if that leaves gaps."""
    if step != 1:
        return None
    size = box.shape[dim]
    low, high, _ = slice(start, end).indices(size)
    offset, shape = list(box.offset), list(box.shape)
    offset[dim], shape[dim] = offset[dim] + low, max(0, high - low)
    return Box(tuple(offset), tuple(shape))


def intersection(first: Box, second: Box) -> Box | None:
    """Return the elements that two boxes of one tensor share; None if there are none."""
    offset, shape = [], []
    for low, size, other_low, other_size in zip(first.offset, first.shape, second.offset, second.shape, strict=True):
        start, end = max(low, other_low), min(low + size, other_low + other_size)
        if start >= end:
            return None
        offset.append(start)
        shape.append(end - start)
    return Box(tuple(offset), tuple(shape))


def cut_rows(shape: tuple[int, ...], limit: int) -> Iterator[tuple[Index, tuple[int, ...]]]:
    """Cut a tensor into consecutive pieces of at most `limit` elements, in row-major order.

    Yields (index, shape of the piece). The tensor need not be contiguous.
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
