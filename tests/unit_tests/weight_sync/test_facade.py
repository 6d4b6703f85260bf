"""Whom the training loop waits for, and what it is told of those who are not there; the registry's word is made up."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from torchtitan.errors import UserError
from torchtitan.weight_sync import facade
from torchtitan.weight_sync.facade import SyncOutcome, Watcher, WeightSync
from torchtitan.weight_sync.memory.published import PublishedVersions
from torchtitan.weight_sync.memory.slots import Boundary
from torchtitan.weight_sync.registry.state import MAX_FAILURES, tally
from torchtitan.weight_sync.servers import listen
from torchtitan.weight_sync.wire.runtime import Message


def actor(version: int, state: str = "ready", **others: Any) -> Message:
    serves = state not in ("evicted", "given_up", "poisoned") and version >= 0
    usual = {"pinned": False, "failures": 0, "reason": "", "figures": {}, "evictions": 0, "eviction": ""}
    return {"state": state, "version": version, "serves": serves, **usual, **others}


class Registry:
    """What a watcher would say, at first and when it has been waited for."""

    def __init__(self, newest: int | None, *states: dict[str, Message]):
        self.newest, self.told = newest, list(states)
        self.enough: bool | None = None

    def status(self) -> Message:
        counts = tally(SimpleNamespace(shown_state=entry["state"], **entry) for entry in self.told[0].values())  # type: ignore[misc]
        return {"newest": self.newest, "actors": self.told[0], "dropped": [], "evictions": 2, **counts}

    def refresh(self, _timeout: float) -> Message:
        return self.status()

    def wait_for(self, condition: Callable[[Message], bool], _timeout: float) -> None:
        self.told = self.told[-1:]
        self.enough = condition(self.status())


def sync_of(registry: Registry, failure: str = "") -> WeightSync:
    sync: Any = object.__new__(WeightSync)
    sync.watcher, sync.registry = registry, None
    sync.publisher, sync.shard_server = SimpleNamespace(failure=failure), SimpleNamespace(failure="")
    sync._stall_s = sync._snapshot_s = 0.0
    sync.boundary = SimpleNamespace(skipped=1)
    sync._taken, sync._published_count, sync._overtaken = {4: 5}, 4, []
    made: WeightSync = sync
    return made


@pytest.mark.parametrize(
    ("newest", "others", "at_least", "enough"),
    [
        (3, {}, 0, True), (3, {}, 1, True), (4, {}, 1, True), (3, {}, 2, False), (2, {}, 0, False),
        (None, {}, 0, False), (3, {"b": actor(2)}, 0, False), (3, {"b": actor(4)}, 2, True),
        (3, {"b": actor(3, "poisoned")}, 0, False),
        # These are not waited for, and count for nothing.
        (3, {"b": actor(2, pinned=True)}, 1, True), (3, {"b": actor(2, "evicted")}, 1, True),
        (3, {"b": actor(2, "late")}, 1, True),
        (3, {"b": actor(2, "given_up")}, 2, False), (3, {"b": actor(2, failures=MAX_FAILURES)}, 1, True),
        (3, {"b": actor(2, failures=MAX_FAILURES - 1)}, 1, False),
    ],
)  # fmt: skip
def test_the_wait_for_a_version_is_over_when_live_actors_serve_it(
    newest: int | None, others: dict[str, Message], at_least: int, enough: bool
) -> None:
    registry = Registry(newest, {"a": actor(3), **others})
    sync_of(registry).wait_until_applied(3, 1.0, at_least)
    assert registry.enough is enough


def test_missing_actors_are_returned_with_their_reasons() -> None:
    before = {
        "a": actor(2),
        "late": actor(2),
        "dies": actor(2),
        "gone": actor(2, "evicted"),
        "back": actor(1, "evicted"),
    }
    after = {
        **before, "a": actor(3), "late": actor(2, "pulling"), "dies": actor(2, "evicted", reason="no word"),
        "back": actor(-1, "joining"),
    }  # fmt: skip
    sync = sync_of(Registry(3, before, after))
    expected = {
        "late": "pulling at version 2",
        "dies": "evicted at version 2: no word",
        "back": "joining at version -1",
    }
    assert sync.wait_until_applied(3, 1.0) == SyncOutcome(frozenset({"a"}), expected)
    waited = sync.statistics()["time/sync_stall_s"]
    assert waited > 0 and sync.statistics()["time/sync_stall_s"] == 0
    sync.wait_until_applied(3, 1.0, counts_as_stall=False)
    assert sync.statistics()["time/sync_stall_s"] == 0


def test_the_states_and_figures_of_actors_are_returned() -> None:
    sync = sync_of(Registry(3, {"a": actor(3, figures={"apply_s": 1.5, "bytes_full": 7})}))
    assert sync.actors()["a"] == ("ready", 3, True, "", 0, "")
    figures = {"weight_sync/a/version": 3, "weight_sync/a/apply_s": 1.5, "weight_sync/evictions": 2}
    counted = {"weight_sync/versions_published": 5, "weight_sync/versions_skipped": 1}
    assert sync.statistics() == {**figures, **counted, "time/snapshot_s": 0.0, "time/sync_stall_s": 0.0}
    with pytest.raises(UserError, match="the registry is gone"):
        sync_of(Registry(3, {}), failure="the registry is gone").wait_until_applied(3, 1.0)


def test_watcher_whose_thread_has_failed_says_so_and_ends_waits() -> None:
    watcher = Watcher("127.0.0.1:9", "token", "e")
    began = time.monotonic()
    watcher.wait_for(lambda _status: False, 0.2)
    assert time.monotonic() - began >= 0.2 and not watcher.failure
    watcher._runtime.post(lambda: 1 / 0)
    watcher.wait_for(lambda _status: False, 10 * PATIENCE_S)
    assert time.monotonic() - began < PATIENCE_S and "ZeroDivisionError" in watcher.failure
    watcher.close(1.0)


def test_refresh_waits_for_the_details_of_all_actors() -> None:
    watcher = Watcher("127.0.0.1:9", "token", "e")
    status = {"type": "status", "forgotten": [], "guests": {}}
    changed = {**status, "complete": False, "newest": 6, "actors": {"b": actor(6)}}
    complete = {**status, "complete": True, "newest": 7, "actors": {"a": actor(7)}}

    def look(message: Message) -> None:
        for seconds, answer in ((0.1, changed), (0.3, complete)) if message["type"] == "look" else ():
            watcher._runtime.call_later(seconds, partial(watcher._on_message, answer))

    watcher._registry.tell = look  # type: ignore[method-assign]
    for _ in range(2):  # what came before counts for nothing
        found = watcher.refresh(PATIENCE_S)
        assert (found["newest"], found["actors"]) == (7, complete["actors"])
    watcher._registry.tell = lambda _message: None  # type: ignore[method-assign]
    began = time.monotonic()
    assert watcher.refresh(0.2) is watcher.status() and time.monotonic() - began >= 0.2
    watcher.close(1.0)


def test_time_of_the_training_thread_is_told_of_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0

    def takes(seconds: float) -> bool:
        nonlocal clock
        clock += seconds
        return True

    monkeypatch.setattr(facade, "time", SimpleNamespace(perf_counter=lambda: clock))
    sync: Any = sync_of(Registry(3, {}))
    sync.boundary = SimpleNamespace(
        serial=1, skipped=0, reserve=lambda: takes(1.0), commit=lambda *_: takes(4.0), snapshot_pending=lambda *_: False
    )
    sync.publisher.fence = lambda: takes(2.0)
    expected = {"reserve": (0.0, 1.0), "fence": (0.0, 2.0), "commit": (4.0, 0.0)}
    for call, times in expected.items():
        getattr(sync, call)(*(3, 0) if call == "commit" else ())
        figures = sync.statistics()
        assert (figures["time/snapshot_s"], figures["time/sync_stall_s"]) == times, call


def test_version_that_a_newer_one_overtakes_is_not_counted_as_published() -> None:
    sync, known = sync_of(Registry(None, {})), PublishedVersions()
    sync.registry = SimpleNamespace(published=known, failure="")  # type: ignore[assignment]
    sync._taken, sync._published_count = {}, 0
    dropped: list[list[int]] = []
    sync.watcher.failure = ""  # type: ignore[union-attr,misc]
    sync.watcher.status = lambda: {"dropped": dropped, "evictions": 0, "actors": {}, "failure": ""}  # type: ignore[union-attr,method-assign]

    def counted() -> int:
        return int(sync.statistics()["weight_sync/versions_published"])

    for version in range(4):
        sync.boundary.serial = version + 1
        sync._snapshot(version, lambda: True)
    assert counted() == 4, "nothing is known of them yet"
    known.add(0, "00" * 16)
    known.add(2, "00" * 16)
    assert counted() == 3 and sync.take_overtaken() == [1] and not sync.take_overtaken()
    # One that is dropped is pending, and counts again once it has been taken again.
    dropped.append([4, 3])
    assert counted() == 2
    sync.boundary.serial = 5
    sync._snapshot(3, lambda: True)
    assert counted() == 3
    known.add(3, "00" * 16)
    assert counted() == 3 and sync.take_overtaken() == [] and not sync._taken


def test_ports_are_listened_at_where_they_are_free() -> None:
    for host, family in (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)):
        with listen(host, 0) as listener:
            assert listener.family == family
            with pytest.raises(UserError, match="cannot listen at .*must be free"):
                listen(host, listener.getsockname()[1])


class Slots:
    """A rank's slots, of which some are free."""

    def __init__(self, *free: bool):
        self.free, self.done = list(free), list[Any]()

    def reserve(self) -> bool:
        return self.free.pop(0)

    def release(self) -> None:
        self.done.append("release")

    def snapshot(self, version: int, serial: int) -> None:
        self.done.append((version, serial))

    def fail(self, version: int, serial: int) -> None:
        self.done.append(("fail", version, serial))


def test_a_skipped_or_dropped_version_stays_pending_until_its_snapshot() -> None:
    slots = Slots(True, True, False, True)
    boundary = Boundary(slots)
    assert boundary.reserve() and boundary.commit(0, votes_against=0) and boundary.pending_version(None, ()) is None
    # Another rank could not: it is pending where nothing newer has been published.
    assert boundary.pending_version(None, [(1, 0)]) == 0 and boundary.pending_version(-1, [(1, 0)]) == 0
    assert boundary.pending_version(0, [(1, 0)]) is None and boundary.pending_version(None, [(2, 0), (1, 1)]) is None
    assert boundary.reserve() and not boundary.commit(1, votes_against=1) and boundary.pending_version(0, [(1, 0)]) == 1
    assert not boundary.snapshot_pending(1) and boundary.pending_version(0, ()) == 1
    assert (
        boundary.snapshot_pending(1)
        and boundary.pending_version(0, ()) is None
        and boundary.pending_version(0, [(4, 1)]) == 1
    )
    assert slots.done == [(0, 1), "release", ("fail", 1, 3), (1, 4)]
    assert (boundary.serial, boundary.published, boundary.skipped) == (4, 2, 1)


def test_every_part_may_say_why_nothing_is_published_any_more() -> None:
    sync: Any = object.__new__(WeightSync)
    parts = {name: SimpleNamespace(failure="") for name in ("publisher", "shard_server", "registry", "watcher")}
    status = {"failure": ""}
    parts["watcher"].status = lambda: status
    vars(sync).update(parts)
    assert not sync.failure
    for name, part in parts.items():
        part.failure = f"the {name} is gone"
        assert part.failure in sync.failure
    status["failure"] = "the layouts do not fit"
    assert sync.failure.count("; ") == 4 and sync.failure.endswith("the layouts do not fit")
    sync.registry = sync.watcher = None
    assert sync.failure == "the publisher is gone; the shard_server is gone"
