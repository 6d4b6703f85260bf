"""A rank's shard server: computes the checksums of its slots, tells the registry, and answers pulls.

It decides nothing. It runs as a process per rank, or as a thread of the trainer where slots are on a device.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torchtitan.weight_sync import faults
from torchtitan.weight_sync.checksums import checksum_function
from torchtitan.weight_sync.manifest import Layout
from torchtitan.weight_sync.needs import all_keys, needs_from_json
from torchtitan.weight_sync.pull.handshake import ACTOR, Call, Gate, Identity
from torchtitan.weight_sync.pull.live_slots import LiveSlots
from torchtitan.weight_sync.pull.messages import HEARTBEAT_SECONDS, RETRY_SECONDS, SILENCE_SECONDS
from torchtitan.weight_sync.pull.runtime import Channel, Runtime
from torchtitan.weight_sync.states.slot import Words
from torchtitan.weight_sync.wire import Message, ProtocolError

logger = logging.getLogger("torchtitan.weight_sync.shard_server")

TICK_SECONDS = 0.2
# One bucket takes a fraction of a second: a checksum thread that is at one for longer hangs.
LONGEST_CHECKSUM_SECONDS = 5.0
# An actor that asks for nothing for so long is let go: its machine may be gone without a word.
IDLE_SECONDS = 10.0


class Slots(Protocol):
    """A rank's slots; see slots.py."""

    count: int

    @property
    def state_words(self) -> Words:
        """One word per slot."""

    @property
    def failed(self) -> list[tuple[int, int]]:
        """(serial, version) of snapshots that this rank could not take, the oldest first."""

    def slot(self, index: int) -> memoryview:
        """A slot's bytes."""

    def beat(self) -> None:
        """A sign of life for the parent."""


@dataclass
class _Reader:
    """An actor's channel, and the lease that it has."""

    channel: Channel
    actor: str
    asked_at: float
    pull: int = -1
    serial: int = -1
    waiting: deque[int] = field(default_factory=deque)
    """Buckets that it has asked for"""
    sending: int | None = None
    """Serial of the slot that its socket is reading"""


class ShardServer:
    """refer(slot, start, end): where transports that do not send bytes say that a bucket is, None for tcp."""

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
        identity: Identity,
        lease_s: float,
        refer: Callable[[int, int, int], Message] | None = None,
    ):
        self._runtime, self._slots, self._layout = runtime, slots, layout
        self.rank, self.epoch = rank, epoch
        self._registry, self._address, self._identity = registry, address, identity
        self._lease_s, self._refer = lease_s, refer
        self.live = LiveSlots(slots.state_words)
        self._gate = Gate(runtime, token, frozenset((ACTOR,)), self._admit, self._enter)
        self._readers: dict[Channel, _Reader] = {}
        self._checksum = checksum_function(layout.checksum)
        self._checksums: dict[int, list[str]] = {}
        self._hashing: int | None = None
        self._piece_began: float | None = None
        self._told_failed = 0
        self._control: Channel | None = None
        self._call: Call | None = None
        self._term = 0
        self._heard_at = 0.0
        self._closed = False
        self._stop_listening: Callable[[], None] = lambda: None

    def start(self, listener: Any) -> None:
        """Begin to work: look at the slots, accept actors, find the registry."""
        self._stop_listening = self._runtime.listen(listener, self._gate.accept)
        self._dial()
        self._tick()
        self._heartbeat()
        self.look()

    def close(self) -> None:
        """Close every connection; nothing reads the slots any more but a checksum that is being computed."""
        self._closed = True
        self._stop_listening()
        self._gate.close()
        if self._call is not None:
            self._call.cancel()
        for channel in [*self._readers, *([self._control] if self._control is not None else [])]:
            channel.close("the shard server ends")

    def _tick(self) -> None:
        if self._closed:
            return
        self._runtime.call_later(TICK_SECONDS, self._tick)
        if self._works():
            self._slots.beat()
        self._expire()
        self._end_what_is_gone()
        for reader in list(self._readers.values()):
            busy = reader.sending is not None or reader.waiting
            # What is half sent ends with its snapshot at the latest.
            if not busy and self._runtime.now() - reader.asked_at > IDLE_SECONDS:
                reader.channel.close("idle")
        self.look()

    def _expire(self) -> None:
        # Leases have an absolute life, whether or not a registry is there.
        self.live.expire(self._runtime.now(), self._lease_s)

    def _works(self) -> bool:
        """Without a beat the parent ends this process and starts another one."""
        began = self._piece_began
        return began is None or self._runtime.now() - began < LONGEST_CHECKSUM_SECONDS

    # Snapshots

    def look(self) -> None:
        """Read from the shared words what the trainer has done. Called at each ring of its bell."""
        filled = self.live.filled()
        self._checksums = {serial: sums for serial, sums in self._checksums.items() if serial in filled}
        for serial, version in self._slots.failed:
            if serial > self._told_failed and self._control is not None:
                self._told_failed = serial
                self._control.send({"type": "failed", "serial": serial, "version": version})
        waiting = [serial for serial in filled if serial not in self._checksums]
        if waiting and self._hashing is None:
            serial = self._next_to_hash(waiting)
            index, version = filled[serial]
            self._hashing = serial
            self.live.hold(serial)
            self._piece_began = self._runtime.now()
            work = partial(self._hash, self._slots.slot(index), version)
            self._runtime.work("checksums", work, partial(self._hashed, serial))

    def _next_to_hash(self, serials: list[int]) -> int:
        # The newest first: after a restart, what was published of the others is known to be older then.
        return max(serials)

    def _hash(self, memory: memoryview, version: int) -> list[str]:
        faults.at("checksum", version=version, rank=self.rank)
        sums = []
        for start in range(0, len(memory), self._layout.bucket_bytes):
            self._piece_began = self._runtime.now()
            sums.append(self._checksum(memory[start : start + self._layout.bucket_bytes]))
        return sums

    def _hashed(self, serial: int, sums: list[str], error: BaseException | None) -> None:
        if error is not None:
            # Ends the process: a new one computes everything anew, this one would hold the slot for ever.
            raise RuntimeError("the checksums of a snapshot could not be computed") from error
        self._hashing = self._piece_began = None
        self._checksums[serial] = sums
        self._tell_snapped(serial)
        self.live.let_go(serial)
        self.look()

    def _tell_snapped(self, serial: int) -> None:
        found = self.live.filled().get(serial)
        if found is not None and self._control is not None:
            sums = self._checksums[serial]
            self._control.send({"type": "snapped", "serial": serial, "version": found[1], "checksums": sums})

    # Registry

    def _dial(self) -> None:
        fields = {"epoch": self.epoch, "address": self._address}
        if not self._closed:
            self._call = Call(self._runtime, self._registry, self._identity, fields, self._welcomed, self._out_of_reach)

    def _out_of_reach(self, reason: str) -> None:
        # Without an end of its own: rank 0 bounds the registry's restarts, and this process ends with its rank.
        logger.info("registry out of reach: %s", reason)
        self._runtime.call_later(RETRY_SECONDS, self._dial)

    def _welcomed(self, channel: Channel, fields: Message) -> None:
        term = fields.get("term")
        if type(term) is not int or term < self._term:
            # One that was replaced, and does not know it yet.
            channel.close("an old term")
            self._out_of_reach(f"it is of term {term}, and term {self._term} has begun")
            return
        self._term, self._control, self._heard_at = term, channel, self._runtime.now()
        channel.on_message, channel.on_close = self._on_message, self._on_control_lost
        channel.send({"type": "layout", "layout": self._layout.to_json()})
        for serial in sorted(self._checksums, reverse=True):
            self._tell_snapped(serial)
        self._told_failed = 0
        self.look()

    def _on_control_lost(self, _channel: Channel, reason: str) -> None:
        logger.info("registry connection over: %s", reason)
        self._control = None
        self._runtime.call_later(RETRY_SECONDS, self._dial)

    def _heartbeat(self) -> None:
        if self._closed:
            return
        self._runtime.call_later(HEARTBEAT_SECONDS, self._heartbeat)
        if self._control is not None:
            if self._runtime.now() - self._heard_at > SILENCE_SECONDS:
                self._control.close(f"the registry said nothing for {SILENCE_SECONDS:g} s")
            else:
                self._control.send({"type": "ping"})

    def _on_message(self, _channel: Channel, message: Message) -> None:
        self._heard_at = self._runtime.now()
        if message["type"] == "live":
            self.live.live(message["newest"], message["lanes"], message["dropped"], self._heard_at)
            self._end_what_is_gone()
        elif message["type"] != "pong":
            raise ProtocolError(f"a registry does not send {message['type']!r} to a shard server")

    # Actors

    def _admit(self, identity: Identity, fields: Message) -> Message:
        if fields.get("epoch") != self.epoch:
            raise ProtocolError(f"this job's epoch is {self.epoch}, not {fields.get('epoch')}")
        return {"rank": self.rank}

    def _enter(self, channel: Channel, identity: Identity, _fields: Message) -> None:
        self._readers[channel] = _Reader(channel, identity.name, self._runtime.now())
        channel.on_message, channel.on_close = self._on_reader_message, self._on_reader_lost

    def _on_reader_lost(self, channel: Channel, _reason: str) -> None:
        del self._readers[channel]

    def _on_reader_message(self, channel: Channel, message: Message) -> None:
        reader = self._readers[channel]
        if message["type"] == "open":
            self._open(reader, message)
        elif message["type"] == "done":
            if message["pull"] == reader.pull:
                reader.waiting.clear()
                reader.serial = -1
        else:
            raise ProtocolError(f"an actor does not send {message['type']!r} to a shard server")

    def _open(self, reader: _Reader, message: Message) -> None:
        ranges = message.get("buckets")
        needs = None if ranges is None else needs_from_json({"0": ranges})
        buckets = [bucket for _, bucket in all_keys(self._layout, needs)]
        if buckets and buckets[-1] >= self._layout.bucket_count(0):
            raise ProtocolError(f"rank {self.rank} has no bucket {buckets[-1]}")
        if self.live.readable(message["serial"]) is None:
            reader.channel.send({"type": "gone", "pull": message["pull"]})
            return
        if reader.pull != message["pull"]:
            reader.waiting.clear()
            reader.channel.send({"type": "granted", "pull": message["pull"]})
        reader.pull, reader.serial, reader.asked_at = message["pull"], message["serial"], self._runtime.now()
        reader.waiting.extend(buckets)
        self._send_next(reader)

    def _send_next(self, reader: _Reader) -> None:
        index = self.live.readable(reader.serial)
        while index is not None and reader.waiting and reader.sending is None:
            self._send_bucket(reader, index, reader.waiting.popleft())

    def _send_bucket(self, reader: _Reader, index: int, bucket: int) -> None:
        version = self.live.filled()[reader.serial][1]
        asked = faults.at("send", version=version, actor=reader.actor, rank=self.rank, bucket=bucket)
        start, end = self._layout.bucket_range(0, bucket)
        message = {"type": "bucket", "pull": reader.pull, "rank": self.rank, "bucket": bucket}
        if "drop" in asked:
            return  # as if the network had lost it
        if self._refer is not None:
            reader.channel.send({**message, "reference": self._refer(index, start, end)})
            return
        data = self._slots.slot(index)[start:end]
        reader.channel.throttle = partial(
            faults.bytes_per_second, "send", version=version, actor=reader.actor, rank=self.rank
        )
        reader.sending = reader.serial
        reader.channel.send(message, faults.damaged(data) if "corrupt" in asked else data, partial(self._sent, reader))

    def _sent(self, reader: _Reader) -> None:
        reader.sending, reader.asked_at = None, self._runtime.now()
        self._send_next(reader)

    def _end_what_is_gone(self) -> None:
        for reader in list(self._readers.values()):
            if reader.sending is not None and self.live.readable(reader.sending) is None:
                # Half a bucket is on its way, and its slot may be written again from now on.
                reader.channel.close(f"snapshot {reader.sending} is gone")
            elif reader.serial >= 0 and self.live.readable(reader.serial) is None:
                reader.channel.send({"type": "gone", "pull": reader.pull})
                reader.waiting.clear()
                reader.serial = -1
