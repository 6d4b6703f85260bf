"""A rank's shard server: computes the checksums of its slots, tells the registry, and answers pulls.

It decides nothing. It runs as a process per rank, or as a thread of the trainer if slots are on a device.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torchtitan.weight_sync.memory.delta import Deltas, element_bytes, encode
from torchtitan.weight_sync.memory.manifest import ChecksumTable, Layout, checksum_function
from torchtitan.weight_sync.memory.slots import LiveSlots
from torchtitan.weight_sync.memory.transfer import CHECKSUM_TABLE
from torchtitan.weight_sync.transports.bucket_server import BucketServer, Reader
from torchtitan.weight_sync.wire import hook
from torchtitan.weight_sync.wire.clients import RegistryClient
from torchtitan.weight_sync.wire.handshake import ACTOR, RANK, Identity
from torchtitan.weight_sync.wire.runtime import Channel, Message, ProtocolError, Runtime

if TYPE_CHECKING:
    from torchtitan.weight_sync.memory.device_slots import Slots
    from torchtitan.weight_sync.transports.links import SendingLink

logger = logging.getLogger("torchtitan.weight_sync.trainer.shard_server")

# One bucket takes a fraction of a second. A thread that takes longer than this, plus this per byte, hangs.
MAX_BUCKET_SECONDS, MAX_SECONDS_PER_BYTE = 5.0, 50e-9
# For writing one bucket or flushing a file: on a network disk this may take minutes.
MAX_WRITE_SECONDS = 600.0


class ShardServer(BucketServer):
    """Serves one rank's slots. relay: actors relay buckets, which takes digests. refer(slot, start, end): makes
    references, for transports that send no bytes over a channel or link. make_link(channel, actor): makes the link, for
    transports that send bytes over one. tcp uses neither. persist(slot, serial, version, memory, moved): called on a
    thread before a snapshot may be published; its result is sent to the registry. It calls moved() whenever it
    progresses; if it raises OSError, the version is dropped. keep_persisted: the memory of the newest snapshot that was
    persisted stays as it is until the next one is."""

    phase = "send"

    def __init__(
        self,
        runtime: Runtime,
        slots: Slots,
        layout: Layout,
        *,
        rank: int,
        epoch: str,
        token: str,
        registry: str,
        address: str,
        lease_s: float,
        relay: bool = False,
        connections: int = 1,
        refer: Callable[[int, int, int], Message] | None = None,
        make_link: Callable[[Channel, str], SendingLink] | None = None,
        persist: Callable[[int, int, int, memoryview, Callable[[], None]], Message] | None = None,
        keep_persisted: bool = False,
    ):
        super().__init__(runtime, epoch, ACTOR, token, make_link, connections)
        self.rank, self._slots, self._layout = rank, slots, layout
        self._lease_s, self._refer, self._persist = lease_s, refer, persist
        self._keep_persisted = keep_persisted
        self._persisted = -1
        """Serial of the newest snapshot that was persisted, and is kept"""
        self._bucket_seconds = MAX_BUCKET_SECONDS + MAX_SECONDS_PER_BYTE * layout.bucket_bytes
        self.live = LiveSlots(slots.state_words)
        make = partial(encode, size=element_bytes(layout))
        self.deltas = Deltas(runtime, self.live, self._bucket, make, self.send_more)
        self._checksum, self._relay = checksum_function(layout.checksum), relay
        self._snapped: dict[int, tuple[Message, ChecksumTable]] = {}
        """Serial -> what the registry is told of a snapshot, and its checksums"""
        self._due: float | None = None
        """When the thread that processes a snapshot must next have progressed; None if it is idle"""
        self._reported_failure = 0
        self._without_reference = -1
        """The snapshot of which this has been said last"""
        self._untold: Counter[tuple[str, int]] = Counter()
        """(actor, serial) -> bytes that have gone to it, of which the registry was not told"""
        fields, identity = {"epoch": epoch, "address": address}, Identity.of(token, RANK, str(rank))
        self.registry = RegistryClient(runtime, registry, identity, fields, self._joined, self._on_registry_message)

    def start(self, listener: Any) -> None:
        """Begin to watch the slots, accept actors, and dial the registry."""
        super().start(listener)
        self.registry.start()

    def close(self, reason: str = "the shard server ends") -> None:
        """Close every connection. After that, only work in progress on threads reads the slots."""
        super().close(reason)
        self.registry.close(reason)

    def tick(self) -> None:
        """Periodically beat, and end what is too old."""
        if self._works():
            self._slots.beat()
        # A retained snapshot's life is bounded even if no registry is there.
        self.live.expire(self._runtime.now(), self._lease_s)
        self.close_stale_readers()
        super().tick()
        self._tell_moved()
        self.read_slots()

    def _tell_moved(self) -> None:
        """Tell the registry who has got how much of which snapshot: it does not take an actor's word for that."""
        if not self.registry.connected:
            return
        for reader in self.channels.values():
            self._count_moved(reader)
        rows = [[actor, serial, count] for (actor, serial), count in self._untold.items() if count > 0]
        self._untold.clear()
        if rows:
            self.registry.tell({"type": "moved", "moved": rows})

    def _on_lost(self, channel: Channel, reason: str) -> None:
        self._count_moved(self.channels[channel])
        super()._on_lost(channel, reason)

    def _open(self, reader: Reader, message: Message) -> None:
        self._count_moved(reader)
        super()._open(reader, message)

    def sent(self, reader: Reader) -> None:
        """A bucket has been sent: count it to its snapshot, since the next one may be of another."""
        self._count_moved(reader)
        super().sent(reader)

    def _count_moved(self, reader: Reader) -> None:
        serial = reader.serial if reader.sending is None else reader.sending
        self._untold[reader.actor, serial] += reader.take_moved()

    def _works(self) -> bool:
        """Return whether all threads progress. Otherwise there is no beat, and the parent restarts this server."""
        now, encoding = self._runtime.now(), self.deltas.oldest_start
        if self._due is not None and now >= self._due:
            return False
        return encoding is None or now - encoding < self._bucket_seconds

    # Snapshots

    def read_slots(self) -> None:
        """Read from the shared words what the trainer has done. Called at each ring of its bell."""
        filled = self.live.filled()
        self._snapped = {serial: found for serial, found in self._snapped.items() if serial in filled}
        for serial, version in self._slots.failed:
            if serial > self._reported_failure and self.registry.connected:
                self._reported_failure = serial
                self.registry.tell({"type": "failed", "serial": serial, "version": version})
        waiting = [serial for serial in filled if serial not in self._snapped]
        if waiting and self._due is None:
            serial = self._next_to_hash(waiting)
            index, version = filled[serial]
            self.live.retain(serial)
            self._moved(self._bucket_seconds)
            self._runtime.work("checksums", partial(self._take, index, serial, version), partial(self._taken, serial))

    def _next_to_hash(self, serials: list[int]) -> int:
        # The newest first: by the time the others are due, the registry has said which of them are outdated.
        return max(serials)

    def _moved(self, seconds: float) -> None:
        self._due = self._runtime.now() + seconds

    def _take(self, index: int, serial: int, version: int) -> tuple[Message, ChecksumTable]:
        """Return what the registry is to be told of a snapshot, and its checksums."""
        hook.at("checksum", version=version, rank=self.rank)
        memory: Any = self._slots.slot(index)
        sums, digests = [], []
        for start in range(0, len(memory), self._layout.bucket_bytes):
            self._moved(self._bucket_seconds)
            bucket = memory[start : start + self._layout.bucket_bytes]
            sums.append(self._checksum(bucket))
            if self._relay:
                digests.append(hashlib.sha256(bucket).hexdigest())
        about, table = {"serial": serial, "version": version}, ChecksumTable.of(sums, digests)
        snapped = {"type": "snapped", **about, "table": table.digest()}
        if self._persist is None:
            return snapped, table
        moved = partial(self._moved, MAX_WRITE_SECONDS)
        moved()
        try:
            return {**snapped, "file": self._persist(index, serial, version, memory, moved)}, table
        except OSError as error:
            logger.error("version %d is dropped: %s", version, error.strerror or error)
            return {"type": "failed", **about, "reason": error.strerror or str(error)}, table

    def _taken(self, serial: int, found: tuple[Message, ChecksumTable], error: BaseException | None) -> None:
        if error is not None:
            # This ends the server: a new one computes everything anew, while this one would hold the slot for ever.
            raise RuntimeError("the checksums of a snapshot could not be computed") from error
        self._due = None
        self._snapped[serial] = found
        self.send_more()
        self._tell_snapped(serial)
        if self._keep_persisted and "file" in found[0] and serial > self._persisted:
            # What would be let go now is kept, and what was kept is let go.
            serial, self._persisted = self._persisted, serial
        self.live.release(serial)
        self.read_slots()

    def _tell_snapped(self, serial: int) -> None:
        if serial in self.live.filled():
            self.registry.tell(self._snapped[serial][0])

    # Registry

    def _joined(self) -> None:
        self.registry.tell({"type": "layout", "layout": self._layout.to_json()})
        for serial in sorted(self._snapped, reverse=True):
            self._tell_snapped(serial)
        self._reported_failure = 0
        self.read_slots()

    def _on_registry_message(self, message: Message) -> None:
        if message["type"] != "live":
            raise ProtocolError(f"a registry does not send {message['type']!r} to a shard server")
        serials = message["newest"], message["retained"], message["dropped"]
        self.live.live(*serials, self._runtime.now(), message.get("base"))
        self.deltas.forget_stale()
        self.close_stale_readers()

    # Actors (see BucketServer)

    def buckets(self, rank: int) -> int | None:
        """Only its own rank is served."""
        return self._layout.bucket_count(0) if rank == self.rank else None

    def most_buckets(self) -> int:
        """Of its own rank."""
        return self._layout.bucket_count(0)

    def version(self, serial: int) -> int | None:
        """Return the version of a snapshot that the registry says lives, or does not know of yet."""
        found = self.live.readable(serial)
        return None if found is None else found[1]

    def has(self, serial: int, rank: int, bucket: int, base: int | None) -> bool:
        """Snapshots are complete, so a bucket is always there; a delta is made on request, and checksums take a
        while."""
        if bucket == CHECKSUM_TABLE:
            return serial in self._snapped
        return base is None or self.deltas.is_made(serial, base, bucket)

    def read(self, reader: Reader, bucket: int, base: int | None, again: bool) -> tuple[Message, memoryview | None]:
        """Return a bucket's bytes or a delta, or where they are: in the slot, in a file, or on the link."""
        if bucket == CHECKSUM_TABLE:
            return {}, memoryview(self._snapped[reader.serial][1].data)
        serial, index = reader.serial, self.live.filled()[reader.serial][0]
        if reader.link is not None:
            return {"reference": self._send_over(reader.link, reader, bucket)}, None
        if (reference := self._reference(serial, index, bucket, again)) is not None:
            return {"reference": reference}, None
        delta = None if base is None else self.deltas.get(serial, base, bucket)
        payload = self._bucket(serial, bucket)
        if delta is None:
            return {}, payload
        reader.credit += len(payload) - len(delta)
        return {"base": base}, delta

    def _reference(self, serial: int, slot: int, bucket: int, again: bool) -> Message | None:
        """Return where a bucket is; None if its bytes are sent: if it is asked for again, or the transport raises."""
        if self._refer is None:
            return None
        in_host_memory = isinstance(self._slots.slot(slot), memoryview)
        try:
            if again and in_host_memory:
                return None
            return self._refer(slot, *self._layout.bucket_range(0, bucket))
        except Exception:
            if serial != self._without_reference:
                logger.exception("the transport has no reference for bucket %d of rank %d", bucket, self.rank)
            self._without_reference = serial
            if not in_host_memory:
                raise
            return None

    def _bucket(self, serial: int, bucket: int) -> Any:
        start, end = self._layout.bucket_range(0, bucket)
        return self._slots.slot(self.live.filled()[serial][0])[start:end]

    def _send_over(self, link: SendingLink, reader: Reader, bucket: int) -> Message:
        serial = reader.sending = reader.serial

        def sent() -> None:
            self.live.release(serial)
            reader.credit += len(data)
            self.sent(reader)

        self.live.retain(serial)
        data = self._bucket(serial, bucket)
        return link.send(data, sent)
