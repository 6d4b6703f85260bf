"""disk: a frame's payload says where in which file the bucket is. Trainer and actors share the folder. No torch."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from torchtitan.weight_sync.transports.base import (
    Area,
    BucketKey,
    Delivery,
    Payload,
    ReceiveContext,
    SendContext,
)
from torchtitan.weight_sync.transports.disk_store import DiskStore, FileState, VersionFile
from torchtitan.weight_sync.weight_files import PackedRank
from torchtitan.weight_sync.wire import FULL, Message, ProtocolError

# Buckets that an actor may be told of before it has verified the first.
WINDOW = 4
# preadv takes so many pieces at a time (Linux: 1024), and so many bytes are read between two looks at close().
_PIECES = 1024
_READ_BYTES = 8 << 20
# Of preadv, with what is read from there on.
_LARGEST_OFFSET = 1 << 62

logger = logging.getLogger(__name__)


class DiskSendCarrier:
    """Points at this rank's files. options: "store", the courier's DiskStore."""

    window: int | None = WINDOW

    def __init__(self, context: SendContext):
        self.context = context
        self._store: DiskStore = context.options["store"]
        self._file: VersionFile | None = None
        self._waits = False
        self._unacknowledged = 0

    def hello(self) -> Message:
        return {"folder": str(self._store.folder.resolve())}

    def connected(self, welcome: Message) -> None:
        pass

    def payload(self, delivery: Delivery, key: BucketKey) -> Payload | None:
        file = self._store.file(delivery.serial)
        if file is None:
            self.context.fail(f"version {delivery.version} is in no file and in no slot any more")
            return None
        if file.state is not FileState.WHOLE:
            if not self._waits:
                self._waits = True
                self._store.request(file, self._changed)
            return None
        if self._file is None:
            self._file, self._unacknowledged = file, 0
            file.readers += 1
        self._unacknowledged += 1
        _, bucket = key
        offset, _ = self._store.packed.bucket(bucket)
        reference = {"file": str(self._store.path(file)), "offset": file.data_offset + offset, "bucket": list(key)}
        return Payload(FULL, memoryview(json.dumps(reference).encode()))

    def _changed(self, failure: str) -> None:
        self._waits = False
        if failure:
            # The next attempt waits for the next try.
            self.context.fail(failure)
        else:
            self.context.wake()

    def heard(self, note: bytes) -> None:
        raise ProtocolError("disk has no notes")

    def acknowledged(self, delivery: Delivery, key: BucketKey) -> None:
        self._unacknowledged -= 1

    def end(self, delivery: Delivery, released: Callable[[], None]) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.readers -= 1
            if self._unacknowledged and file.state is FileState.WHOLE:
                # An actor has not found in it what it should have, or was only too slow.
                file.state = FileState.SUSPECT
        released()

    def close(self) -> None:
        pass


class DiskReceiveCarrier:
    """Reads the parts of files on a thread of its own, in the order in which it is told of them."""

    inline = False
    acknowledges = True

    def __init__(self, context: ReceiveContext):
        folder = context.hello.get("folder")
        if not isinstance(folder, str):
            raise ProtocolError("the sender does not say which folder")
        if context.where != "cpu":
            raise ProtocolError("files are read into host memory only")
        self.context, self._folder = context, Path(folder)
        self._packed: dict[int, PackedRank] = {}
        self._closed = threading.Event()
        self._orders: queue.SimpleQueue[tuple[bytes, Area, Callable[[str | None], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def welcome(self) -> Message:
        return {}

    def heard(self, note: bytes) -> None:
        raise ProtocolError("disk has no notes")

    def fetch(self, reference: bytes, target: Area, done: Callable[[str | None], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="weight-files", daemon=True)
            self._thread.start()
        self._orders.put((reference, target, done))

    def close(self) -> None:
        self._closed.set()
        self._orders.put(None)

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            reference, target, done = order
            try:
                failure = self._read(reference, target)
            except Exception as error:
                # The thread goes on: whoever waits for this bucket or a later one is answered.
                logger.exception("a file cannot be read")
                failure = f"a file cannot be read: {error!r}"
            done(failure)

    def _read(self, reference: bytes, target: Area) -> str | None:
        """What went wrong, or None."""
        try:
            place = json.loads(reference)
            name, offset, (rank, bucket) = str(place["file"]), place["offset"], place["bucket"]
            if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
                raise ValueError(f"{name!r} is not in the folder")
            layout = self.context.layout
            if {type(offset), type(rank), type(bucket)} != {int} or not 0 <= offset <= _LARGEST_OFFSET:
                raise ValueError(f"no place of a bucket: {offset!r}, {rank!r}, {bucket!r}")
            if not (0 <= rank < len(layout.ranks) and 0 <= bucket < layout.bucket_count(rank)):
                raise ValueError(f"rank {rank} has no bucket {bucket}")
            if rank not in self._packed:
                self._packed[rank] = PackedRank(layout, rank)
            _, ranges = self._packed[rank].bucket(bucket)
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            return f"malformed reference to a file: {error!r}"
        if not isinstance(target, memoryview) or (ranges and ranges[-1][1] > len(target)):
            return "the bucket has another place here than it had there"
        try:
            return self._read_file(self._folder / name, offset, [target[low:high] for low, high in ranges])
        except OSError as error:
            return f"{self._folder / name}: {error.strerror or error}"

    def _read_file(self, path: Path, offset: int, pieces: list[memoryview]) -> str | None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while pieces:
                if self._closed.is_set():
                    return "the connection is over"
                some = _first(pieces)
                count = os.preadv(descriptor, some, offset)
                if count == 0:
                    return f"{path} ends at byte {offset}: it is truncated"
                offset += count
                while pieces and count >= len(pieces[0]):
                    count -= len(pieces.pop(0))
                if count:
                    pieces[0] = pieces[0][count:]
        finally:
            os.close(descriptor)
        return None


def _first(pieces: list[memoryview]) -> list[memoryview]:
    """The first pieces, about _READ_BYTES."""
    some: list[memoryview] = []
    left = _READ_BYTES
    for piece in pieces[:_PIECES]:
        some.append(piece[:left])
        left -= len(some[-1])
        if left <= 0:
            break
    return some
