"""A layout's rows as columns: 64,000 parameters on 64 ranks are four million shards, too many for one object each.

Equal shapes and equal boxes are stored once, and rows refer to them by number. A column is sent as the compressed
differences of neighbours, few of which are distinct; everything else is plain JSON. No torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from torchtitan.distributed.boxes import Box
from torchtitan.utils.columns import deflate, inflate, numbered, pack, unpack

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Larger than any model's sizes; sums of a few of them still fit 64 bits.
_LARGEST = 1 << 60
# Limits how much memory a few compressed bytes can make a reader allocate.
_MAX_NAMES_BYTES = 1 << 30


class ParameterEntry(NamedTuple):
    """A parameter: its Hugging Face checkpoint name, dtype on the wire and global shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class ShardEntry(NamedTuple):
    """A box of one parameter (by index), and which bytes of the rank's slot hold its elements."""

    parameter: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    byte_offset: int
    byte_end: int


@dataclass(frozen=True, eq=False)
class ParameterTable:
    """Rows of parameters; indexing and iteration give ParameterEntry.

    kinds: distinct (dtype, shape); kind: int64 [parameters], each parameter's index in `kinds`.
    """

    names: tuple[str, ...]
    kinds: tuple[tuple[str, tuple[int, ...]], ...]
    kind: np.ndarray

    @classmethod
    def of(cls, entries: Iterable[ParameterEntry]) -> ParameterTable:
        """Make a table of these rows."""
        rows = list(entries)
        kinds, kind = numbered((entry.dtype, entry.shape) for entry in rows)
        return cls(tuple(entry.name for entry in rows), kinds, kind)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> ParameterEntry:
        return ParameterEntry(self.names[index], *self.kinds[self.kind[index]])

    def __iter__(self) -> Iterator[ParameterEntry]:
        for name, kind in zip(self.names, self.kind.tolist(), strict=True):
            yield ParameterEntry(name, *self.kinds[kind])

    def to_json(self) -> dict[str, Any]:
        # One text instead of a list: 64,000 names are read and compared 50 times as fast.
        return {"names": deflate("\n".join(self.names).encode()), "kinds": self.kinds, "kind": pack(self.kind)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ParameterTable:
        """Read a table. Raises ValueError, TypeError or KeyError for malformed rows."""
        kinds = tuple((str(dtype), _sizes(shape)) for dtype, shape in data["kinds"])
        if any(dtype not in DTYPE_BYTES for dtype, _ in kinds):
            raise ValueError("an unknown dtype")
        kind = unpack(data["kind"], len(kinds))
        names: tuple[str, ...] = ()
        if len(kind):
            text = inflate(data["names"], _MAX_NAMES_BYTES).decode()
            names = tuple(text.split("\n"))
        if len(names) != len(kind):
            raise ValueError(f"{len(names)} parameters have {len(kind)} kinds")
        return cls(names, kinds, kind)


@dataclass(frozen=True, eq=False)
class ShardTable:
    """What one rank sends: its slot consists of these shards without gaps. Iteration gives ShardEntry.

    parameter: int64 [shards], index of the parameter; box: int64 [shards], each shard's index in `boxes`.
    """

    parameters: ParameterTable
    boxes: tuple[Box, ...]
    parameter: np.ndarray
    box: np.ndarray

    @classmethod
    def of(cls, parameters: ParameterTable, shards: Iterable[tuple[int, Box]]) -> ShardTable:
        """Make a table of these (parameter, box) pairs."""
        rows = list(shards)
        boxes, box = numbered(box for _, box in rows)
        return cls(parameters, boxes, np.array([parameter for parameter, _ in rows], np.int64), box)

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        elements = np.array([box.elements for box in self.boxes], np.int64)[self.box]
        widths = np.array([DTYPE_BYTES[dtype] for dtype, _ in self.parameters.kinds], np.int64)
        return np.cumsum(elements * widths[self.parameters.kind[self.parameter]])

    @property
    def slot_bytes(self) -> int:
        """Size of the slot; 0 if this rank sends nothing."""
        return int(self._ends[-1]) if len(self) else 0

    def __len__(self) -> int:
        return len(self.parameter)

    def __iter__(self) -> Iterator[ShardEntry]:
        byte_offset = 0
        for parameter, number, end in zip(self.parameter.tolist(), self.box.tolist(), self._ends.tolist(), strict=True):
            box = self.boxes[number]
            yield ShardEntry(parameter, box.offset, box.shape, byte_offset, end)
            byte_offset = end

    def to_json(self) -> dict[str, Any]:
        return {"boxes": self.boxes, "parameter": pack(self.parameter), "box": pack(self.box)}

    @classmethod
    def from_json(cls, data: dict[str, Any], parameters: ParameterTable) -> ShardTable:
        """Read a table. Raises ValueError, TypeError or KeyError for malformed rows."""
        boxes = tuple(Box(_sizes(offset), _sizes(shape)) for offset, shape in data["boxes"])
        parameter, box = unpack(data["parameter"], len(parameters)), unpack(data["box"], len(boxes))
        if len(parameter) != len(box):
            raise ValueError("columns of different lengths")
        return cls(parameters, boxes, parameter, box)


def _sizes(values: Any) -> tuple[int, ...]:
    sizes = tuple(values)
    if set(map(type, sizes)) - {int} or any(size < 0 for size in sizes) or math.prod(sizes) > _LARGEST:
        raise ValueError(f"not a shape or an offset: {values!r}")
    return sizes
