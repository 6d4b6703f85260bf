"""The courier's deltas: made once, off the loop's thread, and no longer in memory or in slots than they are of use."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.patience import PATIENCE_S
from torchtitan.weight_sync import delta_encoder
from torchtitan.weight_sync.delta import decode_into, encode
from torchtitan.weight_sync.delta_encoder import DeltaEncoder
from torchtitan.weight_sync.event_loop import EventLoop
from torchtitan.weight_sync.states.slot import SlotKeeper, SlotState, SlotWriter
from torchtitan.weight_sync.transports.base import Payload

BUCKET, SIZE = 1000, 2
NEW, BASE = 2, 1


class World:
    """Two published snapshots, an encoder, and its loop, whose thread is this test's."""

    def __init__(self) -> None:
        words = [0] * 3
        writer = SlotWriter(words)
        self.words = words
        self.keeper = SlotKeeper(words)
        for serial in (BASE, NEW):
            index = writer.reserve()
            assert index is not None
            writer.begin(index, serial, serial)
            writer.finish(index)
        self.keeper.publish(BASE)
        self.keeper.retain(BASE)
        self.keeper.publish(NEW)
        numbers = random.Random(1)
        self.base = numbers.randbytes(4 * BUCKET + 10)
        changed = bytearray(self.base)
        for position in range(0, len(changed), 97):
            changed[position] ^= 1
        self.new = bytes(changed)
        self.loop = EventLoop()
        self.encoder = DeltaEncoder(self.loop, self.keeper, BUCKET, SIZE)

    def run(self, until: Callable[[], bool]) -> None:
        """The loop, until something holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not until():
            assert time.monotonic() < deadline
            self.loop._run_once()

    def state(self, serial: int) -> SlotState:
        return SlotState(self.words[serial - 1] >> 60)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.loop.stop()
    made.loop.run()


def test_a_bucket_is_encoded_once_for_all_and_not_on_the_loop(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def counted(new: memoryview, base: memoryview, size: int) -> tuple[int, memoryview]:
        threads.append(threading.get_ident())
        return encode(new, base, size)

    monkeypatch.setattr(delta_encoder, "encode", counted)
    payloads: list[dict[int, Payload]] = [{}, {}]
    for receiver in payloads:
        version = world.encoder.version((NEW, BASE), memoryview(world.new), memoryview(world.base))
        world.encoder.use((NEW, BASE))

        def fetch(bucket: int = 0, receiver: dict[int, Payload] = receiver) -> None:
            """As a link asks: again whenever it is woken, then for the next bucket."""
            while bucket < 5 and (made := version.payload((0, bucket), lambda: fetch(bucket, receiver))):  # noqa: B023
                receiver[bucket] = made
                bucket += 1

        fetch()
    world.run(lambda: all(len(receiver) == 5 for receiver in payloads))
    assert len(threads) == 5 and threading.get_ident() not in threads
    assert payloads[0] == payloads[1]
    target = bytearray(world.base)
    for bucket, payload in payloads[0].items():
        area = memoryview(target)[bucket * BUCKET : (bucket + 1) * BUCKET]
        decode_into(area, payload.encoding, payload.data, SIZE)
        assert len(payload.data) < len(area) / 5 or bucket == 4
    assert bytes(target) == world.new


def test_slots_are_held_while_they_are_read_and_no_longer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(new: memoryview, base: memoryview, size: int) -> tuple[int, memoryview]:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return encode(new, base, size)

    monkeypatch.setattr(delta_encoder, "encode", slow)
    version = world.encoder.version((NEW, BASE), memoryview(world.new), memoryview(world.base))
    world.encoder.use((NEW, BASE))
    assert begun.wait(PATIENCE_S)
    # Meanwhile everything that kept the base has gone: another base, and the only delivery.
    world.keeper.retain(None)
    world.encoder.end_use((NEW, BASE))
    assert version.cancelled and world.state(BASE) is SlotState.READY, "freed while it is read"
    go_on.set()
    world.run(lambda: world.state(BASE) is SlotState.FREE)
    assert version.payload((0, 4), lambda: None) is None, "went on after it was cancelled"


def test_deltas_are_kept_for_later_actors_until_a_newer_version_comes(world: World) -> None:
    version = world.encoder.version((NEW, BASE), memoryview(world.new), memoryview(world.base))
    world.encoder.use((NEW, BASE))
    world.run(lambda: version.payload((0, 4), lambda: None) is not None)
    world.encoder.end_use((NEW, BASE))
    assert world.encoder.version((NEW, BASE), memoryview(world.new), memoryview(world.base)) is version
    world.keeper.retain(NEW)
    world.encoder.trim()
    world.run(lambda: world.state(BASE) is SlotState.FREE)
    assert world.encoder.version((NEW, BASE), memoryview(world.new), memoryview(world.base)) is not version
