"""Which snapshots live."""

from __future__ import annotations

import pytest

from torchtitan.weight_sync.memory.slots import LiveSlots, SlotState, SlotView, SlotWriter
from torchtitan.weight_sync.registry.state import Settings, Snapshots


def snapshots_with(*pulls: str, limit: int = 1) -> Snapshots:
    """Snapshot 1 is the newest, and being pulled by these."""
    snapshots = Snapshots(Settings(1, limit, lease_s=10.0, progress_timeout_s=3.0))
    snapshots.publish(1, 0.0)
    for actor in pulls:
        snapshots.begin(actor, 1, 0.0)
    return snapshots


def test_version_that_nobody_pulls_is_gone_with_the_next() -> None:
    snapshots = snapshots_with()
    snapshots.publish(2, 1.0)
    assert not snapshots.retained and snapshots.lives(2) and not snapshots.lives(1)


def test_version_that_is_pulled_is_retained_if_there_is_room() -> None:
    snapshots = snapshots_with("slow")
    snapshots.publish(2, 1.0)
    assert list(snapshots.retained) == [1] and not snapshots.room
    snapshots.begin("other", 2, 1.5)
    snapshots.publish(3, 2.0)
    assert list(snapshots.retained) == [1] and not snapshots.lives(2) and set(snapshots.pulls) == {"slow"}
    snapshots.finished("slow")
    assert not snapshots.retained and snapshots.room


def test_retained_snapshot_ends_with_the_last_of_its_pulls() -> None:
    snapshots = snapshots_with("one", "other")
    snapshots.publish(2, 1.0)
    snapshots.finished("one")
    assert list(snapshots.retained) == [1]
    snapshots.end("other")
    assert not snapshots.retained


def test_retained_snapshot_has_an_absolute_life_however_its_pulls_get_on() -> None:
    snapshots = snapshots_with("slow")
    snapshots.publish(2, 1.0)
    for second in range(2, 11):
        snapshots.progress("slow", second, float(second))
        assert snapshots.expire(float(second)) == []
    snapshots.progress("slow", 99, 11.0)
    assert snapshots.expire(11.1) == ["slow"] and not snapshots.retained and snapshots.lost == {"slow": 1}


def test_pull_without_progress_does_not_keep_its_snapshot() -> None:
    snapshots = snapshots_with("frozen", "slow")
    snapshots.progress("frozen", 5, 0.5)
    snapshots.publish(2, 1.0)
    snapshots.progress("slow", 5, 3.0)
    # That it says again and again how far it is moves nothing.
    snapshots.progress("frozen", 5, 4.0)
    assert snapshots.expire(4.5) == ["frozen"] and list(snapshots.retained) == [1]


def test_newest_has_no_deadline() -> None:
    snapshots = snapshots_with("slow")
    assert snapshots.expire(1000.0) == [] and snapshots.pulls


def test_new_registry_hears_of_pulls_before_it_has_published() -> None:
    snapshots = Snapshots(Settings(1, lease_s=10.0, progress_timeout_s=3.0))
    snapshots.begin("slow", 5, 0.0)
    snapshots.begin("other", 4, 0.0)
    snapshots.publish(5, 0.1)
    snapshots.publish(6, 1.0)
    assert list(snapshots.retained) == [5] and set(snapshots.pulls) == {"slow"}


def words(*serials: int) -> list[int]:
    return [SlotView(SlotState.READY, serial + 100, serial).pack() for serial in serials]


def test_slot_is_free_when_its_snapshot_is_over() -> None:
    slots = LiveSlots(words(1, 2, 3))
    slots.live(2, [1], [], 0.0)
    assert sorted(slots.filled()) == [1, 2, 3]
    slots.live(3, [], [], 1.0)
    assert slots.filled() == {3: (2, 103)}


def test_snapshot_is_kept_while_a_thread_reads_it() -> None:
    slots = LiveSlots(words(1, 2))
    slots.hold(1)
    slots.live(2, [], [], 0.0)
    assert 1 in slots.filled() and slots.readable(1) is None
    slots.let_go(1)
    assert 1 not in slots.filled()


def test_dropped_snapshot_is_free_though_it_is_the_newest() -> None:
    slots = LiveSlots(words(1, 2))
    slots.live(1, [], [2], 0.0)
    assert sorted(slots.filled()) == [1]


def test_snapshot_newer_than_all_that_is_known_may_be_read() -> None:
    slots = LiveSlots(words(1, 2))
    slots.live(1, [], [], 0.0)
    assert slots.readable(2) == (1, 102)


def test_older_word_of_the_registry_is_not_heard() -> None:
    slots = LiveSlots(words(1, 2))
    slots.live(2, [1], [], 0.0)
    slots.live(1, [], [2], 1.0)
    assert slots.newest == 2 and sorted(slots.filled()) == [1, 2]


def test_retained_snapshot_expires_where_no_registry_says_so() -> None:
    slots = LiveSlots(words(1, 2))
    slots.live(2, [1], [], 5.0)
    slots.live(2, [1], [], 9.0)
    slots.expire(14.9, 10.0)
    assert slots.lives(1)
    slots.expire(15.1, 10.0)
    assert sorted(slots.filled()) == [2]


def test_base_is_what_most_actors_hold() -> None:
    snapshots = Snapshots(Settings(1, delta=True))
    snapshots.publish(1, 0.0)
    for actor in ("a", "b", "slow"):
        snapshots.begin(actor, 1, 0.0)
    for actor in ("a", "b"):
        snapshots.finished(actor)
    snapshots.publish(2, 1.0)
    assert (snapshots.base, list(snapshots.retained)) == (1, [1])
    # Nobody holds it any more, and the slow actor still pulls it; then that one alone does.
    for actor in ("a", "b"):
        snapshots.begin(actor, 2, 1.0)
        snapshots.finished(actor)
    assert (snapshots.base, list(snapshots.retained)) == (None, [1])
    snapshots.finished("slow")
    assert (snapshots.base, list(snapshots.retained)) == (1, []) and not snapshots.lives(1)
    snapshots.begin("slow", 2, 1.5)
    # The others hold what now is the older one: two against one.
    snapshots.publish(3, 2.0)
    assert (snapshots.base, list(snapshots.retained)) == (2, [2])
    snapshots.leave("a")
    snapshots.leave("b")
    snapshots.finished("slow")
    assert snapshots.base == 2
    snapshots.leave("slow")
    assert snapshots.base is None


def test_slot_of_the_trainer_is_filled_in_order() -> None:
    words = [0, 0]
    writer = SlotWriter(words)
    with pytest.raises(RuntimeError, match="without a reserved slot"):
        writer.begin(7, 1)
    assert writer.reserve() and writer.reserve() and words[1] == 0
    with pytest.raises(RuntimeError, match="expected WRITING"):
        writer.finish(0)
    assert writer.begin(7, 1) == 0
    assert LiveSlots(words).filled() == {}, "it is being written"
    writer.finish(0)
    assert LiveSlots(words).filled() == {1: (0, 7)}
    writer.release()
    assert writer.reserve() and writer.begin(8, 2) == 1 and not writer.reserve()
    words[0] = 0
    assert writer.reserve()
    writer.release()
    assert words[0] == 0


def test_snapshots_lost_in_a_row_end_with_a_whole_version_or_a_new_process() -> None:
    snapshots = snapshots_with("one", "other")
    snapshots.publish(2, 1.0)
    assert sorted(snapshots.expire(20.0)) == ["one", "other"] and snapshots.lost == {"one": 1, "other": 1}
    snapshots.begin("one", 2, 21.0)
    snapshots.finished("one")
    assert snapshots.lost == {"other": 1}
    snapshots.begin("other", 2, 22.0)
    snapshots.publish(3, 23.0)
    snapshots.forget("other")
    assert not snapshots.lost and not snapshots.pulls and not snapshots.retained


def test_what_is_let_go_twice_is_not_held_by_the_second_thread() -> None:
    slots = LiveSlots(words(1, 2))
    slots.hold(1)
    slots.hold(1)
    slots.live(2, [], [], 0.0)
    slots.let_go(1)
    assert 1 in slots.filled()
    slots.let_go(1)
    assert list(slots.filled()) == [2] and slots._words[0] == 0
