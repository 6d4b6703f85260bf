"""What a transport is: how a bucket's bytes get from a sender to an actor's worker. It knows nothing of versions.

Between every sender and every worker of an actor there is an authenticated TCP connection (or several, see streams)
that carries one frame per bucket: link.py sends it, bucket_stream.py reads it. A *carrier* decides what a frame's
payload is: the bytes themselves, or a reference of at most `wire.MAXIMUM_REFERENCE_BYTES` to where the receiver finds
them.

Beside buckets the two halves may exchange notes of at most as many bytes, once both are there: `tell` and `heard`.

A carrier lives as long as its connection. Its methods are called on the event loop's thread and must not block; `wake`,
`fail`, `tell`, `released` and `done` may be called on any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torchtitan.weight_sync.event_loop import EventLoop
from torchtitan.weight_sync.manifest import Layout
from torchtitan.weight_sync.wire import Message

if TYPE_CHECKING:
    import torch

    # Bytes in host memory, or a one-dimensional uint8 tensor on a device. Both are cut with area[start:end].
    Area = memoryview | torch.Tensor
else:
    Area = Any

BucketKey = tuple[int, int]
"""(rank, bucket)"""


@dataclass(frozen=True)
class Payload:
    """What follows a frame's header. `encoding` is wire.FULL, or one of delta.py's."""

    encoding: int
    data: memoryview


class DeltaSource(Protocol):
    """One rank's deltas."""

    def payload(self, key: BucketKey, wake: Callable[[], None]) -> Payload | None:
        """What is sent for this bucket, never larger than it; None while it is being made: wake() follows."""


@dataclass
class Delivery:
    """One attempt's buckets for one connection.

    areas: the bytes of each rank's slot; deltas: what to send instead, to an actor that holds the base; base_serial: of
    that base.
    """

    attempt: int
    serial: int
    version: int
    areas: Mapping[int, Area]
    bucket_bytes: int
    deltas: DeltaSource | None = None
    base_serial: int | None = None

    @property
    def serials(self) -> list[int]:
        """The snapshots that are read."""
        return [self.serial] if self.base_serial is None else [self.serial, self.base_serial]

    def keys(self) -> list[BucketKey]:
        """All buckets of all areas, in the order in which they are sent."""
        return [
            (rank, bucket)
            for rank, area in sorted(self.areas.items())
            for bucket in range(-(-len(area) // self.bucket_bytes))
        ]

    def bucket(self, key: BucketKey) -> Area:
        """The bytes of a bucket."""
        rank, bucket = key
        start = bucket * self.bucket_bytes
        return self.areas[rank][start : start + self.bucket_bytes]


@dataclass(frozen=True)
class SendContext:
    """What a sending carrier is made for.

    options: the transport's own keys of [weight_sync]. wake(): payload() may have something now. fail(reason): this
    carrier is broken; the connection is closed and what it was delivering fails. tell(note): goes to the other half,
    from connected() on, before the frame of any bucket whose payload was not asked for yet.
    """

    loop: EventLoop
    epoch: str
    rank: int
    actor: str
    worker: int
    stream: int
    layout: Layout
    options: Message
    wake: Callable[[], None]
    fail: Callable[[str], None]
    tell: Callable[[bytes], None]


class SendCarrier(Protocol):
    """The sender's half. `window`: buckets that may be unacknowledged at a time; None: there are no acknowledgements,
    and a delivery is over when its last byte is in the socket."""

    window: int | None

    def hello(self) -> Message:
        """Fields for the receiver's half, sent before it exists."""

    def connected(self, welcome: Message) -> None:
        """The receiver's half is there; `welcome` are its fields. Raises ProtocolError when they make no sense."""

    def payload(self, delivery: Delivery, key: BucketKey) -> Payload | None:
        """What to put into the frame of this bucket, called until it is not None; then once more for the next bucket.

        None: nothing yet, wake() follows.
        """

    def heard(self, note: bytes) -> None:
        """A note of the receiver's half. Raises ProtocolError where it makes no sense."""

    def acknowledged(self, delivery: Delivery, key: BucketKey) -> None:
        """The receiver has this bucket, verified."""

    def end(self, delivery: Delivery, released: Callable[[], None]) -> None:
        """The delivery is over, finished or not: call `released` once its memory is not touched any more."""

    def close(self) -> None:
        """The connection is over."""


@dataclass(frozen=True)
class ReceiveContext:
    """What a receiving carrier is made for.

    `rank` sends (a peer's rank is -1), `hello` are the sender's fields. where: the device of the staging memory. tell:
    see SendContext; from the first note that was heard on.
    """

    loop: EventLoop
    epoch: str
    rank: int
    actor: str
    worker: int
    stream: int
    layout: Layout
    hello: Message
    where: str
    tell: Callable[[bytes], None]


class ReceiveCarrier(Protocol):
    """The receiver's half. `inline`: payloads are the buckets' bytes and go straight where they belong; fetch() is then
    never called. `acknowledges`: the sender wants to hear of every verified bucket."""

    inline: bool
    acknowledges: bool

    def welcome(self) -> Message:
        """Fields for the sender's half."""

    def heard(self, note: bytes) -> None:
        """A note of the sender's half. Raises ProtocolError where it makes no sense."""

    def fetch(self, reference: bytes, target: Area, done: Callable[[str | None], None]) -> None:
        """Fill `target`, then call done(None), or done(reason). After close() done() must still be called, once the
        target is not written any more."""

    def close(self) -> None:
        """The connection is over. Must not wait; fetches that are going on are given up."""
