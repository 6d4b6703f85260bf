"""Files that are on the disk, whole, when a function returns; and what a file hashes to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import xxhash

_READ_BYTES = 1 << 24


def write_file(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(target: Path, content: Callable[[BinaryIO], object]) -> None:
    """Write a file under another name, flush it to the disk, and rename it. Leaves nothing behind on failure."""
    temporary = target.with_name(f".{target.name}-{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            content(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except Exception:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_checksum(path: Path) -> str:
    """Return the xxh3-128 of a whole file. Raises OSError."""
    hasher = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_READ_BYTES):
            hasher.update(block)
    return hasher.hexdigest()
