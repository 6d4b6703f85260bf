"""Buckets on their way into an actor's staging memory: as they are, as references, or as deltas; each is verified."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import xxhash

from torchtitan.weight_sync import faults
from torchtitan.weight_sync.clients import Source
from torchtitan.weight_sync.manifest import BucketKey, Layout, Manifest
from torchtitan.weight_sync.wire import Channel, Message, Place, ProtocolError, Runtime

logger = logging.getLogger("torchtitan.weight_sync.arrivals")

# Of the bytes of a version: as they are, as deltas, and from another actor.
BYTES = ("bytes_full", "bytes_delta", "bytes_relayed")


@dataclass
class Transfer:
    """number: tells an actor's transfers apart; serial: of the snapshot. Times are the runtime's."""

    number: int
    serial: int
    manifest: Manifest
    missing: set[BucketKey]
    begun: float
    moved_at: float
    """When the last byte came"""
    source: str = ""
    """The other actor that sends it; empty: the trainer"""
    placing: dict[BucketKey, Any] = field(default_factory=dict)
    """Buckets that are arriving -> what hashes them, or a delta's bytes; None for those that a thread writes"""
    corruptions: Counter[BucketKey] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    """Bytes, by the figure that they count for"""

    def count(self, count: int, is_delta: bool, now: float) -> None:
        """So many bytes have come."""
        self.received["bytes_relayed" if self.source else "bytes_delta" if is_delta else "bytes_full"] += count
        self.moved_at = now

    def figures(self, now: float) -> Message:
        """What the registry is told when all is there."""
        received = {name: self.received[name] for name in BYTES}
        return {"transfer_s": now - self.begun, **received, "source": self.source or "trainer"}

    def open(self, buckets: list[int], **how: Any) -> Message:
        """Asks for these buckets of a rank, in ascending order."""
        return {"type": "open", "pull": self.number, "serial": self.serial, "buckets": _ranges(buckets), **how}


def _ranges(numbers: list[int]) -> list[list[int]]:
    """[first, end) of each run in ascending numbers."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] = number + 1
        else:
            ranges.append([number, number + 1])
    return ranges


class Engine(Protocol):
    """Where versions end up. `apply`, `fetch` and `patch` are called on threads, one call of each at a time."""

    def prepare(self, layout: Layout, message: Message) -> Collection[BucketKey]:
        """Make staging memory for this layout, which has come in this message. Returns the buckets that are needed.
        Raises LayoutError."""

    def bucket(self, key: BucketKey) -> memoryview:
        """The staging memory of a bucket."""

    def linked(self, channel: Channel, message: Message) -> None:
        """An entry of a link has come. Called on the loop's thread. Raises ProtocolError where it makes no sense."""

    def fetch(self, key: BucketKey, reference: Message) -> str:
        """Copy what a reference points to into the bucket's staging memory; the checksum of the copy.

        Raises ConnectionError where only the way was broken, and its channel is closed.
        """

    def patch(self, key: BucketKey, delta: memoryview) -> str:
        """Make the bucket that staging memory holds the newer one; the checksum of the result."""

    def apply(self, manifest: Manifest) -> Mapping[str, float]:
        """Serve what is staged, from between two steps on. Returns figures.

        Raises WeightsRefused where the engine is as it was; after anything else it may hold half a version.
        """


class Arrivals:
    """The half of a puller that its sources call, on the loop's thread; puller.py has the other one."""

    def __init__(self, runtime: Runtime, engine: Engine, name: str):
        self._runtime, self._engine, self.name = runtime, engine, name
        self._layout: Layout | None = None
        self.transfer: Transfer | None = None
        """The one that buckets may arrive for"""
        self._base: int | None = None
        """The snapshot that deltas may be taken against"""
        self._held: dict[BucketKey, int] = {}
        """Serial of the snapshot that a bucket's staging memory holds, verified"""
        self._writers = 0
        """Pieces of work that may still write to staging memory"""
        self.corrupted = 0

    def gone(self, message: Message) -> None:
        """What the pull of this message was for does not live any more."""
        raise NotImplementedError

    def leave_peer(self) -> bool:
        """A source could not be reached, or has closed the channel. True where all have been moved to the trainer."""
        raise NotImplementedError

    def _judged(self, source: Source, key: BucketKey, whole: bool) -> None:
        """One more bucket is whole, or is not what the version says."""
        raise NotImplementedError

    def _consider(self) -> None:
        """Something has changed: nothing writes to staging memory any more for a transfer that is over."""
        raise NotImplementedError

    def requests(self, rank: int) -> list[Message]:
        """What to ask this rank's shard server for: what is missing and does not arrive already. Deltas of what staging
        memory holds as it is in the snapshot that they are against."""
        transfer, base = self.transfer, self._base
        if transfer is None:
            return []
        whole: list[int] = []
        deltas: list[int] = []
        again: list[int] = []
        for key in sorted(key for key in transfer.missing if key[0] == rank and key not in transfer.placing):
            if transfer.corruptions[key]:
                again.append(key[1])
            else:
                (deltas if base is not None and self._held.get(key) == base else whole).append(key[1])
        asked: list[tuple[list[int], Message]] = [(again, {"again": True}), (deltas, {"base": base}), (whole, {})]
        return [transfer.open(buckets, **how) for buckets, how in asked if buckets]

    def linked(self, channel: Channel, message: Message) -> None:
        """An entry has come: the other end of a link wants to meet. Raises ProtocolError where it makes no sense."""
        self._engine.linked(channel, message)

    def is_current(self, message: Message) -> bool:
        """Whether a message belongs to the transfer."""
        return self.transfer is not None and message["pull"] == self.transfer.number

    def lost(self, rank: int) -> None:
        """A channel is over: what was half here has to come again. What a thread writes is its own affair."""
        placing = {} if self.transfer is None else self.transfer.placing
        for key in [key for key, placed in placing.items() if key[0] == rank and placed is not None]:
            del placing[key]

    def place(self, source: Source, message: Message) -> Place | None:
        """Into staging memory, hashed while a piece is in the cache; a delta beside it; nowhere for a transfer that is
        over. One that ends while bytes arrive for it closes their channel."""
        transfer = self.transfer
        if transfer is None or not self.is_current(message):
            return None
        key, now = self._checked_key(source, message, transfer), self._runtime.now
        if "base" in message:
            base = self._held.get(key)
            if base is None or message["base"] != base or message["bytes"] >= self._bucket_bytes(key):
                raise ProtocolError(f"a delta of bucket {key[1]} of rank {key[0]} that was not asked for")
            delta = memoryview(bytearray(message["bytes"]))
            transfer.placing[key] = delta
            return delta, lambda piece: transfer.count(len(piece), True, now())
        # Of kind xxh3: checksums of another kind are those of memory that references lead to.
        hasher = xxhash.xxh3_128()
        transfer.placing[key] = hasher
        self._held.pop(key, None)

        def take(piece: memoryview) -> None:
            transfer.count(len(piece), False, now())
            hasher.update(piece)

        return self._engine.bucket(key), take

    def _checked_key(self, source: Source, message: Message, transfer: Transfer) -> BucketKey:
        key = message["rank"], message["bucket"]
        if message["rank"] != source.rank:
            raise ProtocolError(f"a bucket of rank {message['rank']} came from rank {source.rank}")
        if key not in transfer.missing or key in transfer.placing:
            # Verified bytes are never written again: what is applied is what was checked.
            raise ProtocolError(f"bucket {key[1]} of rank {key[0]} was sent twice, or not asked for")
        return key

    def bucket(self, source: Source, message: Message) -> None:
        """Verify it, or what becomes of the reference or the delta."""
        transfer = self.transfer
        if transfer is None or not self.is_current(message):
            if "link" in message.get("reference", ()):
                # It is on its way all the same, and would be taken for the next one.
                source.drop("a bucket of a pull that is over")
                source.ask()
            return
        key = message["rank"], message["bucket"]
        version = transfer.manifest.version
        asked = faults.at("receive", version=version, actor=self.name, rank=key[0], bucket=key[1])
        if "reference" in message:
            if "drop" in asked:
                return
            self._checked_key(source, message, transfer)
            fetch = partial(self._engine.fetch, key, message["reference"])
            self._work(source, key, fetch, self._bucket_bytes(key), asked)
        elif (placed := transfer.placing.get(key)) is None:
            raise ProtocolError(f"bucket {key[1]} of rank {key[0]} came without bytes")
        elif "base" in message:
            self._work(source, key, partial(self._engine.patch, key, placed), 0, asked)
        else:
            del transfer.placing[key]
            self._judge(source, key, placed.hexdigest(), asked)

    def _work(self, source: Source, key: BucketKey, function: Callable[[], str], count: int, asked: Any) -> None:
        """Have a thread write the bucket, of which `count` bytes then have come."""
        transfer = self.transfer
        assert transfer is not None
        self._held.pop(key, None)
        transfer.placing[key] = None
        self._writers += 1

        def written(found: str, error: BaseException | None) -> None:
            self._writers -= 1
            if transfer is not self.transfer:
                self._consider()
                return
            del transfer.placing[key]
            if isinstance(error, ConnectionError):
                source.tell(transfer.open([key[1]], again=True))
                return
            transfer.count(count, False, self._runtime.now())
            self._judge(source, key, found if error is None else repr(error), asked)

        self._runtime.work("fetch", function, written)

    def _bucket_bytes(self, key: BucketKey) -> int:
        assert self._layout is not None
        start, end = self._layout.bucket_range(*key)
        return end - start

    def _judge(self, source: Source, key: BucketKey, found: str, asked: Any) -> None:
        transfer = self.transfer
        assert transfer is not None
        rank, bucket = key
        if "drop" in asked:
            return
        if "corrupt" in asked:
            found = "corrupt"
        whole = found == transfer.manifest.checksums[rank][bucket]
        if whole:
            transfer.missing.remove(key)
            self._held[key] = transfer.serial
            source.succeeded()
        else:
            self.corrupted += 1
            transfer.corruptions[key] += 1
            logger.warning("%s: bucket %d of rank %d is corrupt (%s)", self.name, bucket, rank, found)
        self._judged(source, key, whole)
