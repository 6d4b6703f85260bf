"""Who writes to a folder of the disk transport: one job at a time, or each would delete the other's versions."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from pathlib import Path

from torchtitan.errors import UserError

logger = logging.getLogger(__name__)

OWNER = "owner"
# Of file systems that have no locks.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class FolderOwner:
    """Holds the folder for its job until close(), or until the process is gone, however it went.

    Held by the trainer's first rank, which outlives its shard server. Raises UserError when another job holds the
    folder, or it cannot be written to.
    """

    def __init__(self, folder: Path, epoch: str):
        path = folder / OWNER
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Never deleted: whoever locked a deleted file would hold nothing.
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
