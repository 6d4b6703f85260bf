"""disk: a rank writes each of its snapshots to a file, and says which part of it a bucket is. No torch.

A file gets its name when all of it is on the disk, and its snapshot is reported only then: half a file is never named.
Trainer and actors share the folder; weight_files.py says what is in it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from torchtitan.weight_sync import faults
from torchtitan.weight_sync.manifest import BucketKey, Layout
from torchtitan.weight_sync.weight_files import PackedRank, file_name, version_folder
from torchtitan.weight_sync.wire import Message, ProtocolError, field_of

logger = logging.getLogger(__name__)

# In a file, with what is read from there on.
_LARGEST_OFFSET = 1 << 62


class SlotFiles:
    """folder: [weight_sync] disk_path; ranks: how many write to it; layout: this rank's alone. Raises ValueError for a
    layout that files cannot hold."""

    def __init__(self, folder: Path, epoch: str, rank: int, ranks: int, layout: Layout):
        self._folder, self._epoch, self._rank, self._ranks = folder.resolve(), epoch, rank, ranks
        self._layout, self._packed = layout, PackedRank(layout, 0)
        self._written: dict[int, tuple[Path, int]] = {}
        """Slot -> (file, where its data begins)"""

    def write(self, slot: int, version: int, memory: memoryview, moved: Callable[[], None]) -> Message:
        """Write a snapshot; what the manifest has to say of the file. On a thread; moved(): one more bucket is there.

        Raises OSError where there is no room, and leaves nothing behind then.
        """
        target = self._folder / version_folder(self._epoch, version) / file_name(self._rank, self._ranks)
        about = {"epoch": self._epoch, "version": str(version), "rank": str(self._rank), "ranks": str(self._ranks)}
        header = self._packed.header(about)
        hasher = xxhash.xxh3_128(header)

        def content(file: BinaryIO) -> None:
            file.write(header)
            step, lost = self._layout.bucket_bytes, False
            for bucket in range(self._layout.bucket_count(0)):
                data = memory[bucket * step : (bucket + 1) * step]
                pieces = [data[low:high] for low, high in self._packed.bucket(bucket)[1]]
                for piece in pieces:
                    hasher.update(piece)
                asked = faults.at("write", version=version, rank=self._rank, bucket=bucket)
                lost |= "drop" in asked  # truncated from here on, as if the writer had not noticed
                if "corrupt" in asked and pieces:
                    pieces[0] = faults.damaged(pieces[0])
                file.writelines([] if lost else pieces)
                moved()

        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_file(target, content, self._rank)
        except OSError as error:
            raise OSError(error.errno, f"{target} cannot be written: {error.strerror or error}") from error
        self._written[slot] = target, len(header)
        size = len(header) + self._packed.data_bytes
        return {"file": target.name, "bytes": size, "xxh3_128": hasher.hexdigest()}

    def refer(self, slot: int, start: int, _end: int) -> Message:
        """Where the bucket that begins at `start` in this slot is."""
        path, data = self._written[slot]
        offset, _ = self._packed.bucket(start // self._layout.bucket_bytes)
        file = path.relative_to(self._folder)
        return {"folder": str(self._folder), "file": str(file), "offset": data + offset}


class FileReader:
    """An actor's side. layout: of all ranks."""

    def __init__(self, layout: Layout):
        self._layout = layout
        self._packed: dict[int, PackedRank] = {}

    def copy(self, reference: Any, key: BucketKey, target: memoryview) -> None:
        """Fill a bucket's memory, but for what lies between shards. Raises ProtocolError for what names no place in a
        file, OSError for what cannot be read."""
        folder, name = field_of(reference, "folder", str), field_of(reference, "file", str)
        offset = field_of(reference, "offset", int)
        inside = "\0" not in folder + name and not Path(name).is_absolute() and ".." not in Path(name).parts
        if not inside or offset > _LARGEST_OFFSET:
            raise ProtocolError(f"byte {offset} of {name!r} is no place in the folder")
        rank, bucket = key
        if rank not in self._packed:
            self._packed[rank] = PackedRank(self._layout, rank)
        pieces = [target[low:high] for low, high in self._packed[rank].bucket(bucket)[1]]
        with (Path(folder) / name).open("rb") as file:
            file.seek(offset)
            if any(file.readinto(piece) != len(piece) for piece in pieces):
                raise OSError(f"{name} is truncated")


def replace_file(target: Path, content: Callable[[BinaryIO], object], owner: int) -> None:
    """Write a file under another name, bring it to the disk, and rename it. Leaves nothing behind where that fails."""
    temporary = target.with_name(f".{target.name}-{owner}.tmp")
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
    """Bring names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
