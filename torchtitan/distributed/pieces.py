"""A tensor whose elements lie in several pieces of memory.

Code that narrows it to a part and copies that, as engines' loaders do, needs nothing to be put together. Any other
operation gets an ordinary tensor, assembled for it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchtitan.distributed.boxes import Box, intersection, narrowed

logger = logging.getLogger(__name__)
aten: Any = torch.ops.aten


class PiecedTensor(torch.Tensor):
    """The elements `box` of a parameter. pieces: (which elements of the parameter, their memory)."""

    box: Box
    pieces: Sequence[tuple[Box, torch.Tensor]]

    @staticmethod
    def __new__(cls, box: Box, pieces: Sequence[tuple[Box, torch.Tensor]]) -> PiecedTensor:
        first = pieces[0][1]
        made = torch.Tensor._make_wrapper_subclass(cls, box.shape, dtype=first.dtype, device=first.device)
        made.box, made.pieces = box, pieces
        return made

    def copy_to(self, target: torch.Tensor) -> None:
        """Copy into a tensor of this shape, or one that this tensor broadcasts to."""
        if target.shape != self.shape:
            target.copy_(self.assembled())
            return
        for held, piece in self.pieces:
            part = intersection(self.box, held)
            if part is not None:
                within(target, self.box, part).copy_(within(piece, held, part))

    def assembled(self) -> torch.Tensor:
        """Return an ordinary tensor of the same elements."""
        tensor = torch.empty(self.box.shape, dtype=self.dtype, device=self.device)
        self.copy_to(tensor)
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        source = args[0]
        if func in (aten.detach.default, aten.alias.default):
            return PiecedTensor(source.box, source.pieces)
        if func is aten.slice.Tensor:
            part = narrowed(source.box, *args[1:], **(kwargs or {}))
            if part is not None:
                return PiecedTensor(part, source.pieces)
        if func is aten.copy_.default and isinstance(args[1], PiecedTensor) and not isinstance(source, PiecedTensor):
            args[1].copy_to(source)
            return source
        _say(str(func))
        args, kwargs = pytree.tree_map_only(PiecedTensor, PiecedTensor.assembled, (args, kwargs or {}))
        return func(*args, **kwargs)


@functools.cache
def _say(operation: str) -> None:
    logger.info("parameters that came in pieces are put together for %s", operation)


def within(tensor: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    """Return the view of `part` in a tensor that covers `box`."""
    bounds = zip(box.offset, part.offset, part.shape, strict=True)
    return tensor[tuple(slice(start - origin, start - origin + size) for origin, start, size in bounds)]
