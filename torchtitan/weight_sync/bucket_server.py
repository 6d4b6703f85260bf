"""Answers those who pull: a lease on a snapshot, then its buckets as fast as the socket takes them.

Shard servers serve from their slots so, and actors that pass a version on (Relay) from their staging memory, while it
is still arriving: a bucket leaves as soon as it is verified. The registry says who pulls from whom, and gives who pulls
the key for it. An actor that is let down by another one goes on at the trainer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torchtitan.weight_sync import faults
from torchtitan.weight_sync.handshake import PEER, Gate, Identity
from torchtitan.weight_sync.manifest import BucketKey, Layout
from torchtitan.weight_sync.transfer import Transfer
from torchtitan.weight_sync.wire import TICK_SECONDS, Channel, Message, ProtocolError, Runtime

if TYPE_CHECKING:
    from torchtitan.weight_sync.nccl import SendingLink  # torch, which the process of a shard server does without

# Who asks for nothing for so long is let go: its machine may be gone without a word.
IDLE_SECONDS = 10.0


@dataclass
class Reader:
    """An actor's channel, and the lease that it has."""

    channel: Channel
    actor: str
    rank: int
    asked_at: float
    pull: int = -1
    serial: int = -1
    waiting: deque[tuple[int, int | None, bool]] = field(default_factory=deque)
    """(bucket, serial of the base, whether it has come damaged) of those that it has asked for"""
    sending: int | None = None
    """Serial of the snapshot that its socket or link is reading"""
    link: SendingLink | None = None


class BucketServer:
    """A subclass says where the bytes are, and how it calls what it does (a phase of fault injection).

    role, secret: see Gate, of those who may pull. make_link(channel, actor): the way that bytes take, where they do not
    take the channel; then sent(reader) has to be called when a bucket has gone.
    """

    phase: str

    def __init__(
        self,
        runtime: Runtime,
        epoch: str,
        role: str,
        secret: str,
        make_link: Callable[[Channel, str], SendingLink] | None = None,
    ):
        self._runtime, self.epoch, self._make_link = runtime, epoch, make_link
        self.gate = Gate(runtime, frozenset((role,)), secret, self.admit, self._enter)
        self.channels: dict[Channel, Reader] = {}
        self._closed = False

    def buckets(self, rank: int) -> int | None:
        """How many buckets this rank has; None where it is not served here."""
        raise NotImplementedError

    def version(self, serial: int) -> int | None:
        """The version of a snapshot that may be read; None where it is gone."""
        raise NotImplementedError

    def has(self, serial: int, rank: int, bucket: int, base: int | None) -> bool:
        """Whether this bucket is there already; where not, send_more() is called when it is."""
        raise NotImplementedError

    def read(self, reader: Reader, bucket: int, base: int | None, again: bool) -> tuple[Message, memoryview | None]:
        """Fields of the message, and a bucket's bytes: a delta against `base` where that is wanted and worth it; None
        where the fields say where the bytes are. again: what came is not what it should be.

        The bytes stay as they are until end_what_is_gone() has closed all that read them.
        """
        raise NotImplementedError

    def start(self, listener: Any) -> None:
        """Begin to accept those who pull."""
        self.gate.listen(listener)
        self._tick()

    def close(self, reason: str) -> None:
        """Close every connection."""
        self._closed = True
        self.gate.close()
        for channel in list(self.channels):
            channel.close(reason)

    def _tick(self) -> None:
        if not self._closed:
            self._runtime.call_later(TICK_SECONDS, self._tick)
            self.look_after()

    def look_after(self) -> None:
        """Every now and then: let go of who is idle. What is half sent ends with its snapshot at the latest."""
        for reader in list(self.channels.values()):
            busy = reader.sending is not None or reader.waiting
            if not busy and self._runtime.now() - reader.asked_at > IDLE_SECONDS:
                reader.channel.close("idle")

    def admit(self, _identity: Identity, fields: Message) -> Message:
        """See Gate."""
        if fields.get("epoch") != self.epoch:
            raise ProtocolError(f"this job's epoch is {self.epoch}, not {fields.get('epoch')}")
        rank = fields.get("rank")
        if type(rank) is not int or self.buckets(rank) is None:
            raise ProtocolError(f"rank {rank!r} is not served here")
        return {"rank": rank}

    def _enter(self, channel: Channel, identity: Identity, fields: Message) -> None:
        reader = self.channels[channel] = Reader(channel, identity.name, fields["rank"], self._runtime.now())
        channel.on_message, channel.on_close = self._on_message, self._on_lost
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
        base, again = message.get("base"), message.get("again") is True
        reader.waiting.extend((bucket, base, again) for bucket in buckets)
        self._send_next(reader)

    def send_more(self) -> None:
        """More buckets may be there."""
        for reader in list(self.channels.values()):
            self._send_next(reader)

    def _send_next(self, reader: Reader) -> None:
        while reader.waiting and reader.sending is None:
            serial, rank, version = reader.serial, reader.rank, self.version(reader.serial)
            asked = next((asked for asked in reader.waiting if self.has(serial, rank, *asked[:2])), None)
            if asked is None or version is None:
                return
            reader.waiting.remove(asked)
            self._send_bucket(reader, version, *asked)

    def _send_bucket(self, reader: Reader, version: int, bucket: int, base: int | None, again: bool) -> None:
        asked = faults.at(self.phase, version=version, actor=reader.actor, rank=reader.rank, bucket=bucket)
        if "drop" in asked:
            return  # as if the network had lost it
        message = {"type": "bucket", "pull": reader.pull, "rank": reader.rank, "bucket": bucket}
        fields, data = self.read(reader, bucket, base, again)
        if data is None:
            reader.channel.send({**message, **fields})
            return
        reader.channel.throttle = partial(
            faults.bytes_per_second, self.phase, version=version, actor=reader.actor, rank=reader.rank
        )
        reader.sending = reader.serial
        sent = partial(self.sent, reader)
        reader.channel.send({**message, **fields}, faults.damaged(data) if "corrupt" in asked else data, sent)

    def sent(self, reader: Reader) -> None:
        """A bucket has gone: on to the next one."""
        reader.sending, reader.asked_at = None, self._runtime.now()
        if not reader.channel.closed:
            self._send_next(reader)

    def end_what_is_gone(self) -> None:
        """Right after snapshots have ended: nothing reads them when this returns."""
        for reader in list(self.channels.values()):
            if reader.sending is not None and self.version(reader.sending) is None:
                # Half a bucket is on its way, and its memory may be written again from now on.
                reader.channel.close(f"snapshot {reader.sending} is gone")
            elif reader.waiting and self.version(reader.serial) is None:
                reader.channel.send({"type": "gone", "pull": reader.pull})
                reader.waiting.clear()


def _buckets_in(ranges: list[Any], count: int) -> list[int]:
    """Of a rank with so many: the numbers in ranges [first, end), which follow each other. Raises ProtocolError."""
    buckets: list[int] = []
    for bounds in ranges:
        if not isinstance(bounds, list) or len(bounds) != 2 or set(map(type, bounds)) != {int}:
            raise ProtocolError(f"{bounds!r} is no range of buckets")
        first, end = bounds
        if not (buckets[-1] if buckets else -1) < first <= end <= count:
            raise ProtocolError(f"buckets {first} to {end} of {count}, or out of order")
        buckets += range(first, end)
    return buckets


class Relay(BucketServer):
    """memory(key): a bucket of staging memory. What it holds is of one transfer at a time. key: the actor's own, from
    which the keys of those follow that may pull from here."""

    phase = "relay"

    def __init__(self, runtime: Runtime, epoch: str, memory: Callable[[BucketKey], memoryview], key: str):
        super().__init__(runtime, epoch, PEER, key)
        self._memory = memory
        self._layout: Layout | None = None
        self._transfer: Transfer | None = None

    def hold(self, layout: Layout | None, transfer: Transfer | None) -> None:
        """Staging memory is for this transfer from now on (None: for nothing); nothing reads it for an older one."""
        self._layout, self._transfer = layout, transfer
        self.end_what_is_gone()
        self.send_more()

    def buckets(self, rank: int) -> int | None:
        """Of every rank, as soon as there is a layout."""
        layout = self._layout
        return None if layout is None or not 0 <= rank < len(layout.ranks) else layout.bucket_count(rank)

    def version(self, serial: int) -> int | None:
        """Of what staging memory is for."""
        transfer = self._transfer
        if transfer is None or serial < transfer.serial:
            return None
        # Who asks for something newer has heard of it a moment earlier.
        return transfer.manifest.version if serial == transfer.serial else -1

    def has(self, serial: int, rank: int, bucket: int, base: int | None) -> bool:
        """Only what is verified, and never as a delta."""
        transfer = self._transfer
        return transfer is not None and transfer.serial == serial and (rank, bucket) not in transfer.missing

    def read(self, reader: Reader, bucket: int, base: int | None, again: bool) -> tuple[Message, memoryview]:
        """From staging memory, which does not change before hold()."""
        return {}, self._memory((reader.rank, bucket))
