"""Connections that end, and versions that come, while a bucket arrives."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deterministic.parts import BUCKET_BYTES
from tests.unit_tests.weight_sync.test_puller_alone import World, bucket_of, pulling
from torchtitan.weight_sync.wire import hook


def test_a_connection_that_is_reset_with_the_last_bucket_costs_no_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    def at(phase: str, **_where: Any) -> frozenset[str]:
        if phase == "staged":
            raise ConnectionResetError("fault injection")
        return frozenset()

    monkeypatch.setattr(hook, "at", at)
    world = World()
    world.newest(5, 3)
    world.send_all(3)
    assert world.applied == [3] and world.server.count("open") == 1


def test_a_connection_that_is_reset_when_a_pause_ends_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    world, resets = World(), [False, True]

    def at(phase: str, **_where: Any) -> frozenset[str]:
        if phase == "pull" and resets.pop(0):
            raise ConnectionResetError("fault injection")
        return frozenset()

    monkeypatch.setattr(hook, "at", at)
    world.newest(1, 0)
    world.server.say("gone", pull=1)
    world.run(2.0)
    assert not resets and len(world.registry.channels) == 2
    world.send_all(0)
    assert world.applied == [0]


def test_bucket_that_a_thread_writes_is_not_asked_for_over_the_next_channel() -> None:
    world = World()
    world.process.longest_on_thread["fetch"] = 100.0
    world.newest(1, 0)
    world.fetched = [world.table()[0]]
    world.server.say("bucket", pull=1, rank=0, bucket=0, reference={})
    world.server.channels[-1].close("killed")
    world.run(0.5)
    assert world.server.last("open")["buckets"] == [[1, 2]] and world.fetched
    world.run(100.0)
    world.send(0, 1)
    world.run(0.1)
    assert world.applied == [0]


def test_half_a_bucket_is_written_no_further_and_no_base_of_a_delta() -> None:
    world = pulling()
    world.send_all(0)
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
