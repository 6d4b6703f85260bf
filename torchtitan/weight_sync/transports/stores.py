"""Where the disk transport keeps files: a folder that trainer and actors share, or a prefix in an object store (any URL
that fsspec knows). No torch.

Both offer the same: a file has its name only when it is complete, and no read waits without a deadline. A name is
relative, with "/" between its parts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from torchtitan.errors import Unreachable, UserError
from torchtitan.utils.files import replace_file, sync_folder
from torchtitan.weight_sync.wire.runtime import ProtocolError

logger = logging.getLogger(__name__)

OWNER = "owner"
LATEST = "latest"
Place = tuple[str, int]
"""File, and where the bytes begin in it"""
# One read takes milliseconds on a disk, and at least a megabyte per second is expected of an object store.
READ_SECONDS, READ_SECONDS_PER_BYTE = 10.0, 1e-6
_READ_BYTES = 4 << 20
# An object of at least this size, so that requests do not cost more than bytes; so many are uploaded at once.
OBJECT_BYTES, UPLOADS = 16 << 20, 4
# How often to try an object store, and how long to wait before the second time; twice as long before each further one.
TRIES, RETRY_SECONDS = 3, 0.2
# Errors of file systems without locks.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class Store:
    """Files under `url`."""

    def __init__(self, url: str):
        self.url = url
        self._hung: threading.Thread | None = None

    def in_time(self, call: Callable[[], Any], more_s: float = 0.0) -> Any:
        """Return what call() does. Raises TimeoutError if it takes too long: its thread is left alone then, and until
        it ends everybody else fails at once, so that a disk that hangs does not hold a thread for each bucket."""
        if self._hung is not None and self._hung.is_alive():
            raise TimeoutError(f"an earlier call of {self.url} still hangs")
        outcome: Future[Any] = Future()

        def work() -> None:
            try:
                outcome.set_result(call())
            except BaseException as error:  # Whatever it is: another thread waits for the outcome.
                outcome.set_exception(error)

        thread = threading.Thread(target=work, name=f"store {self.url}", daemon=True)
        thread.start()
        thread.join(READ_SECONDS + more_s)
        if thread.is_alive():
            self._hung = thread
            raise TimeoutError(f"{self.url} does not answer")
        return outcome.result()


class Folder(Store):
    """A folder. Everything is flushed to the disk before it is visible."""

    def __init__(self, url: str):
        super().__init__(url)
        self._path = Path(url.removeprefix("file://"))
        self._opened: tuple[str, Any] = "", None
        """The file that was read last: who reads a version opens it once, and not once for each bucket"""

    def write(self, name: str, pieces: Iterable[Any]) -> list[Place]:
        """Write a file. Returns the place of each piece. Raises OSError, and leaves nothing behind then."""
        places: list[Place] = []

        def content(file: BinaryIO) -> None:
            for piece in pieces:
                places.append((name, file.tell()))
                file.write(piece)

        (self._path / name).parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._path / name, content)
        return places

    def put(self, name: str, data: bytes) -> None:
        """Write a small file. Raises OSError."""
        replace_file(self._path / name, lambda file: file.write(data))

    def read(self, name: str, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes at `offset`. Raises OSError if they are not there or do not come in time."""
        if self._opened[0] != name:
            self._opened = name, self.in_time(partial((self._path / name).open, "rb", buffering=0))
        file, done = self._opened[1], 0
        # What is not in memory, or a system cannot tell, is read below; macOS has no such flag.
        with contextlib.suppress(OSError, AttributeError):
            done = os.preadv(file.fileno(), [target], offset, os.RWF_NOWAIT)
        while done < len(target):
            count = min(_READ_BYTES, len(target) - done)
            # Not into `target`: a read that hangs may end when the memory holds another version.
            call = partial(os.pread, file.fileno(), count, offset + done)
            piece = self.in_time(call, count * READ_SECONDS_PER_BYTE)
            if not piece:
                raise OSError(f"{name} is truncated")
            target[done : done + len(piece)] = piece
            done += len(piece)

    def names(self) -> Iterator[str]:
        """Yield what lies in folders of versions, and then each such folder, with a "/" at its end."""
        for folder in self._path.glob("*/version-*/"):
            for path in (*folder.glob("*"), folder):
                yield path.relative_to(self._path).as_posix() + "/" * (path == folder)

    def remove(self, names: Collection[str]) -> None:
        """Delete these files, and these folders if they are empty by then."""
        for name in names:
            path = self._path / name
            if not name.endswith("/"):
                path.unlink(missing_ok=True)
                continue
            for folder in (path, path.parent):
                if folder.exists() and not any(folder.iterdir()):
                    folder.rmdir()

    def point_to(self, name: str) -> None:
        """Make `name` the newest version that is complete by itself."""
        temporary = self._path / f".{LATEST}.tmp"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(name)
        os.replace(temporary, self._path / LATEST)
        sync_folder(self._path)

    def newest(self) -> str:
        """Return what point_to() was last called with; empty if it never was."""
        latest = self._path / LATEST
        return os.readlink(latest) if latest.is_symlink() else ""

    def claim(self, about: str) -> None:
        """Lock the folder for its job until release() or the end of the process. about: says which job it is.

        The trainer's first rank holds it, because it outlives its shard server. Raises UserError if another job holds
        the folder, or it cannot be written to; Unreachable if that takes too long.
        """
        path = self._path / OWNER
        try:
            holder = self.in_time(partial(self._lock, path, about))
        except TimeoutError as error:
            raise Unreachable(f"weight_sync.disk.path: {path}: {error}") from error
        except OSError as error:
            raise UserError(f"weight_sync.disk.path: {path}: {error.strerror or error}") from error
        if holder:
            raise UserError(
                f"weight_sync.disk.path: {self.url} belongs to another job that still runs ({holder}): two jobs in one "
                "folder would delete each other's weights"
            )

    def _lock(self, path: Path, about: str) -> str:
        """Lock the file, or return what the job that holds it says of itself."""
        self._path.mkdir(parents=True, exist_ok=True)
        # The file is never deleted, because a lock on a deleted file would protect nothing.
        self._file = path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            return self._file.read(400).strip() or "it has not said which"
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning("%s cannot be locked (%s): no other job may use this folder", path, error.strerror)
            return ""
        self._file.truncate(0)
        self._file.write(f"{about}, process {os.getpid()}\n")
        self._file.flush()
        return ""

    def release(self) -> None:
        """Undo claim(), within a deadline. May be called twice."""

        def unlock() -> None:
            # Explicitly, because a process forked from this one may still have the file open.
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()

        if not self._file.closed:
            try:
                self.in_time(unlock)
            except OSError as error:
                logger.warning("%s: the lock ends only with this process: %s", self._path / OWNER, error)


class Objects(Store):
    """A prefix in an object store. A file is a row of objects NAME/00000, NAME/00001 …, each of them sent in one piece:
    an upload that ends half-way leaves whole objects that nothing names. See Folder for the methods."""

    def __init__(self, url: str):
        super().__init__(url)
        if "::" in url:
            raise ProtocolError(f"{url!r} leads through several file systems")
        # Imported here because most runs need none, and it takes a moment.
        from fsspec.core import url_to_fs

        self._files, self._root = url_to_fs(url, use_listings_cache=False)
        self._owner = ""

    def _call(self, method: str, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the file system, again if it fails. Raises OSError."""
        for attempt in range(1, TRIES + 1):
            try:
                return getattr(self._files, method)(f"{self._root}/{name}".rstrip("/"), *arguments, **options)
            except FileNotFoundError:
                raise
            except Exception as error:  # Every library has errors of its own for a network that fails.
                if attempt == TRIES:
                    code = errno.EIO
                    # No ConnectionError, which means a broken link and is tried again without a bound.
                    if isinstance(error, OSError) and not isinstance(error, ConnectionError):
                        code = error.errno or errno.EIO
                    raise OSError(code, f"{method} {self.url}/{name}: {error}") from error
                time.sleep(RETRY_SECONDS * 2 ** (attempt - 1))

    def write(self, name: str, pieces: Iterable[Any]) -> list[Place]:
        places: list[Place] = []
        waiting: list[Any] = []
        sent: list[Future[None]] = []
        size = 0
        with ThreadPoolExecutor(UPLOADS) as pool:

            def send() -> None:
                if len(sent) >= UPLOADS:  # so many objects are in memory at most
                    sent[-UPLOADS].result()
                sent.append(pool.submit(self.put, f"{name}/{len(sent):05d}", b"".join(waiting)))
                waiting.clear()

            for piece in pieces:
                places.append((f"{name}/{len(sent):05d}", size))
                waiting.append(piece)
                size += len(piece)
                if size >= OBJECT_BYTES:
                    send()
                    size = 0
            if waiting:
                send()
        for upload in sent:
            upload.result()
        return places

    def put(self, name: str, data: bytes) -> None:
        self._call("pipe_file", name, data)

    def read(self, name: str, offset: int, target: memoryview) -> None:
        end = offset + len(target)
        call = partial(self._call, "cat_file", name, start=offset, end=end)
        data = self.in_time(call, len(target) * READ_SECONDS_PER_BYTE)
        if len(data) != len(target):
            raise OSError(f"{name} is truncated")
        target[:] = data

    def names(self) -> Iterator[str]:
        names = (path.removeprefix(f"{self._root}/") for path in self._call("find", ""))
        yield from (name for name in names if "/version-" in name)

    def remove(self, names: Collection[str]) -> None:
        if names:
            self._files.rm([f"{self._root}/{name}" for name in names])

    def point_to(self, name: str) -> None:
        self.put(LATEST, name.encode())

    def newest(self) -> str:
        return self._text(LATEST)

    def claim(self, about: str) -> None:
        """Objects cannot be locked: the job that has written its name here last owns them until it ends, also if it
        dies, and its next run may go on. Raises as Folder.claim does."""
        try:
            owner = self.in_time(partial(self._text, OWNER))
            if owner and owner != about:
                raise UserError(
                    f"weight_sync.disk.path: {self.url} belongs to another job ({owner}): two jobs there would delete "
                    f"each other's weights. If that job has ended for good, delete {self.url}/{OWNER}"
                )
            self.in_time(partial(self.put, OWNER, about.encode()))
            self._owner = about
        except TimeoutError as error:
            raise Unreachable(f"weight_sync.disk.path: {error}") from error
        except OSError as error:
            raise UserError(f"weight_sync.disk.path: {self.url}: {error.strerror or error}") from error

    def release(self) -> None:
        """Undo claim(), within a deadline. The job has ended, and ends as well without its store."""
        try:
            if self._owner and self.in_time(partial(self._text, OWNER)) == self._owner:
                self.in_time(partial(self.remove, [OWNER]))
        except Exception as error:  # of any library
            logger.warning("delete %s/%s for another job, because this one could not: %s", self.url, OWNER, error)

    def _text(self, name: str) -> str:
        try:
            return str(self._call("cat_file", name).decode())
        except FileNotFoundError:
            return ""


def store_of(url: str) -> Folder | Objects:
    """Return the store at a path or URL. Raises ImportError without the library of its protocol, ValueError for an
    unknown one."""
    return Objects(url) if "://" in url and not url.startswith("file://") else Folder(url)
