"""A rank's files of the disk transport: written once per version however many actors read them, then deleted.

A file is written under another name, brought to the disk and renamed; the manifest follows when all ranks' files are
there, and `latest` when the manifest is. What cannot be written leaves nothing behind. No torch.
"""

from __future__ import annotations

import enum
import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from torchtitan.weight_sync import faults
from torchtitan.weight_sync.checksums import bucket_checksum
from torchtitan.weight_sync.event_loop import EventLoop
from torchtitan.weight_sync.manifest import Layout
from torchtitan.weight_sync.progress import Progress
from torchtitan.weight_sync.states.slot import SlotKeeper
from torchtitan.weight_sync.weight_files import (
    FORMAT,
    LATEST,
    MANIFEST,
    PackedRank,
    entry_name,
    file_checksum,
    file_name,
    version_folder,
)

logger = logging.getLogger(__name__)

# A reader from outside that has just looked at `latest` still finds its version when the next one comes.
KEEP_VERSIONS = 2
# After a failure nothing is written for so long: a full disk does not become empty by trying.
RETRY_SECONDS = 1.0
# Writing one bucket, or bringing a file to the disk: a network's may take minutes.
LONGEST_WRITE_SECONDS = 600.0
# Of writev; Linux takes 1024 pieces at a time.
_PIECES = 1024
# Everything that a rank of any job may have written into a version's folder, but the manifest.
_ANY_NAMES = ("rank-*.safetensors", "rank-*.json", "model.safetensors", ".*.tmp")


class FileState(enum.Enum):
    ABSENT = "absent"
    WRITING = "writing"
    WHOLE = "whole"
    SUSPECT = "suspect"
    """A reader did not finish: it is compared with what it should be before the next one begins"""


@dataclass
class VersionFile:
    """One version's file of this rank."""

    serial: int
    version: int
    digest: str
    layout_id: str
    memory: memoryview
    """The slot, for as long as that holds this version"""
    state: FileState = FileState.ABSENT
    data_offset: int = 0
    """Bytes of the file's header"""
    checksum: str = ""
    readers: int = 0
    retry_at: float = 0.0
    waiting: list[Callable[[str], None]] = field(default_factory=list)
    """To be called when it has been written, or not: with why not"""


class DiskStore:
    """Belongs to one courier; all methods are called on its loop's thread, and files are written on another.

    folder: [weight_sync] disk_path; ranks: how many couriers write to it; layout: this rank's alone; keeper: says which
    slots still hold what, and does not free one that is being written. Raises ValueError for a layout that files cannot
    hold.
    """

    def __init__(
        self, loop: EventLoop, keeper: SlotKeeper, folder: Path, epoch: str, rank: int, ranks: int, layout: Layout
    ):
        self.folder, self.epoch, self.rank, self.ranks = folder, epoch, rank, ranks
        self.packed = PackedRank(layout, 0)
        self._loop, self._keeper, self._layout = loop, keeper, layout
        self._files: dict[int, VersionFile] = {}
        self._newest = 0
        self._busy = False
        self.progress = Progress(LONGEST_WRITE_SECONDS)

    def published(self, serial: int, version: int, digest: str, layout_id: str, memory: memoryview) -> None:
        """This snapshot is a version now: write it, for whoever reads `latest`."""
        if serial not in self._files:
            self._files[serial] = VersionFile(serial, version, digest, layout_id, memory)
        self._newest = max(self._newest, serial)
        self._work()

    def file(self, serial: int) -> VersionFile | None:
        """The file of a published snapshot, in whatever state; None for an unknown one."""
        return self._files.get(serial)

    def path(self, file: VersionFile) -> Path:
        """Where it is, in `folder`, once it is whole."""
        return Path(version_folder(self.epoch, file.version)) / file_name(self.rank, self.ranks)

    def request(self, file: VersionFile, changed: Callable[[str], None]) -> None:
        """A reader waits for it: it goes before the newest, also after a failure. `changed` is called once, with an
        empty string or why it could not be written."""
        file.waiting.append(changed)
        self._work()

    # The writer

    def _work(self) -> None:
        """Begin to write the file that is needed most, if none is being written."""
        if self._busy:
            return
        held = self._keeper.filled()
        now = time.monotonic()
        todo = [
            file
            for file in self._files.values()
            if file.state in (FileState.ABSENT, FileState.SUSPECT)
            and file.serial in held
            and (file.waiting or file.serial == self._newest)
        ]
        ready = [file for file in todo if file.retry_at <= now]
        if not ready:
            if todo:
                self._loop.call_later(min(file.retry_at for file in todo) - now + 0.01, self._work)
            return
        file = max(ready, key=lambda one: (bool(one.waiting), one.serial))
        suspect, file.state, self._busy = file.state is FileState.SUSPECT, FileState.WRITING, True
        self._keeper.hold(file.serial, "file")
        threading.Thread(
            target=self._write, args=(file, suspect, self._forget_unneeded(set(held))), name="weight-files", daemon=True
        ).start()

    def _forget_unneeded(self, held: set[int]) -> set[int]:
        """Forget versions that no slot holds and nobody reads; returns those that are needed on."""
        gone = [
            file
            for file in self._files.values()
            if file.serial not in held and file.serial != self._newest and not file.readers
        ]
        for file in gone:
            del self._files[file.serial]
        return {file.version for file in self._files.values()}

    def _write(self, file: VersionFile, suspect: bool, needed: set[int]) -> None:
        failure = ""
        self.progress.begin()
        try:
            if not suspect or not self._intact(file):
                self._write_file(file)
                self._complete(file)
                self._sweep(needed, KEEP_VERSIONS)
        except OSError as error:
            failure = f"disk: {error.strerror or error}"
            logger.error("version %d cannot be written to %s: %s", file.version, self.folder, error)
            self._make_room(needed)
        except Exception as error:
            # Whatever it was: readers are told, and the next try is made as after a full disk.
            failure = f"disk: {error!r}"
            logger.exception("version %d cannot be written to %s", file.version, self.folder)
        self.progress.end()
        self._loop.call_from_thread(lambda: self._written(file, failure))

    def _written(self, file: VersionFile, failure: str) -> None:
        self._busy = False
        file.state = FileState.ABSENT if failure else FileState.WHOLE
        file.retry_at = time.monotonic() + RETRY_SECONDS if failure else 0.0
        self._keeper.let_go(file.serial, "file")
        waiting, file.waiting = file.waiting, []
        for changed in waiting:
            changed(failure)
        self._work()

    def _write_file(self, file: VersionFile) -> None:
        folder = self.folder / version_folder(self.epoch, file.version)
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / file_name(self.rank, self.ranks)
        about = {"epoch": self.epoch, "version": str(file.version), "rank": str(self.rank), "ranks": str(self.ranks)}
        header = self.packed.header(about)
        hasher = xxhash.xxh3_128(header)
        checksums = []

        def content(descriptor: int) -> None:
            _write_all(descriptor, [memoryview(header)])
            step, lost = self._layout.bucket_bytes, False
            for bucket in range(self._layout.bucket_count(0)):
                data = file.memory[bucket * step : (bucket + 1) * step]
                checksums.append(bucket_checksum(data))
                pieces = [data[low:high] for low, high in self.packed.bucket(bucket)[1]]
                for piece in pieces:
                    hasher.update(piece)
                asked = faults.at("write", version=file.version, rank=self.rank, bucket=bucket)
                lost |= "drop" in asked  # truncated from here on, as if the writer had not noticed
                if "corrupt" in asked and pieces:
                    pieces[0] = faults.damaged(pieces[0])
                _write_all(descriptor, [] if lost else pieces)
                self.progress.begin()

        try:
            _replace(target, content, self.rank)
            file.data_offset, file.checksum = len(header), hasher.hexdigest()
            entry = {
                "file": target.name,
                "bytes": len(header) + self.packed.data_bytes,
                "xxh3_128": file.checksum,
                "bucket_checksums": checksums,
            }
            _replace_text(folder / entry_name(self.rank), json.dumps(entry), self.rank)
        except Exception:
            _delete(folder, _names(self.rank, self.ranks))
            raise

    def _intact(self, file: VersionFile) -> bool:
        try:
            return file_checksum(self.folder / self.path(file)) == file.checksum
        except FileNotFoundError:
            return False

    def _complete(self, file: VersionFile) -> None:
        """With all ranks' files there, write the manifest and lead `latest` to it. Several ranks may do so at once."""
        folder = self.folder / version_folder(self.epoch, file.version)
        entries: list[dict[str, Any]] = []
        for rank in range(self.ranks):
            try:
                entries.append(json.loads((folder / entry_name(rank)).read_text()))
            except FileNotFoundError:
                return  # whoever comes last
        manifest = {
            "format": FORMAT,
            "epoch": self.epoch,
            "version": file.version,
            "digest": file.digest,
            "layout_id": file.layout_id,
            "ranks": self.ranks,
            "files": entries,
        }
        _replace_text(folder / MANIFEST, json.dumps(manifest), self.rank)
        link, temporary = self.folder / LATEST, self.folder / f".{LATEST}-{self.rank}.tmp"
        if self._leads_further(link, file.version):
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(version_folder(self.epoch, file.version))
            os.replace(temporary, link)
            _sync(self.folder)

    def _leads_further(self, link: Path, version: int) -> bool:
        try:
            epoch, _, name = os.readlink(link).partition("/")
        except FileNotFoundError:
            return True
        return epoch != self.epoch or name <= version_folder("", version)[1:]

    def _sweep(self, needed: set[int], keep: int) -> None:
        """Delete this rank's files of versions that nobody needs: not the newest ones, nor what `latest` leads to.

        So goes, too, what an earlier life of this courier has left, and an earlier epoch.
        """
        latest = (self.folder / LATEST).resolve()
        kept = set(sorted(self._versions(), reverse=True)[:keep]) | needed
        for folder in self.folder.glob("*/version-*"):
            ours = folder.parent.name == self.epoch
            if folder.resolve() == latest or (ours and int(folder.name.removeprefix("version-")) in kept):
                continue
            if ours:
                _delete(folder, _names(self.rank, self.ranks))
            elif self.rank == 0:
                # Of how many ranks it was, and which of them had written what, nobody knows any more.
                _delete(folder, _ANY_NAMES)
                _remove_if_empty(folder.parent)

    def _make_room(self, needed: set[int]) -> None:
        try:
            self._sweep(needed, 1)
        except Exception:
            logger.exception("old versions in %s cannot be deleted", self.folder)

    def _versions(self) -> list[int]:
        """Of this epoch, of which this rank's file is there."""
        found = (self.folder / self.epoch).glob(f"version-*/{file_name(self.rank, self.ranks)}")
        return [int(path.parent.name.removeprefix("version-")) for path in found]


def _replace(target: Path, content: Callable[[int], None], owner: int) -> None:
    """Write a file under another name, bring it to the disk, and rename it. Leaves nothing behind where that fails."""
    temporary = target.with_name(f".{target.name}-{owner}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            content(descriptor)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, target)
    except Exception:
        temporary.unlink(missing_ok=True)
        raise
    _sync(target.parent)


def _replace_text(target: Path, text: str, owner: int) -> None:
    _replace(target, lambda descriptor: _write_all(descriptor, [memoryview(text.encode())]), owner)


def _write_all(descriptor: int, pieces: list[memoryview]) -> None:
    left = [piece for piece in pieces if len(piece)]
    while left:
        count = os.writev(descriptor, left[:_PIECES])
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _names(rank: int, ranks: int) -> list[str]:
    """Patterns of a rank's files of a version, and of what a kill has left of them."""
    return [entry_name(rank), file_name(rank, ranks), f".*-{rank}.tmp"]


def _delete(folder: Path, names: Iterable[str]) -> None:
    """These files of a version; with the last go manifest and folder."""
    for name in names:
        for path in folder.glob(name):
            path.unlink(missing_ok=True)
    if not list(folder.glob("rank-*")):
        (folder / MANIFEST).unlink(missing_ok=True)
        _remove_if_empty(folder)


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise
