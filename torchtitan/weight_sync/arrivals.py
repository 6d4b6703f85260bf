"""Buckets on their way into an actor's staging memory: as they are, as references, or as deltas; each is verified."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Protocol

from torchtitan.weight_sync import faults
from torchtitan.weight_sync.checksums import streaming_checksum
from torchtitan.weight_sync.manifest import Layout, Manifest
from torchtitan.weight_sync.runtime import Channel, Runtime
from torchtitan.weight_sync.source import Source
from torchtitan.weight_sync.transfer import BucketKey, Transfer
from torchtitan.weight_sync.wire import Message, ProtocolError

logger = logging.getLogger("torchtitan.weight_sync.arrivals")


class Engine(Protocol):
    """Where versions end up. `apply`, `fetch` and `patch` are called on threads, one call of each at a time."""

    def prepare(self, layout: Layout) -> Collection[BucketKey]:
        """Make staging memory for this layout. Returns the buckets that are needed. Raises LayoutError."""

    def bucket(self, key: BucketKey) -> memoryview:
        """The staging memory of a bucket."""

    def linked(self, channel: Channel, message: Message) -> None:
        """An entry of a link has come; see source.Wanted. Called on the loop's thread."""

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
    """verified(): one more bucket is whole. damaged(source, key): it is not what the version says. quiet():
    nothing writes to staging memory any more for a transfer that is over."""

    def __init__(
        self,
        runtime: Runtime,
        engine: Engine,
        actor: str,
        verified: Callable[[], None],
        damaged: Callable[[Source, BucketKey], None],
        quiet: Callable[[], None],
    ):
        self._runtime, self._engine, self._actor = runtime, engine, actor
        self._verified, self._damaged, self._quiet = verified, damaged, quiet
        self._layout: Layout | None = None
        self.transfer: Transfer | None = None
        """The one that buckets may arrive for"""
        self.held: dict[BucketKey, int] = {}
        """Serial of the snapshot that a bucket's staging memory holds, verified"""
        self.writers = 0
        """Pieces of work that may still write to staging memory"""
        self.corrupted = 0

    def prepare(self, layout: Layout) -> Collection[BucketKey]:
        """See Engine."""
        self.held.clear()
        self._layout = layout
        return self._engine.prepare(layout)

    def is_current(self, message: Message) -> bool:
        """Whether a message belongs to the transfer."""
        return self.transfer is not None and message["pull"] == self.transfer.number

    def lost(self, rank: int) -> None:
        """A channel is over: what was half here has to come again."""
        if self.transfer is not None:
            self.transfer.lost(rank)

    def place(self, source: Source, message: Message) -> memoryview | None:
        """Into staging memory, a delta beside it; nowhere for a transfer that is over."""
        transfer = self.transfer
        if transfer is None or not self.is_current(message):
            return None
        key = self._checked_key(source, message, transfer)
        if "base" in message:
            base = self.held.get(key)
            if base is None or message["base"] != base or message["bytes"] >= self._bucket_bytes(key):
                raise ProtocolError(f"a delta of bucket {key[1]} of rank {key[0]} that was not asked for")
            delta = memoryview(bytearray(message["bytes"]))
            transfer.placing[key] = delta
            return delta
        assert self._layout is not None
        transfer.placing[key] = streaming_checksum(self._layout.checksum)
        return self._memory(key)

    def _memory(self, key: BucketKey) -> memoryview:
        self.held.pop(key, None)
        return self._engine.bucket(key)

    def _checked_key(self, source: Source, message: Message, transfer: Transfer) -> BucketKey:
        key = message["rank"], message["bucket"]
        if message["rank"] != source.rank:
            raise ProtocolError(f"a bucket of rank {message['rank']} came from rank {source.rank}")
        if key not in transfer.missing or key in transfer.placing:
            # Verified bytes are never written again: what is applied is what was checked.
            raise ProtocolError(f"bucket {key[1]} of rank {key[0]} was sent twice, or not asked for")
        return key

    def piece(self, message: Message, piece: memoryview) -> None:
        """Hashed while it is in the cache."""
        transfer = self.transfer
        if transfer is not None and self.is_current(message):
            transfer.count(len(piece), "base" in message, self._runtime.now())
            if "base" not in message:
                transfer.placing[message["rank"], message["bucket"]].update(piece)

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
        asked = faults.at("receive", version=version, actor=self._actor, rank=key[0], bucket=key[1])
        if "reference" in message:
            if "drop" in asked:
                return
            self._checked_key(source, message, transfer)
            fetch = partial(self._engine.fetch, key, message["reference"])
            self._work(source, key, transfer, fetch, self._bucket_bytes(key), asked)
        elif (placed := transfer.placing.get(key)) is None:
            raise ProtocolError(f"bucket {key[1]} of rank {key[0]} came without bytes")
        elif "base" in message:
            self._work(source, key, transfer, partial(self._engine.patch, key, placed), 0, asked)
        else:
            del transfer.placing[key]
            self._settle(source, key, placed.hexdigest(), asked)

    def _work(
        self,
        source: Source,
        key: BucketKey,
        transfer: Transfer,
        function: Callable[[], str],
        count: int,
        asked: Any,
    ) -> None:
        """Have a thread write the bucket, of which `count` bytes then have come."""
        self.held.pop(key, None)
        transfer.placing[key] = None
        self.writers += 1

        def written(found: str, error: BaseException | None) -> None:
            self.writers -= 1
            if transfer is not self.transfer:
                self._quiet()
                return
            del transfer.placing[key]
            if isinstance(error, ConnectionError):
                source.tell(transfer.open([key[1]], again=True))
                return
            transfer.count(count, False, self._runtime.now())
            self._settle(source, key, found if error is None else repr(error), asked)

        self._runtime.work("fetch", function, written)

    def _bucket_bytes(self, key: BucketKey) -> int:
        assert self._layout is not None
        start, end = self._layout.bucket_range(*key)
        return end - start

    def _settle(self, source: Source, key: BucketKey, found: str, asked: Any) -> None:
        transfer = self.transfer
        assert transfer is not None
        rank, bucket = key
        if "drop" in asked:
            return
        if "corrupt" in asked:
            found = "corrupt"
        if found == transfer.manifest.checksums[rank][bucket]:
            transfer.missing.remove(key)
            self.held[key] = transfer.serial
            source.succeeded()
            self._verified()
            return
        self.corrupted += 1
        transfer.corruptions[key] += 1
        logger.warning("%s: bucket %d of rank %d is corrupt (%s)", self._actor, bucket, rank, found)
        self._damaged(source, key)
