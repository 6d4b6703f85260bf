"""Checksums by their definition, slow and without torch."""

from __future__ import annotations

import numpy


def sum_checksum_numpy(data: bytes | bytearray | memoryview) -> str:
    """See torchtitan/weight_sync/memory/device_slots.py."""
    raw = numpy.frombuffer(data, numpy.uint8)
    padded = numpy.zeros(-(-len(raw) // 4) * 4, numpy.uint8)
    padded[: len(raw)] = raw
    words = padded.view("<i4").astype(numpy.int64).view(numpy.uint64)
    weights = 2 * numpy.arange(len(words), dtype=numpy.uint64) + numpy.uint64(1)
    plain, weighted = words.sum(dtype=numpy.uint64), (words * weights).sum(dtype=numpy.uint64)
    return f"{int(plain):016x}{int(weighted):016x}"
