"""A bucket as its distance from an older one: lossless, and only where that is smaller and quick to make. No torch.

A shard server encodes each bucket of a snapshot once against a base, on threads, for all actors that hold it (Deltas).

    payload = encode(new, base, size)        # size = element_bytes(layout); None: send the bucket itself
    decode_into(target, payload, size)       # target holds the base's bytes before, the new ones after

Weights move by few of their last bits per step, and most of them in bfloat16 not at all. A payload is the number of
changed elements (32 bits), which planes follow (8 bits), and two columns with a number for each of the elements: how
many unchanged ones lie before it (32 bits), and by how much its bits as a number have changed (as wide as an element;
0, -1, 1, -2 ... as 0, 1, 2, 3 ...). A column is cut into planes, the lowest bytes of all numbers first. Those that are
not zero are one stream of raw deflate. Numbers are little-endian.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from torchtitan.weight_sync.layout_tables import DTYPE_BYTES
from torchtitan.weight_sync.manifest import Layout
from torchtitan.weight_sync.slots import LiveSlots
from torchtitan.weight_sync.wire import ProtocolError, Runtime

# With more of its elements changed a bucket goes as it is: beyond this a thread encodes less than 1 Gbit per second.
MOST_CHANGED = 0.5

_HEADER = struct.Struct("<IB")
# Gaps, and the elements of a bucket, which has at most 2^30 bytes.
_GAP_BYTES = 4
# No header and no checksum: the bucket has one of its own.
_RAW_DEFLATE = -15
# 256 kB, for longer blocks.
_MOST_MEMORY = 9

# Each does about a gigabyte of new weights per second where few of them have changed.
THREADS = 2


def element_bytes(layout: Layout) -> int:
    """Bytes of the elements that deltas of this layout consist of: the smallest dtype's, so that with several dtypes
    a changed float32 is two changed halves (at most). Less only where a bucket would end within an element."""
    sizes = {DTYPE_BYTES[dtype] for dtype, _shape in layout.parameters.kinds}
    return math.gcd(4, layout.bucket_bytes, *sizes)


def encode(new: memoryview, base: memoryview, size: int) -> memoryview | None:
    """What makes `base` into `new`, which are equally long; None where that is not smaller, or too much has changed.

    size: bytes of an element, 1, 2 or 4. Raises ValueError for memory that is not a whole number of elements.
    """
    if len(new) != len(base) or len(new) % size:
        raise ValueError(f"a delta of {len(new)} against {len(base)} bytes, in elements of {size}")
    elements, old = np.frombuffer(new, f"<u{size}"), np.frombuffer(base, f"<u{size}")
    changed = elements != old
    if np.count_nonzero(changed) > MOST_CHANGED * len(elements):
        return None
    indices = np.flatnonzero(changed)
    gaps = np.empty(len(indices), f"<u{_GAP_BYTES}")
    gaps[:1] = indices[:1]
    np.subtract(indices[1:], indices[:-1] + 1, out=gaps[1:], casting="unsafe")
    distances = (elements[indices] - old[indices]).view(f"<i{size}")
    numbers = (distances << 1) ^ (distances >> (8 * size - 1))
    # Runs of zeros and Huffman codes are all there is to find, the codes by plane.
    packer = zlib.compressobj(1, zlib.DEFLATED, _RAW_DEFLATE, _MOST_MEMORY, zlib.Z_RLE)
    parts, used = [], 0
    planes = [plane for column in (gaps, numbers) for plane in column.view(np.uint8).reshape(-1, column.itemsize).T]
    for place, plane in enumerate(planes):
        if plane.any():
            used |= 1 << place
            parts += [packer.compress(np.ascontiguousarray(plane).data), packer.flush(zlib.Z_SYNC_FLUSH)]
    payload = memoryview(b"".join((_HEADER.pack(len(indices), used), *parts, packer.flush())))
    return payload if len(payload) < len(new) else None


def decode_into(target: memoryview, payload: memoryview, size: int) -> None:
    """Make the base's bytes in `target` the new ones.

    Never writes outside of `target`, and writes nothing at all before the whole payload has been read. Raises
    ProtocolError for a payload that encode() does not make for a bucket of this length. Against another base it makes
    other bytes: compare the result's checksum.
    """
    if len(target) % size or not _HEADER.size <= len(payload) < len(target):
        raise ProtocolError(f"a delta of {len(payload)} bytes for a bucket of {len(target)}")
    elements = np.frombuffer(target, f"<u{size}")
    count, bits = _HEADER.unpack_from(payload)
    if count > MOST_CHANGED * len(elements):
        raise ProtocolError(f"a delta of {count} of {len(elements)} elements")
    used = [place for place in range(_GAP_BYTES + size) if bits >> place & 1]
    length, unpacker = count * len(used), zlib.decompressobj(_RAW_DEFLATE)
    try:
        # One byte more than is right, so that what is too long is seen without being made.
        data = unpacker.decompress(payload[_HEADER.size :], length + 1)
    except zlib.error as error:
        raise ProtocolError(f"a delta that is not deflated: {error}") from error
    if len(data) != length or not unpacker.eof or unpacker.unused_data:
        raise ProtocolError(f"columns of a delta with {len(data)} instead of {length} bytes")
    columns = [np.zeros((count, width), np.uint8) for width in (_GAP_BYTES, size)]
    for place, plane in zip(used, np.frombuffer(data, np.uint8).reshape(len(used), count), strict=True):
        column, byte = divmod(place, _GAP_BYTES)
        columns[column][:, byte] = plane
    gaps, numbers = (column.view(f"<u{column.shape[1]}")[:, 0] for column in columns)
    indices = np.cumsum(gaps, dtype=np.int64)
    indices += np.arange(count)
    if count and indices[-1] >= len(elements):
        raise ProtocolError("a delta that goes beyond its bucket")
    elements[indices] += (numbers >> 1) ^ -(numbers & 1)


class _Key(NamedTuple):
    serial: int
    base: int
    bucket: int


class Deltas:
    """memory(serial, bucket): a bucket's bytes in its slot. make(new, base): see encode. made(): one more is there."""

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
        """None where the bucket itself is better"""
        self._waiting: dict[_Key, None] = {}
        self._at: dict[int, tuple[_Key, float]] = {}
        """Thread -> the bucket that it is at, and since when"""

    @property
    def began(self) -> float | None:
        """Since when a thread has been at one bucket: the longest."""
        return min((since for _, since in self._at.values()), default=None)

    def is_made(self, serial: int, base: int, bucket: int) -> bool:
        """Whether get() has the last word. If not, the delta will be made."""
        key = _Key(serial, base, bucket)
        if key in self._made or not self._is_possible(serial, base):
            return True
        if all(key != one for one, _ in self._at.values()):
            self._waiting[key] = None
            self._make_next()
        return False

    def get(self, serial: int, base: int, bucket: int) -> memoryview | None:
        """What makes the base's bucket the newer one; None where the bucket itself is to be sent."""
        return self._made.get(_Key(serial, base, bucket))

    def _is_possible(self, serial: int, base: int) -> bool:
        return self._live.readable(serial) is not None and self._live.base_slot(base) is not None

    def _make_next(self) -> None:
        for thread in range(THREADS):
            while self._waiting and thread not in self._at:
                key = next(iter(self._waiting))
                del self._waiting[key]
                if self._is_possible(key.serial, key.base):
                    self._at[thread] = key, self._runtime.now()
                    self._live.hold(key.serial, key.base)
                    new, base = self._memory(key.serial, key.bucket), self._memory(key.base, key.bucket)
                    self._runtime.work(f"deltas-{thread}", partial(self._make, new, base), partial(self._done, thread))

    def _done(self, thread: int, payload: memoryview | None, error: BaseException | None) -> None:
        if error is not None:
            # Ends the process: a new one starts with empty hands, this one would leave actors waiting.
            raise RuntimeError("a thread that encodes deltas has failed") from error
        key, _ = self._at.pop(thread)
        if self._is_possible(key.serial, key.base):
            self._made[key] = payload
        self._live.let_go(key.serial, key.base)
        self._make_next()
        self._on_made()

    def forget_what_is_gone(self) -> None:
        """After snapshots have ended. An actor that waits for a delta against one of them gets the bucket itself."""
        there = {pair for pair in {(key.serial, key.base) for key in self._made} if self._is_possible(*pair)}
        self._made = {key: payload for key, payload in self._made.items() if (key.serial, key.base) in there}
        self._on_made()
