"""A layout's rows in columns: 64,000 parameters on 64 ranks are four million shards, too many for an object each.

Equal shapes and equal boxes are kept once, rows refer to them by number. Numbers travel as base64 of little-endian
unsigned integers, everything else as plain JSON. No torch.
"""

from __future__ import annotations

import base64
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

# Larger sizes than any model's; keeps sums of a few of them inside 64 bits.
_LARGEST = 1 << 60

Item = TypeVar("Item", bound=Hashable)


@dataclass(frozen=True)
class Box:
    """A hyper-rectangle of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ParameterEntry:
    """A parameter: its Hugging Face checkpoint name, dtype on the wire and global shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ShardEntry:
    """A box of one parameter (by index); its elements start at byte_offset of the rank's slot."""

    parameter: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    byte_offset: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class ParameterTable:
    """Iterates and indexes as ParameterEntry.

    kinds: distinct (dtype, shape); kind: int64 [parameters], which one each parameter has.
    """

    names: tuple[str, ...]
    kinds: tuple[tuple[str, tuple[int, ...]], ...]
    kind: np.ndarray

    @classmethod
    def of(cls, entries: Iterable[ParameterEntry]) -> ParameterTable:
        """The table of these rows."""
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

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ParameterTable):
            return NotImplemented
        return self.names == other.names and _same_rows(self.kinds, self.kind, other.kinds, other.kind)

    __hash__ = None  # type: ignore[assignment]

    def to_json(self) -> dict[str, Any]:
        kinds = [[dtype, list(shape)] for dtype, shape in self.kinds]
        return {"names": list(self.names), "kinds": kinds, "kind": _packed(self.kind, "<u4")}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ParameterTable:
        """Raises ValueError, TypeError or KeyError for malformed rows."""
        names = tuple(data["names"])
        kinds = tuple((str(dtype), _sizes(shape)) for dtype, shape in data["kinds"])
        kind = _unpacked(data["kind"], "<u4", len(kinds))
        if set(map(type, names)) - {str} or len(names) != len(kind):
            raise ValueError("parameters without a name or a kind")
        return cls(names, kinds, kind)


@dataclass(frozen=True, eq=False)
class ShardTable:
    """Iterates and indexes as ShardEntry. All columns are int64 [shards].

    parameter: index of the parameter; box: which of `boxes`; byte_offset: where its elements start in the rank's slot.
    """

    boxes: tuple[Box, ...]
    parameter: np.ndarray
    box: np.ndarray
    byte_offset: np.ndarray

    @classmethod
    def of(cls, entries: Iterable[ShardEntry]) -> ShardTable:
        """The table of these rows."""
        rows = list(entries)
        boxes, box = numbered(Box(entry.offset, entry.shape) for entry in rows)
        parameter = np.array([entry.parameter for entry in rows], np.int64)
        return cls(boxes, parameter, box, np.array([entry.byte_offset for entry in rows], np.int64))

    @property
    def elements(self) -> np.ndarray:
        """int64 [shards]: elements of each."""
        return np.array([box.elements for box in self.boxes], np.int64)[self.box]

    def __len__(self) -> int:
        return len(self.parameter)

    def __getitem__(self, index: int) -> ShardEntry:
        box = self.boxes[self.box[index]]
        return ShardEntry(int(self.parameter[index]), box.offset, box.shape, int(self.byte_offset[index]))

    def __iter__(self) -> Iterator[ShardEntry]:
        columns = (self.parameter.tolist(), self.box.tolist(), self.byte_offset.tolist())
        for parameter, number, byte_offset in zip(*columns, strict=True):
            box = self.boxes[number]
            yield ShardEntry(parameter, box.offset, box.shape, byte_offset)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShardTable):
            return NotImplemented
        return (
            np.array_equal(self.parameter, other.parameter)
            and np.array_equal(self.byte_offset, other.byte_offset)
            and _same_rows(self.boxes, self.box, other.boxes, other.box)
        )

    __hash__ = None  # type: ignore[assignment]

    def to_json(self) -> dict[str, Any]:
        return {
            "boxes": [[list(box.offset), list(box.shape)] for box in self.boxes],
            "parameter": _packed(self.parameter, "<u4"),
            "box": _packed(self.box, "<u4"),
            "byte_offset": _packed(self.byte_offset, "<u8"),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ShardTable:
        """Raises ValueError, TypeError or KeyError for malformed rows."""
        boxes = tuple(Box(_sizes(offset), _sizes(shape)) for offset, shape in data["boxes"])
        parameter = _unpacked(data["parameter"], "<u4", _LARGEST)
        box = _unpacked(data["box"], "<u4", len(boxes))
        byte_offset = _unpacked(data["byte_offset"], "<u8", _LARGEST)
        if not len(parameter) == len(box) == len(byte_offset):
            raise ValueError("columns of different lengths")
        return cls(boxes, parameter, box, byte_offset)


def numbered(items: Iterable[Item]) -> tuple[tuple[Item, ...], np.ndarray]:
    """The distinct items in order of appearance, and int64 [items]: which one each is."""
    numbers: dict[Item, int] = {}
    index = np.fromiter((numbers.setdefault(item, len(numbers)) for item in items), np.int64)
    return tuple(numbers), index


def _same_rows(
    values: Sequence[Hashable], index: np.ndarray, other_values: Sequence[Hashable], other_index: np.ndarray
) -> bool:
    if values == other_values:
        return np.array_equal(index, other_index)
    # Equal rows may be numbered differently, and values may be there that no row has.
    _, translation = numbered(itertools.chain(values, other_values))
    return np.array_equal(translation[index], translation[len(values) :][other_index])


def _sizes(values: Any) -> tuple[int, ...]:
    sizes = tuple(values)
    if set(map(type, sizes)) - {int} or any(size < 0 for size in sizes) or math.prod(sizes) > _LARGEST:
        raise ValueError(f"not a shape or an offset: {values!r}")
    return sizes


def _packed(column: np.ndarray, kind: str) -> str:
    return base64.b64encode(column.astype(kind).tobytes()).decode()


def _unpacked(text: Any, kind: str, limit: int) -> np.ndarray:
    """The column again, int64. Raises ValueError for one that is malformed or holds `limit` or more."""
    column = np.frombuffer(base64.b64decode(text, validate=True), kind)
    if len(column) and int(column.max()) >= limit:
        raise ValueError(f"a column holds {int(column.max())}, its limit is {limit}")
    return column.astype(np.int64)
