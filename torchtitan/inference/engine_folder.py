"""A folder of an engine's own, where its unix sockets lie: nothing is left of them once it is gone.

vLLM and SGLang make sockets with random names among the temporary files; those of a process that is killed stay there
for ever. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

# With the host in it: where machines share temporary files, locks on folders need not reach from one to the other.
PREFIX = f"torchtitan-engine-{hashlib.blake2b(socket.gethostname().encode(), digest_size=3).hexdigest()}-"
# The path of a unix socket has at most 107 bytes. vLLM's names are the longest: 36 characters behind a slash.
LONGEST_FOLDER = 107 - 37
RANDOM_PART = "12345678"


@contextlib.contextmanager
def engine_folder() -> Iterator[Path]:
    """A new folder with a short path for the block. Those whose owners were killed are removed on this occasion."""
    parent = _parent()
    _remove_ownerless(parent)
    path, lock = _make(parent)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _parent() -> Path:
    """Where temporary files belong, unless its path is too long for sockets below it."""
    usual, short = Path(tempfile.gettempdir()), Path("/tmp")
    fits = len(os.fsencode(usual / f"{PREFIX}{RANDOM_PART}")) <= LONGEST_FOLDER
    return usual if fits or not os.access(short, os.W_OK) else short


def _make(parent: Path) -> tuple[Path, int | None]:
    """A folder and the lock on it, which lasts as long as this process, however that ends."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        # Until it is locked it looks as if its owner had been killed: another process may be removing it.
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            lock = _lock(path)
            if path.is_dir():
                return path, lock
            if lock is not None:
                os.close(lock)


def _remove_ownerless(parent: Path) -> None:
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid() and (lock := _lock(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """A descriptor that keeps it locked while it is open; None where the file system has no locks.

    Raises OSError: another process has locked it (BlockingIOError), or there is no such folder.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
