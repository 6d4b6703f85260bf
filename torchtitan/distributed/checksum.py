"""A checksum of memory that is cheap on a GPU and the same on every device.

Over the bytes as 32-bit words w[i] (the last one padded with zeros), it is the sum of w[i] and the sum of w[i] * (2i +
1), both modulo 2^64. These are integers, so the order of additions does not matter. A flipped bit changes the second
sum by an odd multiple of a power of two below 2^32. Two different words that swap places change it by the product of
their difference (below 2^32) and twice their distance (below 2^32), which is not divisible by 2^64; the same holds for
swapped halves of words. It detects accidents; authentication guards against dishonest peers.
"""

from __future__ import annotations

from mmap import mmap

import numpy
import torch

from torchtitan.distributed.device import in_background

_WORD_BYTES = 4
# All rows share one row of weights, and this many rows fit a cache (the fastest on a CPU: 1.7 GB/s per core).
_ROW_WORDS = 1 << 14
_ROWS_AT_A_TIME = 64


def memory_tensor(memory: bytes | bytearray | memoryview | mmap | torch.Tensor) -> torch.Tensor:
    """Return a one-dimensional uint8 tensor over memory. Read-only memory is copied, because torch warns of it."""
    if isinstance(memory, torch.Tensor):
        return memory
    if memoryview(memory).readonly:
        memory = bytearray(memory)
    return torch.from_numpy(numpy.frombuffer(memory, numpy.uint8))


def sum_checksum(data: bytes | bytearray | memoryview | torch.Tensor) -> str:
    """Return the checksum as 32 hexadecimal digits. data: host memory or a one-dimensional uint8 tensor on any
    device."""
    tensor = memory_tensor(data)
    with in_background(tensor.device):
        words = _words(tensor)
        whole_rows_end = len(words) // _ROW_WORDS * _ROW_WORDS
        weights = 2 * torch.arange(_ROW_WORDS, dtype=torch.int64, device=tensor.device) + 1
        parts = [
            *words[:whole_rows_end].view(-1, _ROW_WORDS).split(_ROWS_AT_A_TIME),
            words[whole_rows_end:].view(1, -1),
        ]
        sums = torch.cat([_row_sums(part, weights) for part in parts], 1).cpu()
    plain, weighted = (numpy.asarray(row, dtype=numpy.uint64) for row in sums.numpy().view(numpy.uint64))
    # Row r starts at word r * _ROW_WORDS, so its weights are larger by twice that.
    starts = 2 * _ROW_WORDS * numpy.arange(len(plain), dtype=numpy.uint64)
    total = (weighted + starts * plain).sum(dtype=numpy.uint64)
    return f"{int(plain.sum(dtype=numpy.uint64)):016x}{int(total):016x}"


def _words(data: torch.Tensor) -> torch.Tensor:
    if len(data) % _WORD_BYTES or data.storage_offset() % _WORD_BYTES or data.data_ptr() % _WORD_BYTES:
        padded = torch.zeros(-(-len(data) // _WORD_BYTES) * _WORD_BYTES, dtype=torch.uint8, device=data.device)
        padded[: len(data)] = data
        data = padded
    return data.view(torch.int32)


def _row_sums(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return [2, rows] int64: plain sums, and sums weighted by 2 * column + 1."""
    return torch.stack((rows.sum(1, dtype=torch.int64), (rows * weights[: rows.shape[1]]).sum(1)))
