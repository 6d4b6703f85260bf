"""Checksums of buckets. Which kind a job uses is part of its layout: shard servers compute them, actors verify them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import xxhash


def reads_devices(kind: str) -> bool:
    """Whether slots and staging memory of a layout with this kind may be on a device."""
    return kind == "sum"


def bucket_checksum(data: bytes | memoryview) -> str:
    """xxh3-128 of one bucket's bytes in host memory. Gives up the interpreter's lock while it works."""
    return xxhash.xxh3_128_hexdigest(data)


def streaming_checksum(kind: str) -> Any | None:
    """What takes a bucket piece by piece (update) and then says its checksum (hexdigest); None where a kind cannot."""
    return xxhash.xxh3_128() if kind == "xxh3" else None


def checksum_function(kind: str) -> Callable[[Any], str]:
    """The function of a layout's checksum kind: xxh3 reads host memory, sum tensors wherever they are.

    Raises ValueError for a kind that does not exist.
    """
    if kind == "xxh3":
        return bucket_checksum
    if kind != "sum":
        raise ValueError(f"unknown checksum {kind!r}")
    from torchtitan.weight_sync.device_slots import sum_checksum  # torch

    return sum_checksum
