"""A parameter that lies in several pieces, as an engine's loader may take it: nothing is put together before a copy.

Loaders narrow a checkpoint's tensor to what their worker computes with, and copy that. Narrowing one of these gives
another one, and copying it copies what each piece has of it, straight to where the loader wants it. Whatever else is
done to it is done to an ordinary tensor, which is put together for that.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchtitan.weight_sync.layout_tables import Box

logger = logging.getLogger(__name__)

aten: Any = torch.ops.aten


class PiecedTensor(torch.Tensor):
    """The elements `box` of a parameter. pieces: (which elements of it, where they lie)."""

    box: Box
    pieces: Sequence[tuple[Box, torch.Tensor]]

    @staticmethod
    def __new__(cls, box: Box, pieces: Sequence[tuple[Box, torch.Tensor]]) -> PiecedTensor:
        first = pieces[0][1]
        made = torch.Tensor._make_wrapper_subclass(cls, box.shape, dtype=first.dtype, device=first.device)
        made.box, made.pieces = box, pieces
        return made

    def copy_to(self, target: torch.Tensor) -> None:
        """Into a tensor of this shape, or one that it is broadcast to."""
        if target.shape != self.shape:
            target.copy_(self.assembled())
            return
        for held, piece in self.pieces:
            part = intersection(self.box, held)
            if part is not None:
                within(target, self.box, part).copy_(within(piece, held, part))

    def assembled(self) -> torch.Tensor:
        """An ordinary tensor of the same elements."""
        whole = torch.empty(self.box.shape, dtype=self.dtype, device=self.device)
        self.copy_to(whole)
        return whole

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        source = args[0]
        if func in (aten.detach.default, aten.alias.default):
            return PiecedTensor(source.box, source.pieces)
        if func is aten.slice.Tensor and (narrowed := _narrowed(source.box, *args[1:], **(kwargs or {}))) is not None:
            return PiecedTensor(narrowed, source.pieces)
        if func is aten.copy_.default and isinstance(args[1], PiecedTensor) and not isinstance(source, PiecedTensor):
            args[1].copy_to(source)
            return source
        _say(str(func))
        args, kwargs = pytree.tree_map_only(PiecedTensor, PiecedTensor.assembled, (args, kwargs or {}))
        return func(*args, **kwargs)


@functools.cache
def _say(operation: str) -> None:
    logger.info("parameters that came in pieces are put together for %s", operation)


def _narrowed(box: Box, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Box | None:
    """As torch slices a tensor; None where that leaves gaps."""
    if step != 1:
        return None
    size = box.shape[dim]
    low, high, _ = slice(start, end).indices(size)
    offset, shape = list(box.offset), list(box.shape)
    offset[dim], shape[dim] = offset[dim] + low, max(0, high - low)
    return Box(tuple(offset), tuple(shape))


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


def within(tensor: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    """The view of `part` in a tensor that is `box`."""
    bounds = zip(box.offset, part.offset, part.shape, strict=True)
    return tensor[tuple(slice(start - origin, start - origin + size) for origin, start, size in bounds)]
