"""Serves pulls: grants a lease on a snapshot, then sends its buckets as fast as the socket accepts them.

Shard servers serve from their slots. Actors that relay a version (Relay) serve from their staging memory while the
version is still arriving: a bucket is passed on as soon as it is verified. The registry decides who pulls from whom,
and gives the puller the key. An actor whose peer fails continues with the trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torchtitan.weight_sync.memory.manifest import BucketKey, Layout
from torchtitan.weight_sync.memory.transfer import CHECKSUM_TABLE, Transfer
from torchtitan.weight_sync.wire import hook
from torchtitan.weight_sync.wire.handshake import PEER, Acceptor, Identity
from torchtitan.weight_sync.wire.runtime import (
    BYTES_PER_BUCKET,
    MAXIMUM_ACTOR_BYTES,
    TICK_SECONDS,
    Channel,
    Message,
    ProtocolError,
    Runtime,
)

if TYPE_CHECKING:
    # It imports torch, which a shard server process does without.
    from torchtitan.weight_sync.transports.links import SendingLink

# A reader that asks for nothing for this long is disconnected: its machine may have vanished without closing.
IDLE_SECONDS = 10.0
# The most connections of one actor, for each that it or one of its workers has: they may come back before the old ones
# are closed.
MAX_CONNECTIONS = 128
# So many requested buckets count as one message (see utils/rate_limiter.py).
BUCKETS_PER_MESSAGE = 50


@dataclass
class Reader:
    """An actor's connection, and its lease."""

    channel: Channel
    actor: str
    rank: int
    asked_at: float
    pull: int = -1
    serial: int = -1
    waiting: dict[int, tuple[int | None, bool]] = field(default_factory=dict)
    """Requested bucket -> (serial of the base, whether it is requested again)"""
    sending: int | None = None
    """Serial of the snapshot that the socket or link is currently reading"""
    link: SendingLink | None = None
    credit: int = 0
    """Bytes of buckets that have gone another way than over the channel, or that a delta has saved, less those that
    have been counted"""

    def take_moved(self) -> int:
        """Return how many bytes of buckets the reader has got since the last call."""
        # Read once, because a thread may be sending.
        handed = self.channel.moved
        moved, self.credit = handed + self.credit, -handed
        return moved


class BucketServer:
    """A subclass says where the bytes are, and names its phase of fault injection.

    role, secret: of the allowed pullers, see Acceptor. make_link(channel, actor): makes the link that carries the bytes
    if they do not travel over the channel. The link must then call sent(reader) whenever a bucket has been sent.
    connections: how many each puller has; if they are several, each has a thread that sends.
    """

    phase: str

    def __init__(
        self,
        runtime: Runtime,
        epoch: str,
        role: str,
        secret: str,
        make_link: Callable[[Channel, str], SendingLink] | None = None,
        connections: int = 1,
    ):
        self._runtime, self.epoch, self._make_link = runtime, epoch, make_link
        self._connections = connections
        ways = self.admit, self._enter
        self.acceptor = Acceptor(runtime, frozenset((role,)), secret, *ways, longest=self.longest_message)
        self.channels: dict[Channel, Reader] = {}
        self._closed = False

    def buckets(self, rank: int) -> int | None:
        """Return how many buckets this rank has; None if the rank is not served here."""
        raise NotImplementedError

    def most_buckets(self) -> int:
        """Return the largest number of buckets that buckets() can return."""
        raise NotImplementedError

    def longest_message(self) -> int:
        """Return how many bytes a message of a puller may have: what it takes to ask for every other bucket."""
        return MAXIMUM_ACTOR_BYTES + BYTES_PER_BUCKET * self.most_buckets()

    def version(self, serial: int) -> int | None:
        """Return the version of a snapshot that may be read; None if the snapshot is gone."""
        raise NotImplementedError

    def has(self, serial: int, rank: int, bucket: int, base: int | None) -> bool:
        """Return whether this bucket is available. If it is not, send_more() is called once it is."""
        raise NotImplementedError

    def read(self, reader: Reader, bucket: int, base: int | None, again: bool) -> tuple[Message, memoryview | None]:
        """Return the message's fields and a bucket's bytes: a delta against `base` if that is wanted and smaller, or
        None if the fields say where the bytes are. again: an earlier copy was damaged or lost.

        The bytes do not change before close_stale_readers() has closed every connection that reads them.
        """
        raise NotImplementedError

    def start(self, listener: Any) -> None:
        """Begin to accept pullers."""
        self.acceptor.listen(listener)
        self._tick()

    def close(self, reason: str) -> None:
        """Close every connection."""
        self._closed = True
        self.acceptor.close()
        for channel in list(self.channels):
            channel.close(reason)

    def _tick(self) -> None:
        if not self._closed:
            self._runtime.call_later(TICK_SECONDS, self._tick)
            self.tick()

    def tick(self) -> None:
        """Periodically disconnect idle readers. A half-sent bucket ends with its snapshot at the latest."""
        for reader in list(self.channels.values()):
            busy = reader.sending is not None or reader.waiting
            if not busy and self._runtime.now() - reader.asked_at > IDLE_SECONDS:
                reader.channel.close("idle")

    def admit(self, _identity: Identity, fields: Message) -> Message:
        """See Acceptor."""
        if fields.get("epoch") != self.epoch:
            raise ProtocolError(f"this job's epoch is {self.epoch}, not {fields.get('epoch')}")
        rank = fields.get("rank")
        if type(rank) is not int or self.buckets(rank) is None:
            raise ProtocolError(f"rank {rank!r} is not served here")
        return {"rank": rank}

    def _enter(self, channel: Channel, identity: Identity, fields: Message) -> None:
        held = [reader.channel for reader in self.channels.values() if reader.actor == identity.name]
        too_many = len(held) + 1 - MAX_CONNECTIONS * self._connections
        for oldest in held[: max(0, too_many)]:
            oldest.close("replaced by newer connections")
        reader = self.channels[channel] = Reader(channel, identity.name, fields["rank"], self._runtime.now())
        channel.on_message, channel.on_close = self._on_message, self._on_lost
        if self._connections > 1:
            channel.use_thread()
        if self._make_link is not None:
            reader.link = self._make_link(channel, identity.name)

    def _on_lost(self, channel: Channel, _reason: str) -> None:
        link = self.channels.pop(channel).link
        if link is not None:
            link.close()

    def _on_message(self, channel: Channel, message: Message) -> None:
        reader = self.channels[channel]
        if message["type"] == "open":
            self._open(reader, message)
        elif message["type"] in ("entry", "credit") and reader.link is not None:
            reader.link.heard(message)
        else:
            raise ProtocolError(f"who pulls does not send {message['type']!r}")

    def _open(self, reader: Reader, message: Message) -> None:
        buckets = _buckets_in(message["buckets"], self.buckets(reader.rank) or 0)
        if self.version(message["serial"]) is None:
            reader.channel.send({"type": "gone", "pull": message["pull"]})
            return
        if reader.pull != message["pull"]:
            reader.waiting.clear()
        reader.pull, reader.serial, reader.asked_at = message["pull"], message["serial"], self._runtime.now()
        reader.channel.spend(len(buckets) / BUCKETS_PER_MESSAGE)
        # What is requested twice is sent once.
        reader.waiting |= dict.fromkeys(buckets, (message.get("base"), message.get("again", False)))
        self._send_next(reader)

    def send_more(self) -> None:
        """Call when more buckets may be available."""
        for reader in list(self.channels.values()):
            self._send_next(reader)

    def _send_next(self, reader: Reader) -> None:
        while reader.waiting and reader.sending is None:
            serial, rank, version = reader.serial, reader.rank, self.version(reader.serial)
            # Nothing can be verified before the checksum table has arrived.
            waiting = {CHECKSUM_TABLE: (None, False)} if CHECKSUM_TABLE in reader.waiting else reader.waiting
            available = (bucket for bucket, (base, _) in waiting.items() if self.has(serial, rank, bucket, base))
            bucket = next(available, None)
            if bucket is None or version is None:
                return
            self._send_bucket(reader, version, bucket, *reader.waiting.pop(bucket))

    def _send_bucket(self, reader: Reader, version: int, bucket: int, base: int | None, again: bool) -> None:
        asked = hook.at(self.phase, version=version, actor=reader.actor, rank=reader.rank, bucket=bucket)
        if "drop" in asked:
            return  # as if the network had lost it
        message = {"type": "bucket", "pull": reader.pull, "rank": reader.rank, "bucket": bucket}
        fields, data = self.read(reader, bucket, base, again)
        if data is None:
            reader.channel.send({**message, **fields})
            return
        reader.channel.throttle = partial(
            hook.bytes_per_second, self.phase, version=version, actor=reader.actor, rank=reader.rank
        )
        reader.sending = reader.serial
        sent = partial(self.sent, reader)
        reader.channel.send({**message, **fields}, hook.damaged(data) if "corrupt" in asked else data, sent)

    def sent(self, reader: Reader) -> None:
        """A bucket has been sent: send the next one."""
        reader.sending, reader.asked_at = None, self._runtime.now()
        if not reader.channel.closed:
            self._send_next(reader)

    def close_stale_readers(self) -> None:
        """Call right after snapshots have ended: when this returns, no connection reads them."""
        for reader in list(self.channels.values()):
            if reader.sending is not None and self.version(reader.sending) is None:
                # Half a bucket has been sent, and its memory may be overwritten from now on.
                reader.channel.close(f"snapshot {reader.sending} is gone")
            elif reader.waiting and self.version(reader.serial) is None:
                reader.channel.send({"type": "gone", "pull": reader.pull})
                reader.waiting.clear()


def _buckets_in(ranges: list[Any], count: int) -> list[int]:
    """Expand ascending ranges [first, end) of a rank with `count` buckets, and CHECKSUM_TABLE, into numbers. None is
    empty, so the work is bounded by `count`. Raises ProtocolError."""
    if len(ranges) > count + 1:
        raise ProtocolError(f"{len(ranges)} ranges of {count} buckets")
    buckets: list[int] = []
    for bounds in ranges:
        if not isinstance(bounds, list) or len(bounds) != 2 or set(map(type, bounds)) != {int}:
            raise ProtocolError(f"{bounds!r} is no range of buckets")
        first, end = bounds
        if not (buckets[-1] if buckets else CHECKSUM_TABLE - 1) < first < end <= count:
            raise ProtocolError(f"buckets {first} to {end} of {count}, none or out of order")
        buckets += range(first, end)
    return buckets


class Relay(BucketServer):
    """Serves staging memory to other actors. memory(key): a bucket of it; it holds one transfer at a time. key: the
    actor's own key, from which the keys of those who may pull here are derived."""

    phase = "relay"

    def __init__(self, runtime: Runtime, epoch: str, memory: Callable[[BucketKey], memoryview], key: str):
        super().__init__(runtime, epoch, PEER, key)
        self._memory = memory
        self._layout: Layout | None = None
        self._transfer: Transfer | None = None

    def hold(self, layout: Layout | None, transfer: Transfer | None) -> None:
        """Staging memory belongs to `transfer` from now on (None: to no transfer). Connections that read it for an
        older one are closed."""
        self._layout, self._transfer = layout, transfer
        self.close_stale_readers()
        self.send_more()

    def buckets(self, rank: int) -> int | None:
        """Return the bucket count of any rank, once there is a layout."""
        layout = self._layout
        return None if layout is None or not 0 <= rank < len(layout.ranks) else layout.bucket_count(rank)

    def most_buckets(self) -> int:
        """Of all ranks."""
        layout = self._layout
        return 0 if layout is None else max(map(layout.bucket_count, range(len(layout.ranks))))

    def version(self, serial: int) -> int | None:
        """Return the version of the transfer that staging memory belongs to."""
        transfer = self._transfer
        if transfer is None or serial < transfer.serial:
            return None
        # A peer that asks for a newer snapshot heard of it a moment before this actor did.
        return transfer.manifest.version if serial == transfer.serial else -1

    def has(self, serial: int, rank: int, bucket: int, base: int | None) -> bool:
        """Only verified buckets are available, and never as deltas."""
        transfer = self._transfer
        return transfer is not None and transfer.serial == serial and not transfer.lacks(rank, bucket)

    def read(self, reader: Reader, bucket: int, base: int | None, again: bool) -> tuple[Message, memoryview]:
        """Return a bucket of staging memory, which does not change before hold()."""
        if bucket == CHECKSUM_TABLE and self._transfer is not None:
            return {}, memoryview(self._transfer.manifest.checksum_tables[reader.rank].data)
        return {}, self._memory((reader.rank, bucket))
