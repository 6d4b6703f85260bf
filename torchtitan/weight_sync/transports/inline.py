"""tcp: a frame's payload is the bucket itself, from the sender's shared memory to the socket and never copied,
or its delta."""

from __future__ import annotations

from collections.abc import Callable

from torchtitan.weight_sync.transports.base import (
    Area,
    BucketKey,
    Delivery,
    Payload,
    ReceiveContext,
    SendContext,
)
from torchtitan.weight_sync.wire import FULL, Message, ProtocolError


class InlineSendCarrier:
    """Sends host memory."""

    window: int | None = None

    def __init__(self, context: SendContext):
        self.context = context

    def hello(self) -> Message:
        return {}

    def connected(self, welcome: Message) -> None:
        pass

    def payload(self, delivery: Delivery, key: BucketKey) -> Payload | None:
        if delivery.deltas is not None:
            return delivery.deltas.payload(key, self.context.wake)
        data = delivery.bucket(key)
        assert isinstance(data, memoryview)
        return Payload(FULL, data)

    def acknowledged(self, delivery: Delivery, key: BucketKey) -> None:
        raise AssertionError("without a window there are no acknowledgements")

    def heard(self, note: bytes) -> None:
        raise ProtocolError("tcp has no notes")

    def end(self, delivery: Delivery, released: Callable[[], None]) -> None:
        released()

    def close(self) -> None:
        pass


class InlineReceiveCarrier:
    """The connection itself fills the target."""

    inline = True
    acknowledges = False

    def __init__(self, context: ReceiveContext):
        self.context = context

    def welcome(self) -> Message:
        return {}

    def fetch(self, reference: bytes, target: Area, done: Callable[[str | None], None]) -> None:
        raise AssertionError("payloads of tcp are no references")

    def heard(self, note: bytes) -> None:
        raise ProtocolError("tcp has no notes")

    def close(self) -> None:
        pass
