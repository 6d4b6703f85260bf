"""Columns of numbers as compressed text in JSON: the differences of neighbours, few of which are distinct. No torch."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Hashable, Iterable
from typing import Any, TypeVar

import numpy as np

# Limits how much memory a few compressed bytes can make a reader allocate.
_MAX_ROWS = 1 << 24

Item = TypeVar("Item", bound=Hashable)


def numbered(items: Iterable[Item]) -> tuple[tuple[Item, ...], np.ndarray]:
    """Return the distinct items in order of appearance, and int64 [items]: each item's index among them."""
    items = list(items)
    numbers = {item: number for number, item in enumerate(dict.fromkeys(items))}
    return tuple(numbers), np.fromiter(map(numbers.__getitem__, items), np.int64, len(items))


def pack(column: np.ndarray) -> str:
    return deflate(np.diff(column, prepend=0).astype("<i8").tobytes())


def deflate(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 1)).decode()


def inflate(text: Any, most: int) -> bytes:
    """Return at most so many bytes. Raises ValueError if they are malformed or more."""
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(base64.b64decode(text, validate=True), most)
    except zlib.error as error:
        raise ValueError(f"a column cannot be decompressed: {error}") from error
    if not inflater.eof:
        raise ValueError("a column is cut off or too long")
    return data


def unpack(text: Any, limit: int) -> np.ndarray:
    """Return the int64 column. Raises ValueError if it is malformed or has a value outside 0 to `limit` - 1."""
    data = inflate(text, _MAX_ROWS * 8)
    if len(data) % 8:
        raise ValueError("a column is cut off")
    column = np.cumsum(np.frombuffer(data, "<i8"), dtype=np.int64)
    if len(column) and not 0 <= int(column.min()) <= int(column.max()) < limit:
        raise ValueError(f"a column holds {int(column.min())} to {int(column.max())}, its limit is {limit}")
    return column
