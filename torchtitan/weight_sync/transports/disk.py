"""disk: a rank writes each snapshot to a file in a shared folder, and refers actors to the bytes of a bucket in it. The
registry writes each version's manifest, points `latest` to it, and deletes old versions. No torch.

A file gets its name only when it is completely on the disk, and only then is its snapshot reported, so no partial file
ever has that name. Trainer and actors share the folder, which belongs to one job; weight_files.py describes its
contents. All of this happens on threads, so that a slow disk does not delay the newest version.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import xxhash

from torchtitan.errors import UserError
from torchtitan.weight_sync.memory import weight_files
from torchtitan.weight_sync.memory.manifest import Layout, Manifest
from torchtitan.weight_sync.transports.transport import Transport, in_host_memory
from torchtitan.weight_sync.wire import hook
from torchtitan.weight_sync.wire.runtime import Message, ProtocolError, Runtime, field_of

if TYPE_CHECKING:
    from torchtitan.config.job_config import WeightSync

logger = logging.getLogger(__name__)

# Limit for an offset in a file; leaves room for the bytes to read from there.
_LARGEST_OFFSET = 1 << 62


class SlotFiles:
    """Writes a rank's snapshots. folder: [weight_sync] disk_path; ranks: how many write to it; layout: this rank's
    only."""

    def __init__(self, folder: Path, epoch: str, rank: int, ranks: int, layout: Layout):
        self._folder, self._epoch, self._rank, self._ranks = folder.resolve(), epoch, rank, ranks
        self._layout = layout
        self._written: dict[int, tuple[Path, int]] = {}
        """Slot -> (file, where its data begins)"""

    def write(self, slot: int, version: int, memory: memoryview, moved: Callable[[], None]) -> Message:
        """Write a snapshot, calling moved() after each bucket. Returns the manifest's entry for the file. On a thread.

        Raises OSError if it cannot be written, for example because the disk is full, and leaves nothing behind then.
        """
        name = weight_files.file_name(self._rank, self._ranks)
        target = self._folder / weight_files.version_folder(self._epoch, version) / name
        about = {"epoch": self._epoch, "version": str(version), "rank": str(self._rank), "ranks": str(self._ranks)}
        header = weight_files.file_header(self._layout, about)
        hasher = xxhash.xxh3_128(header)

        def content(file: BinaryIO) -> None:
            file.write(header)
            step, lost = self._layout.bucket_bytes, False
            for bucket in range(self._layout.bucket_count(0)):
                data = memory[bucket * step : (bucket + 1) * step]
                hasher.update(data)
                asked = hook.at("write", version=version, rank=self._rank, bucket=bucket)
                lost |= "drop" in asked  # truncated from here on, as if the writer had not noticed
                if not lost:
                    file.write(hook.damaged(data) if "corrupt" in asked else data)
                moved()

        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_file(target, content, self._rank)
        except OSError as error:
            raise OSError(error.errno, f"{target} cannot be written: {error.strerror or error}") from error
        self._written[slot] = target, len(header)
        return {"file": target.name, "bytes": len(header) + len(memory), "xxh3_128": hasher.hexdigest()}

    def refer(self, slot: int, start: int, _end: int) -> Message:
        """Return the reference to the bucket that begins at `start` in this slot."""
        path, data = self._written[slot]
        return {"folder": str(self._folder), "file": str(path.relative_to(self._folder)), "offset": data + start}


def read_file(reference: Any, target: memoryview) -> None:
    """Fill a bucket's memory. Raises ProtocolError for an invalid reference, OSError if the file lacks these bytes."""
    folder, name = field_of(reference, "folder", str), field_of(reference, "file", str)
    offset = field_of(reference, "offset", int)
    inside = "\0" not in folder + name and not Path(name).is_absolute() and ".." not in Path(name).parts
    if not inside or offset > _LARGEST_OFFSET:
        raise ProtocolError(f"byte {offset} of {name!r} is no place in the folder")
    with (Path(folder) / name).open("rb") as file:
        file.seek(offset)
        if file.readinto(target) != len(target):
            raise OSError(f"{name} is truncated")


def replace_file(target: Path, content: Callable[[BinaryIO], object], owner: int) -> None:
    """Write a file under another name, flush it to the disk, and rename it. Leaves nothing behind on failure."""
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
    """Flush a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# An external reader that has just resolved `latest` still finds its version after the next one is published.
KEEP_VERSIONS = 2
# All files that a rank of any job, however it ended, may have written into a version's folder.
_FILES = ("rank-*.safetensors", "rank-*.json", "model.safetensors", weight_files.MANIFEST, ".*.tmp")

OWNER = "owner"
# Errors of file systems without locks.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class Catalogue:
    """The versions in a folder. folder: [weight_sync] disk_path. Only one job may write to it (FolderOwner)."""

    def __init__(self, runtime: Runtime, folder: Path, epoch: str):
        self._runtime, self._folder, self._epoch = runtime, folder, epoch
        self._published: list[int] = []

    def publish(self, manifest: Manifest, files: Iterable[Message], live: Collection[int]) -> None:
        """Publish a version. files: the description of each rank's file; live: versions that actors still pull."""
        self._published = [version for version in self._published if version != manifest.version] + [manifest.version]
        self._published = self._published[-KEEP_VERSIONS:]
        about = {"format": weight_files.FORMAT, **manifest.to_json(), "files": list(files)}
        self._work(partial(self._point_latest_to, about))
        self._work(partial(self._sweep, manifest.version, {*self._published, *live}))

    def make_room(self, live: Collection[int]) -> None:
        """After a failed write, keep only the newest version and those that actors still pull."""
        if self._published:
            self._work(partial(self._sweep, self._published[-1], {self._published[-1], *live}))

    def _work(self, function: Callable[[], None]) -> None:
        def done(_result: Any, error: BaseException | None) -> None:
            # Actors get references to their buckets anyway; the next version tries again.
            if error is not None:
                logger.error("%s is not as it should be: %s", self._folder, error)

        self._runtime.work("catalogue", function, done)

    def _point_latest_to(self, about: Message) -> None:
        name = weight_files.version_folder(self._epoch, about["version"])
        text = json.dumps(about).encode()
        replace_file(self._folder / name / weight_files.MANIFEST, lambda file: file.write(text), 0)
        temporary = self._folder / f".{weight_files.LATEST}.tmp"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(name)
        os.replace(temporary, self._folder / weight_files.LATEST)
        sync_folder(self._folder)

    def _sweep(self, newest: int, kept: Collection[int]) -> None:
        """Delete older versions, leftovers of earlier shard server processes, and earlier epochs, but nothing else that
        may be in the user's folder."""
        latest = (self._folder / weight_files.LATEST).resolve()
        for folder in self._folder.glob("*/version-*"):
            version = weight_files.version_of(folder)
            if version is None or folder.resolve() == latest:
                continue
            if folder.parent.name == self._epoch and (version > newest or version in kept):
                continue
            for pattern in _FILES:
                for path in folder.glob(pattern):
                    path.unlink(missing_ok=True)
            _remove_if_empty(folder)
            if folder.parent.name != self._epoch:
                _remove_if_empty(folder.parent)


def _remove_if_empty(folder: Path) -> None:
    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()


class FolderOwner:
    """Locks the folder for its job until close() or the end of the process.

    The trainer's first rank holds it, because it outlives its shard server. Raises UserError if another job holds the
    folder, or it cannot be written to.
    """

    def __init__(self, folder: Path, epoch: str):
        path = folder / OWNER
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # The file is never deleted, because a lock on a deleted file would protect nothing.
            self._file = path.open("a+")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.truncate(0)
            self._file.write(f"epoch {epoch}, process {os.getpid()}\n")
            self._file.flush()
        except BlockingIOError as error:
            self._file.seek(0)
            raise UserError(
                f"weight_sync.disk_path: {folder} belongs to another job that still runs "
                f"({self._file.read(200).strip()}): two jobs in one folder would delete each other's weights"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise UserError(f"weight_sync.disk_path: {path}: {error.strerror or error}") from error
            logger.warning("%s cannot be locked (%s): no other job may use this folder", path, error.strerror)

    def close(self) -> None:
        """Release the folder. May be called twice."""
        if not self._file.closed:
            # Unlock explicitly, because a process forked from this one may still have the file open.
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()


class Disk(Transport):
    """Files in a folder that trainer and actors share."""

    name = "disk"
    reference = "file"

    def __init__(self, options: Message | None = None):
        super().__init__(options)
        self._folder = Path(self.options.get("folder", ""))
        self._owner: FolderOwner | None = None

    @classmethod
    def configured(cls, config: WeightSync, run_dir: Path) -> Disk:
        return cls({"folder": str(Path(config.disk_path or run_dir / "weights").resolve())})

    def claim(self, epoch: str) -> None:
        self._owner = FolderOwner(self._folder, epoch)

    def close(self) -> None:
        if self._owner is not None:
            self._owner.close()

    def catalogue(self, runtime: Runtime, epoch: str) -> Catalogue:
        return Catalogue(runtime, self._folder, epoch)

    def sending(
        self, _runtime: Runtime, _slots: Any, layout: Layout, epoch: str, rank: int, ranks: int, /
    ) -> dict[str, Any]:
        files = SlotFiles(self._folder, epoch, rank, ranks, layout)
        return {"refer": files.refer, "persist": files.write}

    def fetch(self, reference: Message, target: Any) -> None:
        read_file(reference, in_host_memory(target))


TRANSPORT = Disk
