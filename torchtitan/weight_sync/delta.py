"""A bucket as what differs from an older one: lossless overwrites of whole elements, never larger than the bucket. No
torch.

    encoding, payload = encode(new, base, size)      # size = element_bytes(layout)
    decode_into(target, encoding, payload, size)     # target holds the base's bytes before, the new ones after

A payload is the new values of all changed elements in order, then where they are: one bit per element of the bucket
(BITMAP), or the number of unchanged elements before each of them, in one byte (GAPS_8) or two (GAPS_16). The largest
gap number means: so many unchanged elements, and no changed one after them. A gap payload begins with the number of
changed elements. All numbers are little-endian.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from torchtitan.weight_sync.manifest import DTYPE_BYTES, Layout
from torchtitan.weight_sync.wire import FULL, ProtocolError

BITMAP, GAPS_8, GAPS_16 = 1, 2, 3

Unsigned: TypeAlias = "np.dtype[np.unsignedinteger[Any]]"
_ELEMENTS: dict[int, Unsigned] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
_GAPS: dict[int, Unsigned] = {GAPS_8: np.dtype("<u1"), GAPS_16: np.dtype("<u2")}
_COUNT = np.dtype("<u8")


def element_bytes(layout: Layout) -> int:
    """Bytes of the elements that deltas of this layout consist of: the smallest dtype's, so that with several dtypes
    a changed float32 is two changed halves (at most), and that shard padding is a whole number of elements. Less only
    where a bucket would end within an element."""
    sizes = {DTYPE_BYTES[dtype] for dtype, _shape in layout.parameters.kinds}
    return math.gcd(4, layout.bucket_bytes, *sizes)


def encode(new: memoryview, base: memoryview, size: int) -> tuple[int, memoryview]:
    """(encoding, payload): the smallest that makes `base` into `new`, which are equally long.

    FULL, with `new` itself as the payload, where nothing is smaller than that. size: bytes of an element, 1, 2 or 4.
    Raises ValueError for memory that is not a whole number of elements.
    """
    if len(new) != len(base) or len(new) % size:
        raise ValueError(f"a delta of {len(new)} against {len(base)} bytes, in elements of {size}")
    elements = np.frombuffer(new, _ELEMENTS[size])
    changed = elements != np.frombuffer(base, _ELEMENTS[size])
    count = int(np.count_nonzero(changed))
    values_bytes = count * size
    best, encoding = len(new), FULL
    bitmap_bytes = -(-len(elements) // 8)
    if values_bytes + bitmap_bytes < best:
        best, encoding = values_bytes + bitmap_bytes, BITMAP
    # A gap is at least a byte: with many changes it cannot win, and need not be looked for.
    least_with_gaps = _COUNT.itemsize + values_bytes + count
    if min(best, least_with_gaps) >= len(new):
        return FULL, new
    # Taking elements by index is many times faster than by mask.
    indices = np.flatnonzero(changed)
    gaps: NDArray[np.int64] | None = None
    if least_with_gaps < best:
        gaps = np.diff(indices, prepend=-1) - 1
        for candidate, kind in _GAPS.items():
            numbers = count + int((gaps // np.iinfo(kind).max).sum())
            total = _COUNT.itemsize + values_bytes + numbers * kind.itemsize
            if total < best:
                best, encoding = total, candidate
    if encoding == FULL:
        return FULL, new
    values = elements[indices]
    if encoding == BITMAP:
        parts: list[NDArray[Any]] = [values, np.packbits(changed)]
    else:
        assert gaps is not None
        parts = [np.array([count], _COUNT), values, _gap_numbers(gaps, _GAPS[encoding])]
    payload = memoryview(b"".join(part.tobytes() for part in parts))
    assert len(payload) == best
    return encoding, payload


def _gap_numbers(gaps: NDArray[np.int64], kind: Unsigned) -> NDArray[np.unsignedinteger[Any]]:
    """Gaps as numbers of `kind`, the long ones with as many largest numbers before them as it takes."""
    escape = np.iinfo(kind).max
    escapes = gaps // escape
    numbers = np.full(len(gaps) + int(escapes.sum()), escape, kind)
    numbers[np.cumsum(escapes + 1) - 1] = gaps % escape
    return numbers


def decode_into(target: memoryview, encoding: int, payload: memoryview, size: int) -> None:
    """Overwrite what `payload` says has changed in `target`, which holds the base's bytes.

    Never writes outside of `target`, and writes nothing at all before the whole payload has been checked. Raises
    ProtocolError for a payload that encode() does not make for a bucket of this length.
    """
    if encoding == FULL:
        if len(payload) != len(target):
            raise ProtocolError(f"a full bucket of {len(payload)} bytes instead of {len(target)}")
        target[:] = payload
        return
    if len(target) % size or len(payload) >= len(target):
        raise ProtocolError(f"a delta of {len(payload)} bytes for a bucket of {len(target)}")
    elements = np.frombuffer(target, _ELEMENTS[size])
    if encoding == BITMAP:
        indices, values = _decode_bitmap(payload, len(elements), size)
    elif encoding in _GAPS:
        indices, values = _decode_gaps(payload, len(elements), size, _GAPS[encoding])
    else:
        raise ProtocolError(f"unknown encoding {encoding} of a bucket")
    elements[indices] = values


def _decode_bitmap(
    payload: memoryview, length: int, size: int
) -> tuple[NDArray[np.int64], NDArray[np.unsignedinteger[Any]]]:
    """(indices of changed elements, their values)."""
    values_bytes = len(payload) - -(-length // 8)
    if values_bytes < 0 or values_bytes % size:
        raise ProtocolError("a bitmap delta of a wrong length")
    bits = np.unpackbits(np.frombuffer(payload, np.uint8, offset=values_bytes))
    if int(np.count_nonzero(bits)) * size != values_bytes or bits[length:].any():
        raise ProtocolError("a delta whose bitmap does not fit its values")
    return np.flatnonzero(bits.view(np.bool_)), np.frombuffer(payload, _ELEMENTS[size], count=values_bytes // size)


def _decode_gaps(
    payload: memoryview, length: int, size: int, kind: Unsigned
) -> tuple[NDArray[np.int64], NDArray[np.unsignedinteger[Any]]]:
    """(indices of changed elements, their values)."""
    if len(payload) < _COUNT.itemsize:
        raise ProtocolError("a delta without a count")
    count = int(np.frombuffer(payload, _COUNT, count=1)[0])
    start = _COUNT.itemsize + count * size
    if start > len(payload) or (len(payload) - start) % kind.itemsize:
        raise ProtocolError("a delta that is shorter than its values")
    numbers = np.frombuffer(payload, kind, offset=start) if start < len(payload) else np.empty(0, kind)
    ends = numbers != np.iinfo(kind).max
    if int(np.count_nonzero(ends)) != count or (len(numbers) and not ends[-1]):
        raise ProtocolError("a delta whose gaps do not fit its values")
    # A largest number stands for unchanged elements only; any other for those and the changed one after them.
    indices = (np.cumsum(numbers, dtype=np.int64) + np.cumsum(ends) - 1)[ends]
    if count and indices[-1] >= length:
        raise ProtocolError("a delta that goes beyond its bucket")
    return indices, np.frombuffer(payload, _ELEMENTS[size], count=count, offset=_COUNT.itemsize)
