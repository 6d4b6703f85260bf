"""disk: a rank writes each snapshot to a store (stores.py: a folder or a URL), and refers actors to the bytes of a
bucket in it. The registry writes each version's manifest, points `latest` to it, and deletes old versions. No torch.

With deltas, a rank writes what has changed since the last snapshot that it wrote, and only now and then a whole one. An
actor gets the row of parts that lead to a bucket, and reads whichever way is the shortest from what it holds.

A file gets its name only when it is completely written, and only then is its snapshot reported, so no partial file ever
has that name. Trainer and actors share the store, which belongs to one job; weight_files.py describes its contents. All
of this happens on threads, so that a slow disk does not delay the newest version.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from torchtitan.weight_sync.memory import weight_files
from torchtitan.weight_sync.memory.delta import THREADS, Part, decode_into, element_bytes, encode
from torchtitan.weight_sync.memory.manifest import Layout, Manifest
from torchtitan.weight_sync.memory.transfer import READERS
from torchtitan.weight_sync.transports.stores import Folder, Objects, Place, store_of
from torchtitan.weight_sync.transports.transport import Transport, in_host_memory
from torchtitan.weight_sync.wire import hook
from torchtitan.weight_sync.wire.runtime import Message, ProtocolError, Runtime, field_of

if TYPE_CHECKING:
    from torchtitan.config.job_config import JobConfig, WeightSync

logger = logging.getLogger(__name__)

# Deltas that together have more than this share of a version's bytes are not written: the version is, whole.
MAX_DELTAS = 0.5
# What the registry does with a version's files may take minutes on a network disk.
CATALOGUE_SECONDS = 600.0


class _Base(NamedTuple):
    """The last snapshot that was written."""

    serial: int
    memory: memoryview
    parts: list[list[Part]]
    version: int


class SlotFiles:
    """Writes a rank's snapshots. ranks: how many write to the store; layout: this rank's only; whole_every: one in so
    many versions is written whole, and from the second version on, each as deltas."""

    def __init__(
        self, store: Folder | Objects, epoch: str, rank: int, ranks: int, layout: Layout, whole_every: int = 1
    ):
        self._store, self._epoch, self._rank, self._ranks = store, epoch, rank, ranks
        self._layout, self._whole_every = layout, whole_every
        self._written: dict[int, list[list[Part]]] = {}
        """Slot -> by bucket, the parts that lead to it: deltas, and the whole bucket that comes before some of them"""
        self._base: _Base | None = None

    def write(self, slot: int, serial: int, version: int, memory: memoryview, moved: Callable[[], None]) -> Message:
        """Write a snapshot, calling moved() after each bucket. Returns the manifest's entry. On a thread.

        With deltas, the memory of the newest snapshot that was written must stay as it is until the next one is.

        Raises OSError if it cannot be written, for example because the disk is full.
        """
        base = self._base if self._base is not None and self._base.serial < serial else None
        folder = weight_files.version_folder(self._epoch, version)
        buckets, about = list(self._buckets(memory)), {}
        parts: list[list[Part]] = [[] for _ in buckets]
        put = partial(self._put, serial, version, moved)
        if base is not None:
            deltas = []
            with ThreadPoolExecutor(THREADS) as pool:
                make = partial(encode, size=element_bytes(self._layout))
                for new, delta in zip(buckets, pool.map(make, buckets, self._buckets(base.memory)), strict=True):
                    deltas.append(new if delta is None else delta)
                    moved()
            if sum(map(len, deltas)) > MAX_DELTAS * len(memory):
                base = None
            else:
                # By its serial, because a version that another rank failed to write is written again.
                found, _ = put(f"{folder}/rank-{self._rank:05d}-{serial:08d}.delta", deltas)
                parts = [[*before, part] for before, part in zip(base.parts, found, strict=True)]
        chain = sum(part[3] for row, new in zip(parts, buckets, strict=True) for part in _since_full(row, len(new)))
        # By the version's number, so that all ranks write the same versions whole, whatever one of them has missed; and
        # before an actor that joins would have to read more deltas than a version has bytes.
        if base is None or chain > len(memory) or version // self._whole_every != base.version // self._whole_every:
            name = weight_files.file_name(self._rank, self._ranks)
            meta = {"epoch": self._epoch, "version": str(version), "rank": str(self._rank), "ranks": str(self._ranks)}
            header = weight_files.file_header(self._layout, meta)
            found, checksum = put(f"{folder}/{name}", buckets, header)
            parts = [[*_since_full(row, part[3]), part] for row, part in zip(parts, found, strict=True)]
            about = {"file": name, "bytes": len(header) + len(memory), "xxh3_128": checksum}
        self._written[slot] = parts
        if self._whole_every > 1 and (self._base is None or self._base.serial < serial):
            self._base = _Base(serial, memory, parts, version)
        needs = {"/".join(file.split("/")[:3]) for row in parts for _, file, _, _ in row}
        return {**about, "needs": sorted(needs)}

    def _buckets(self, memory: memoryview) -> Iterator[memoryview]:
        return (memory[slice(*self._layout.bucket_range(0, number))] for number in range(self._layout.bucket_count(0)))

    def _put(
        self, serial: int, version: int, moved: Callable[[], None], name: str, pieces: Sequence[memoryview],
        header: bytes = b"",
    ) -> tuple[list[Part], str]:  # fmt: skip
        hasher = xxhash.xxh3_128(header)

        def passing() -> Iterator[bytes | memoryview]:
            yield header
            lost = False
            for bucket, data in enumerate(pieces):
                hasher.update(data)
                asked = hook.at("write", version=version, rank=self._rank, bucket=bucket)
                lost |= "drop" in asked  # truncated from here on, as if the writer had not noticed
                if lost:
                    yield b""
                else:
                    yield hook.damaged(data) if "corrupt" in asked else data
                moved()

        try:
            places: list[Place] = self._store.write(name, passing())[1:]
        except OSError as error:
            text = f"{self._store.url}/{name} cannot be written: {error.strerror or error}"
            raise OSError(error.errno, text) from error
        return [(serial, *place, len(data)) for place, data in zip(places, pieces, strict=True)], hasher.hexdigest()

    def refer(self, slot: int, start: int, _end: int) -> Message:
        """Return the reference to the bucket that begins at `start` in this slot."""
        bucket = start // self._layout.bucket_bytes
        # Several are read at once from an object store, whose answers take a while to come.
        thread = bucket % READERS if isinstance(self._store, Objects) else 0
        about = {"folder": self._store.url, "element": element_bytes(self._layout), "thread": thread}
        return {**about, "parts": self._written[slot][bucket]}


def _since_full(parts: list[Part], size: int) -> list[Part]:
    """Return the deltas behind the last whole bucket: older ones would not be the shortest way to anything."""
    full_buckets = [place for place, part in enumerate(parts) if part[3] == size]
    return parts[full_buckets[-1] + 1 :] if full_buckets else parts


def read_parts(store: Folder | Objects, parts: Iterable[Part], element: int, target: memoryview) -> None:
    """Fill a bucket's memory along these parts (see delta.shortest), where it must hold what the first delta is taken
    against. Raises ProtocolError for a file elsewhere, OSError if bytes are not there or do not come in time."""
    for _serial, name, offset, size in parts:
        if "\0" in name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ProtocolError(f"{name!r} is no file of the store")
        if size == len(target):
            store.read(name, offset, target)
        else:
            delta = memoryview(bytearray(size))
            store.read(name, offset, delta)
            decode_into([target], delta, element)


# An external reader that has just resolved `latest` still finds its version after the next one is published.
KEEP_VERSIONS = 2
# With deltas, one in so many versions is also written whole.
WHOLE_EVERY = 10
# All files that a rank of any job, however it ended, may have written into a version's folder; "" is the folder.
_FILES = ("rank-*.safetensors", "rank-*.json", "rank-*.delta", "model.safetensors", weight_files.MANIFEST, ".*.tmp", "")


class Catalogue:
    """The versions in a store. Only one job may write to it (see Store.claim)."""

    def __init__(self, runtime: Runtime, store: Folder | Objects, epoch: str):
        self._runtime, self._store, self._epoch = runtime, store, epoch
        self._needs: dict[int, set[str]] = {}
        """Published version -> the files that lead to it"""
        self._published: list[int] = []

    def publish(self, manifest: Manifest, files: Iterable[Message], live: Collection[int]) -> None:
        """Publish a version. files: the description of each rank's; live: versions that actors still pull."""
        self._published = [version for version in self._published if version != manifest.version] + [manifest.version]
        self._published = self._published[-KEEP_VERSIONS:]
        about = {"format": weight_files.FORMAT, **manifest.to_json(), "files": list(files)}
        self._needs[manifest.version] = {name for file in about["files"] for name in file.get("needs", ())}
        self._work(partial(self._write_manifest, about))
        self._sweep({*self._published, *live})

    def make_room(self, live: Collection[int]) -> None:
        """After a failed write, keep only the newest version and those that actors still pull."""
        if self._published:
            self._sweep({self._published[-1], *live})

    def _work(self, function: Callable[[], None]) -> None:
        def done(_result: Any, error: BaseException | None) -> None:
            # Actors get references to their buckets anyway; the next version tries again.
            if error is not None:
                logger.error("%s is not as it should be: %s", self._store.url, error)

        self._runtime.work("catalogue", partial(self._store.in_time, function, CATALOGUE_SECONDS), done)

    def _write_manifest(self, about: Message) -> None:
        name = weight_files.version_folder(self._epoch, about["version"])
        self._store.put(f"{name}/{weight_files.MANIFEST}", json.dumps(about).encode())
        if all("file" in file for file in about["files"]):
            self._store.point_to(name)

    def _sweep(self, kept: set[int]) -> None:
        self._needs = {version: names for version, names in self._needs.items() if version in kept}
        needed = set().union(*self._needs.values())
        self._work(partial(self._delete_old, self._published[-1], kept, needed))

    def _delete_old(self, newest: int, kept: Collection[int], needed: Collection[str]) -> None:
        """Delete what no kept version needs, leftovers of earlier shard server processes, and earlier epochs, but
        nothing else that may be in the user's store."""
        latest, outdated = self._store.newest(), []
        for name in self._store.names():
            epoch, folder, file, *_ = (*name.split("/"), "", "")
            version = weight_files.version_of(Path(epoch, folder))
            if version is None or f"{epoch}/{folder}" == latest:
                continue
            is_written_here = any(fnmatch.fnmatchcase(file, pattern) for pattern in _FILES)
            stays = version > newest or version in kept or f"{epoch}/{folder}/{file}" in needed
            if is_written_here and not (epoch == self._epoch and stays):
                outdated.append(name)
        self._store.remove(outdated)


class Disk(Transport):
    """Files in a folder or an object store that trainer and actors share."""

    name = "disk"
    reference = "parts"
    needs_keys = True  # the store may be a bucket

    def __init__(self, options: Message | None = None):
        super().__init__(options)
        self._stores: dict[str, Folder | Objects] = {}
        self._claimed = False

    @classmethod
    def configured(cls, config: WeightSync, run_dir: Path) -> Disk:
        path = config.table.path or str(run_dir / "weights")
        folder = path if "://" in path else str(Path(path).resolve())
        whole_every = WHOLE_EVERY if config.table.delta else 1
        return cls({"folder": folder, "run": str(run_dir.resolve()), "whole_every": whole_every})

    @staticmethod
    def problems(config: JobConfig, engine_python: Callable[[], str | None]) -> Iterator[tuple[str, str]]:
        url = config.weight_sync.table.path
        if "://" not in url:
            return
        code = f"from fsspec.core import url_to_fs; url_to_fs({url!r}, skip_instance_cache=True)"
        for python in dict.fromkeys((sys.executable, engine_python() or sys.executable)):
            done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120, check=False)
            if done.returncode:
                text = done.stderr.strip().rpartition("\n")[2]
                yield "weight_sync.disk.path", f"cannot be opened by {python} (extra `remote`): {text}"

    def _store(self, url: str) -> Folder | Objects:
        if url not in self._stores:
            self._stores[url] = store_of(url)
        return self._stores[url]

    def claim(self, epoch: str) -> None:
        self._store(self.options["folder"]).claim(f"run folder {self.options['run']}")
        self._claimed = True

    def close(self) -> None:
        if self._claimed:
            self._store(self.options["folder"]).release()

    def catalogue(self, runtime: Runtime, epoch: str) -> Catalogue:
        return Catalogue(runtime, self._store(self.options["folder"]), epoch)

    def sending(
        self, _runtime: Runtime, _slots: Any, layout: Layout, epoch: str, rank: int, ranks: int, /
    ) -> dict[str, Any]:
        whole_every, store = self.options["whole_every"], self._store(self.options["folder"])
        files = SlotFiles(store, epoch, rank, ranks, layout, whole_every)
        return {"refer": files.refer, "persist": files.write, "keep_persisted": whole_every > 1}

    def fetch(self, reference: Message, target: Any) -> None:
        store, parts = self._store(field_of(reference, "folder", str)), field_of(reference, "parts", list)
        read_parts(store, parts, field_of(reference, "element", int), in_host_memory(target))


TRANSPORT = Disk
