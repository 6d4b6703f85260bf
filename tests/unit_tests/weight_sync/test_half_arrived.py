"""Connections that end, and versions that come, while a bucket arrives."""

from __future__ import annotations

from deterministic.parts import BUCKET_BYTES
from tests.unit_tests.weight_sync.test_puller_alone import BUCKETS, World, bucket_of


def test_bucket_that_a_thread_writes_is_not_asked_for_over_the_next_channel() -> None:
    world = World()
    world.process.longest_on_thread["fetch"] = 100.0
    world.newest(1, 0)
    world.fetched = [world.sheet()[0]]
    world.server.say("bucket", pull=1, rank=0, bucket=0, reference={})
    world.server.channels[-1].close("killed")
    world.run(0.5)
    assert world.server.last("open")["buckets"] == [[1, 2]] and world.fetched
    world.run(100.0)
    world.send(0, 1)
    world.run(0.1)
    assert world.applied == [0]


def test_half_a_bucket_is_written_no_further_and_no_base_of_a_delta() -> None:
    world = World()
    world.newest(1, 0)
    for bucket in range(BUCKETS):
        world.send(0, bucket)
    world.run(0.1)
    world.newest(2, 1)
    world.server.process.rate = BUCKET_BYTES / 10.0
    world.send(1, 0)
    half = BUCKET_BYTES // 2
    assert world.staging[:half] == bucket_of(1, 0)[:half] and world.staging[half:BUCKET_BYTES] == bucket_of(0, 0)[half:]
    world.newest(3, 2, base=1)
    world.run(0.1)
    assert world.server.channels[0].closed and len(world.server.channels) == 2
    deltas, whole = world.server.heard[-2:]
    assert (deltas["buckets"], deltas["base"]) == ([[1, 2]], 1) and whole["buckets"] == [[0, 1]] and "base" not in whole
    world.run(20.0)
    assert world.staging[half:BUCKET_BYTES] == bucket_of(0, 0)[half:]
