"""disk: what is in the shared folder, and which job writes to it. The registry writes each version's manifest, leads
`latest` to it, and clears up.

All of that on a thread, so that a slow disk keeps no actor from the newest version. No torch.
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
from typing import Any

from torchtitan.errors import UserError
from torchtitan.weight_sync.disk import replace_file, sync_folder
from torchtitan.weight_sync.manifest import Manifest
from torchtitan.weight_sync.runtime import Runtime
from torchtitan.weight_sync.weight_files import FORMAT, LATEST, MANIFEST, version_folder, version_of
from torchtitan.weight_sync.wire import Message

logger = logging.getLogger(__name__)

# A reader from outside that has just looked at `latest` still finds its version when the next one comes.
KEEP_VERSIONS = 2
# Everything that a rank of any job, however it ended, may have written into a version's folder.
_FILES = ("rank-*.safetensors", "rank-*.json", "model.safetensors", MANIFEST, ".*.tmp")

OWNER = "owner"
# Of file systems that have no locks.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class Catalogue:
    """folder: [weight_sync] disk_path. Only one job may write to it (FolderOwner)."""

    def __init__(self, runtime: Runtime, folder: Path, epoch: str):
        self._runtime, self._folder, self._epoch = runtime, folder, epoch
        self._published: list[int] = []

    def publish(self, manifest: Manifest, files: Iterable[Message], live: Collection[int]) -> None:
        """This version is published; all ranks have written what they say in `files`. live: versions that actors still
        pull."""
        self._published = [version for version in self._published if version != manifest.version] + [manifest.version]
        self._published = self._published[-KEEP_VERSIONS:]
        entries = [
            {**file, "bucket_checksums": list(checksums)}
            for file, checksums in zip(files, manifest.checksums, strict=True)
        ]
        about = {
            "format": FORMAT,
            "epoch": manifest.epoch,
            "version": manifest.version,
            "digest": manifest.digest,
            "layout_id": manifest.layout_id,
            "ranks": len(entries),
            "files": entries,
        }
        self._work(partial(self._lead_to, about))
        self._work(partial(self._sweep, manifest.version, {*self._published, *live}))

    def make_room(self, live: Collection[int]) -> None:
        """A version could not be written: keep only the newest one and those that actors still pull."""
        if self._published:
            self._work(partial(self._sweep, self._published[-1], {self._published[-1], *live}))

    def _work(self, function: Callable[[], None]) -> None:
        def done(_result: Any, error: BaseException | None) -> None:
            # Actors are told where their buckets are in any case; the next version tries again.
            if error is not None:
                logger.error("%s is not as it should be: %s", self._folder, error)

        self._runtime.work("catalogue", function, done)

    def _lead_to(self, about: Message) -> None:
        name = version_folder(self._epoch, about["version"])
        text = json.dumps(about).encode()
        replace_file(self._folder / name / MANIFEST, lambda file: file.write(text), 0)
        temporary = self._folder / f".{LATEST}.tmp"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(name)
        os.replace(temporary, self._folder / LATEST)
        sync_folder(self._folder)

    def _sweep(self, newest: int, kept: Collection[int]) -> None:
        """Delete older versions, what an earlier life of a shard server has left, and earlier epochs; nothing else that
        may be in a folder of the user's."""
        latest = (self._folder / LATEST).resolve()
        for folder in self._folder.glob("*/version-*"):
            version = version_of(folder)
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
    """Holds the folder for its job until close(), or until the process is gone, however it went.

    Held by the trainer's first rank, which outlives its shard server. Raises UserError when another job holds the
    folder, or it cannot be written to.
    """

    def __init__(self, folder: Path, epoch: str):
        path = folder / OWNER
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Never deleted: a process that locked a deleted file would hold nothing.
            self._file = path.open("a+")
        except OSError as error:
            raise UserError(f"weight_sync.disk_path: {path} cannot be opened: {error.strerror or error}") from error
        try:
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
        """May be called twice."""
        if not self._file.closed:
            # Explicitly: a process that was forked from this one may have the file open, too.
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()
