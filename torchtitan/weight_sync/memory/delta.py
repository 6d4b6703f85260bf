"""Deltas: a bucket coded as its difference from an older one, losslessly, if that is smaller and fast. No torch.

A shard server encodes each bucket of a snapshot once per base, on threads, for all actors that hold the base (Deltas).

    payload = encode(new, base, size)        # size = element_bytes(layout); None: send the bucket itself
    decode_into(pieces, payload, size)       # the pieces hold the base's bytes before, the new ones after

A step changes only the last few bits of a weight; in bfloat16 most weights do not change at all. A payload consists of
the number of changed elements (32 bits), a mask of the planes that follow (8 bits), and two columns with one number per
changed element: how many unchanged ones precede it (32 bits), and the difference of its bits as an integer (as wide as
an element; 0, -1, 1, -2 ... are coded as 0, 1, 2, 3 ...). A column is cut into byte planes, the lowest bytes of all
numbers first. The planes that are not all zero form one stream of raw deflate. Numbers are little-endian.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from torchtitan.weight_sync.memory.layout_tables import DTYPE_BYTES
from torchtitan.weight_sync.memory.manifest import Layout
from torchtitan.weight_sync.memory.slots import LiveSlots
from torchtitan.weight_sync.wire.runtime import ProtocolError, Runtime

# If more of its elements have changed, a bucket is sent whole: a thread would encode less than 1 Gbit per second.
MAX_CHANGED = 0.5

_HEADER = struct.Struct("<IB")
# Width of a gap, and of an element's position in a bucket, which has at most 2^30 bytes.
_GAP_BYTES = 4
# Raw deflate has no header and no checksum: the bucket has its own.
_RAW_DEFLATE = -15
# The highest memory level (256 kB) makes longer blocks.
_MAX_MEMORY_LEVEL = 9

# Each encodes about a gigabyte of new weights per second if few of them have changed.
THREADS = 2


def element_bytes(layout: Layout) -> int:
    """Return the element size of this layout's deltas in bytes: that of the smallest dtype, so with several dtypes a
    changed float32 counts as up to two changed halves. It is smaller only if a bucket would end within an element."""
    sizes = {DTYPE_BYTES[dtype] for dtype, _shape in layout.parameters.kinds}
    return math.gcd(4, layout.bucket_bytes, *sizes)


def encode(new: memoryview, base: memoryview, size: int) -> memoryview | None:
    """Return the delta that turns `base` into `new`, equally long; None if it is not smaller or too much has changed.

    size: bytes of an element, 1, 2 or 4. Raises ValueError if lengths differ or are not a whole number of elements.
    """
    if len(new) != len(base) or len(new) % size:
        raise ValueError(f"a delta of {len(new)} against {len(base)} bytes, in elements of {size}")
    elements, old = np.frombuffer(new, f"<u{size}"), np.frombuffer(base, f"<u{size}")
    changed = elements != old
    if np.count_nonzero(changed) > MAX_CHANGED * len(elements):
        return None
    indices = np.flatnonzero(changed)
    gaps = np.empty(len(indices), f"<u{_GAP_BYTES}")
    gaps[:1] = indices[:1]
    np.subtract(indices[1:], indices[:-1] + 1, out=gaps[1:], casting="unsafe")
    distances = (elements[indices] - old[indices]).view(f"<i{size}")
    numbers = (distances << 1) ^ (distances >> (8 * size - 1))
    # Runs of zeros and Huffman coding are all that can be gained; each plane gets its own codes.
    packer = zlib.compressobj(1, zlib.DEFLATED, _RAW_DEFLATE, _MAX_MEMORY_LEVEL, zlib.Z_RLE)
    parts, used = [], 0
    planes = [plane for column in (gaps, numbers) for plane in column.view(np.uint8).reshape(-1, column.itemsize).T]
    for place, plane in enumerate(planes):
        if plane.any():
            used |= 1 << place
            parts += [packer.compress(np.ascontiguousarray(plane).data), packer.flush(zlib.Z_SYNC_FLUSH)]
    payload = memoryview(b"".join((_HEADER.pack(len(indices), used), *parts, packer.flush())))
    return payload if len(payload) < len(new) else None


def decode_into(pieces: Sequence[memoryview], payload: memoryview, size: int) -> None:
    """Turn the base's bytes in these pieces of memory, which are a bucket together, into the new ones.

    Never writes outside of them, and writes nothing before the whole payload has been checked. Raises ProtocolError
    for a payload that encode() cannot have made for a bucket of this length, and for pieces that end within an element.
    With another base the result is wrong without an error, so verify the result's checksum.
    """
    length = sum(map(len, pieces))
    if any(len(piece) % size for piece in pieces) or not _HEADER.size <= len(payload) < length:
        raise ProtocolError(f"a delta of {len(payload)} bytes for a bucket of {length}")
    elements = length // size
    count, bits = _HEADER.unpack_from(payload)
    if count > MAX_CHANGED * elements:
        raise ProtocolError(f"a delta of {count} of {elements} elements")
    used = [place for place in range(_GAP_BYTES + size) if bits >> place & 1]
    column_bytes, unpacker = count * len(used), zlib.decompressobj(_RAW_DEFLATE)
    try:
        # Allow one byte too many, so that a payload that is too long is detected without being decompressed.
        data = unpacker.decompress(payload[_HEADER.size :], column_bytes + 1)
    except zlib.error as error:
        raise ProtocolError(f"a delta that is not deflated: {error}") from error
    if len(data) != column_bytes or not unpacker.eof or unpacker.unused_data:
        raise ProtocolError(f"columns of a delta with {len(data)} instead of {column_bytes} bytes")
    columns = [np.zeros((count, width), np.uint8) for width in (_GAP_BYTES, size)]
    for place, plane in zip(used, np.frombuffer(data, np.uint8).reshape(len(used), count), strict=True):
        column, byte = divmod(place, _GAP_BYTES)
        columns[column][:, byte] = plane
    gaps, numbers = (column.view(f"<u{column.shape[1]}")[:, 0] for column in columns)
    indices = np.cumsum(gaps, dtype=np.int64)
    indices += np.arange(count)
    if count and indices[-1] >= elements:
        raise ProtocolError("a delta that goes beyond its bucket")
    distances = (numbers >> 1) ^ -(numbers & 1)
    ends = np.cumsum([len(piece) // size for piece in pieces])
    first, start = 0, 0
    for piece, end, last in zip(pieces, ends.tolist(), np.searchsorted(indices, ends).tolist(), strict=True):
        if first < last:
            np.frombuffer(piece, f"<u{size}")[indices[first:last] - start] += distances[first:last]
        first, start = last, end


Part = tuple[int, str, int, int]
"""Serial of a snapshot; file and offset of what a bucket is in it; and how many bytes: as many as the bucket has, or
fewer for a delta against the snapshot before"""

# Limit for an offset in a file; leaves room for the bytes to read from there.
_LARGEST_OFFSET = 1 << 62


def shortest(parts: Any, size: int, held: int | None) -> list[Part]:
    """Return, in order, those of a bucket's parts that lead to its newest bytes and are the fewest bytes themselves: a
    whole bucket and the deltas behind it, or only deltas if the bucket is there as of snapshot `held`.

    size: of the bucket. Raises ProtocolError for malformed parts, or if none of them are a way.
    """
    try:
        checked = [(int(serial), str(file), int(offset), int(count)) for serial, file, offset, count in parts]
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"{parts!r:.100} are no parts of a bucket") from error
    if any(not (0 <= part[2] < _LARGEST_OFFSET and 0 <= part[3] <= size) for part in checked):
        raise ProtocolError(f"{parts!r:.100} lie nowhere in a file")
    ways = []
    starts = [(part[0], [part]) for part in checked if part[3] == size]
    for serial, way in [*starts, *((held, []) for part in checked if part[0] == held)]:
        later = [part for part in checked if part[0] > serial]
        deltas = [part for part in later if part[3] < size]
        # Where there is no delta between two snapshots, no way leads on.
        if _serials(deltas) == _serials(later):
            ways.append([*way, *deltas])
    if not ways:
        raise ProtocolError(f"{parts!r:.100} lead to no bucket")
    return min(ways, key=_bytes_of)


def _serials(parts: list[Part]) -> set[int]:
    return {part[0] for part in parts}


def _bytes_of(way: list[Part]) -> int:
    return sum(part[3] for part in way)


class _Key(NamedTuple):
    serial: int
    base: int
    bucket: int


class Deltas:
    """Makes deltas on threads. memory(serial, bucket): a bucket's bytes in its slot. make(new, base): see encode.
    made(): called when another delta is ready."""

    def __init__(
        self,
        runtime: Runtime,
        live: LiveSlots,
        memory: Callable[[int, int], memoryview],
        make: Callable[[memoryview, memoryview], memoryview | None],
        made: Callable[[], None],
    ):
        self._runtime, self._live, self._memory = runtime, live, memory
        self._make, self._on_made = make, made
        self._made: dict[_Key, memoryview | None] = {}
        """None if the bucket itself is better"""
        self._waiting: dict[_Key, None] = {}
        self._encoding: dict[int, tuple[_Key, float]] = {}
        """Thread -> the bucket that it encodes, and since when"""

    @property
    def oldest_start(self) -> float | None:
        """When the thread that has encoded longest began its bucket; None if all are idle."""
        return min((since for _, since in self._encoding.values()), default=None)

    def is_made(self, serial: int, base: int, bucket: int) -> bool:
        """Return whether get() is final. If not, the delta will be made."""
        key = _Key(serial, base, bucket)
        if key in self._made or not self._is_possible(serial, base):
            return True
        if all(key != encoded for encoded, _ in self._encoding.values()):
            self._waiting[key] = None
            self._make_next()
        return False

    def get(self, serial: int, base: int, bucket: int) -> memoryview | None:
        """Return the delta from the base's bucket to the newer one; None if the bucket itself is to be sent."""
        return self._made.get(_Key(serial, base, bucket))

    def _is_possible(self, serial: int, base: int) -> bool:
        return self._live.readable(serial) is not None and self._live.base_slot(base) is not None

    def _make_next(self) -> None:
        for thread in range(THREADS):
            while self._waiting and thread not in self._encoding:
                key = next(iter(self._waiting))
                del self._waiting[key]
                if self._is_possible(key.serial, key.base):
                    self._encoding[thread] = key, self._runtime.now()
                    self._live.retain(key.serial, key.base)
                    new, base = self._memory(key.serial, key.bucket), self._memory(key.base, key.bucket)
                    self._runtime.work(f"deltas-{thread}", partial(self._make, new, base), partial(self._done, thread))

    def _done(self, thread: int, payload: memoryview | None, error: BaseException | None) -> None:
        if error is not None:
            # This ends the server: a new one starts afresh, while this one would leave actors waiting.
            raise RuntimeError("a thread that encodes deltas has failed") from error
        key, _ = self._encoding.pop(thread)
        if self._is_possible(key.serial, key.base):
            self._made[key] = payload
        self._live.release(key.serial, key.base)
        self._make_next()
        self._on_made()

    def forget_stale(self) -> None:
        """Call after snapshots have ended. An actor that waits for a delta against one of them gets the bucket
        itself."""
        pairs = {(key.serial, key.base) for key in self._made}
        possible = {pair for pair in pairs if self._is_possible(*pair)}
        self._made = {key: payload for key, payload in self._made.items() if (key.serial, key.base) in possible}
        self._on_made()
