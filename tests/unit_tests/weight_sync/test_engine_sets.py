"""Versions that are received into the idle one of an engine's two sets of tensors: the other one is computed with, and
must stay what it is whatever becomes of a version."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.deterministic.parts import BUCKET_BYTES, ELEMENT_BYTES, Sets, content
from tests.unit_tests.weight_sync.test_puller_alone import BUCKETS, LAYOUT, World, bucket_of
from torchtitan.distributed.boxes import Box
from torchtitan.weight_sync.actor.actor import StagingEngine, SyncActor
from torchtitan.weight_sync.actor.puller import MAX_CORRUPTIONS
from torchtitan.weight_sync.memory.delta import encode
from torchtitan.weight_sync.memory.layout_tables import ParameterEntry, ParameterTable, ShardTable
from torchtitan.weight_sync.memory.manifest import Layout, WeightsRefused
from torchtitan.weight_sync.memory.staging import NamedTensors, SetsOfTensors, StagedTensors, StagedVersion

# A piece of each of the two tensors in the first bucket.
PIECES = [(20 * ELEMENT_BYTES, 12 * ELEMENT_BYTES), (BUCKET_BYTES,)]


class Engine(StagingEngine):
    """Serves what it is given, unless it raises the next error of `raises`; asleep it has no memory."""

    min_piece_bytes = 1

    def __init__(self) -> None:
        self.both, self.asleep = Sets(LAYOUT), False
        self.served: list[int] = []
        self.raises: list[Exception] = []
        self.offered: list[StagedTensors] = []
        super().__init__(self._take, "cpu", lambda _function: None, engine=self)

    @property
    def outlines(self) -> NamedTensors:
        return self.both.outlines

    def sets(self) -> SetsOfTensors | None:
        return None if self.asleep else self.both.sets()

    def _take(self, staged: StagedVersion) -> None:
        assert isinstance(staged.tensors, StagedTensors) and staged.tensors.received_in is self.both.idle
        self.offered.append(staged.tensors)
        if self.raises:
            raise self.raises.pop()
        staged.tensors.exchange(self.both.exchange)
        self.served.append(staged.version)

    @property
    def computes_with(self) -> bytes:
        return b"".join(tensor[0].numpy().tobytes() for tensor in self.both.live.values())


def serving(versions: int) -> tuple[World, Engine]:
    """It serves the last of so many versions: version N is snapshot N + 1."""
    engine = Engine()
    world = World(engine=engine)
    for version in range(versions):
        world.newest(version + 1, version)
        world.send_all(version)
    assert engine.served == list(range(versions))
    return world, engine


def whole(version: int) -> bytes:
    return content("e1", version, 0, BUCKETS)


def send_delta(world: World, version: int, bucket: int, base: int) -> None:
    """Answer with a delta against version `base`."""
    delta = encode(memoryview(bucket_of(version, bucket)), memoryview(bucket_of(base, bucket)), ELEMENT_BYTES)
    assert delta is not None
    world.send(version, bucket, data=bytes(delta), base=base + 1)
    world.run(0.1)


def requested(world: World, count: int) -> dict[tuple[int, ...], int | None]:
    """Ranges of the last requests -> what deltas are against."""
    return {tuple(itertools.chain(*asked["buckets"])): asked.get("base") for asked in world.server.heard[-count:]}


def test_version_is_received_in_pieces_into_the_set_that_nothing_computes_with() -> None:
    world, engine = serving(1)
    live = engine.both.live
    world.newest(2, 1)
    assert [tuple(map(len, engine.pieces((0, bucket)))) for bucket in range(BUCKETS)] == PIECES
    world.send(1, 0)
    assert engine.computes_with == whole(0) and engine.served == [0]
    world.send(1, 1)
    world.run(0.1)
    assert engine.served == [0, 1] and engine.computes_with == whole(1)
    assert engine.both.idle is live, "the memory of version 0 takes version 2"


def test_after_a_receive_that_was_abandoned_only_touched_buckets_come_whole() -> None:
    world, engine = serving(2)
    world.newest(3, 2)
    world.send(2, 0)
    world.server.process.rate = BUCKET_BYTES / 10.0
    world.send(2, 1)
    # Bucket 0 is of version 2, and half of bucket 1.
    assert engine.held == {(0, 0): 3} and engine.held_live == {(0, 0): 2, (0, 1): 2}
    world.newest(4, 4, base=3)
    world.run(0.1)
    assert engine.computes_with == whole(1) and engine.served == [0, 1]
    assert requested(world, 2) == {(0, 1): 3, (1, 2): None}
    world.server.process.rate = 1e9
    send_delta(world, 4, 0, base=2)
    world.send(4, 1)
    world.run(0.1)
    assert engine.served == [0, 1, 4] and engine.computes_with == whole(4)


def test_deltas_against_what_is_computed_with_leave_it_as_it_is() -> None:
    world, engine = serving(2)
    world.newest(3, 2, base=2)
    assert requested(world, 1) == {(0, 2): 2}
    send_delta(world, 2, 0, base=1)
    assert engine.computes_with == whole(1)
    # It is abandoned: what is half there is no reason to send more, since the base is what is computed with.
    world.newest(4, 4, base=2)
    world.run(0.1)
    assert requested(world, 1) == {(0, 2): 2}
    for bucket in range(BUCKETS):
        send_delta(world, 4, bucket, base=1)
    assert engine.served == [0, 1, 4] and engine.computes_with == whole(4)
    assert world.puller.corrupted == 0


def test_version_that_is_not_applied_is_a_base_and_what_is_computed_with_stays() -> None:
    world, engine = serving(1)
    engine.raises.append(WeightsRefused("not now"))
    world.newest(2, 1)
    world.send_all(1)
    assert engine.served == [0] and engine.computes_with == whole(0)
    world.newest(3, 2, base=2)
    assert requested(world, 1) == {(0, 2): 2}
    for bucket in range(BUCKETS):
        send_delta(world, 2, bucket, base=1)
    assert engine.served == [0, 2] and engine.computes_with == whole(2)


def test_bucket_that_does_not_come_whole_is_repaired_or_ends_the_pull_and_changes_nothing() -> None:
    world, engine = serving(1)
    world.newest(2, 1)
    world.send(1, 0)
    for _ in range(MAX_CORRUPTIONS):
        assert (0, 1) not in engine.held
        world.send(1, 1, data=bytes(BUCKET_BYTES))
    assert world.registry.last("ended")["outcome"] == "refused"
    assert engine.computes_with == whole(0) and engine.served == [0]
    world.newest(3, 2)
    world.send(2, 0)
    world.send(2, 1, data=bytes(BUCKET_BYTES))
    assert world.server.last("open")["again"]
    world.send(2, 1)
    world.run(0.1)
    assert engine.served == [0, 2] and engine.computes_with == whole(2)


def test_call_that_has_failed_exchanges_nothing_any_more() -> None:
    world, engine = serving(1)
    engine.raises.append(TimeoutError("the engine did not finish its step"))
    world.newest(2, 1)
    world.send_all(1)
    world.newest(3, 2)
    world.send(2, 0)
    # The engine's thread comes to it now, and its memory holds half of another version.
    with pytest.raises(WeightsRefused, match="too late"):
        engine.offered[-1].exchange(engine.both.exchange)
    assert engine.computes_with == whole(0)
    world.send(2, 1)
    world.run(0.1)
    assert engine.served == [0, 2] and engine.computes_with == whole(2)


def test_engine_that_sleeps_gets_its_memory_back_at_once_and_the_version_when_it_wakes() -> None:
    world, engine = serving(2)
    world.newest(3, 2)
    world.send(2, 0)
    engine.asleep = True
    world.puller.release()
    world.run(0.1)
    assert world.registry.last("ended")["outcome"] == "lost"
    assert world.puller.state == "ready" and engine._stagings == [] and engine._staging is None
    world.run(3.0)
    asked = world.server.count("open")
    # Other memory, in which nothing is a base.
    engine.asleep, engine.both = False, Sets(LAYOUT)
    world.live(3, base=2)
    world.run(1.0)
    assert world.server.count("open") == asked + 1 and requested(world, 1) == {(0, 2): None}
    world.send_all(2)
    assert engine.served == [0, 1, 2] and engine.computes_with == whole(2)


@pytest.mark.parametrize(("relay_host", "pieces"), [("", PIECES), ("127.0.0.1", [(BUCKET_BYTES,)] * BUCKETS)])
def test_actor_that_relays_receives_into_memory_that_its_readers_may_keep(
    relay_host: str, pieces: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StagingEngine, "min_piece_bytes", 1)
    sets = Sets(LAYOUT)
    actor = SyncActor("127.0.0.1:9", "a", "e", "k", lambda _staged: None, relay_host=relay_host, sets=sets)
    found: Any = actor.puller.engine
    found.prepare(LAYOUT, {"over_channel": True})
    assert found.choose_memory()
    assert [tuple(map(len, found.pieces((0, bucket)))) for bucket in range(BUCKETS)] == pieces
    actor.close()


def layout_of(box: Box, dtype: str = "float32", name: str = "w") -> Layout:
    parameters = ParameterTable.of([ParameterEntry(name, dtype, (4, 8))])
    return Layout(BUCKET_BYTES, parameters, (ShardTable.of(parameters, [(0, box)]),))


ROWS, COLUMNS = Box((2, 0), (2, 8)), Box((0, 4), (4, 4))


@pytest.mark.parametrize(
    ("layout", "message", "said"),
    [
        (layout_of(ROWS), {}, "the transport fills whole buckets"),
        (layout_of(ROWS, "bfloat16"), {"over_channel": True}, "bfloat16 is sent, and the engine computes in"),
        (layout_of(COLUMNS), {"over_channel": True}, "other parts of w than rows"),
        (layout_of(ROWS, name="w.lora_A.weight"), {"over_channel": True}, "no tensor like w.lora_A.weight"),
        (layout_of(ROWS), {"over_channel": True}, "pieces that are sent have 64 bytes on average"),
    ],
)
def test_what_cannot_be_received_into_the_engines_tensors_is_copied_and_the_log_says_why(
    layout: Layout, message: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    sets = Sets(layout)
    sets.outlines = {"w": torch.empty(4, 8)}
    engine = StagingEngine(lambda _staged: None, "cpu", lambda _function: None, engine=sets)
    with caplog.at_level("INFO"):
        engine.prepare(layout, message)
    assert said in caplog.text and engine.choose_memory()
    assert engine._filled.tensors.received_in is None
