"""Which snapshots live."""

from __future__ import annotations

import pytest

from torchtitan.weight_sync.memory.slots import LiveSlots, SlotState, SlotView, SlotWriter
from torchtitan.weight_sync.registry.state import Lanes, Settings


def lanes_with(*pulls: str, limit: int = 1) -> Lanes:
    """Snapshot 1 is the newest, and being pulled by these."""
    lanes = Lanes(Settings(1, limit, lease_s=10.0, progress_timeout_s=3.0))
    lanes.publish(1, 0.0)
    for actor in pulls:
        lanes.begin(actor, 1, 0.0)
    return lanes


def test_version_that_nobody_pulls_is_gone_with_the_next() -> None:
    lanes = lanes_with()
    lanes.publish(2, 1.0)
    assert not lanes.lanes and lanes.lives(2) and not lanes.lives(1)


def test_version_that_is_pulled_becomes_a_lane_if_there_is_room() -> None:
    lanes = lanes_with("slow")
    lanes.publish(2, 1.0)
    assert list(lanes.lanes) == [1] and not lanes.room
    lanes.begin("other", 2, 1.5)
    lanes.publish(3, 2.0)
    assert list(lanes.lanes) == [1] and not lanes.lives(2) and set(lanes.pulls) == {"slow"}
    lanes.finished("slow")
    assert not lanes.lanes and lanes.room


def test_lane_ends_with_the_last_of_its_pulls() -> None:
    lanes = lanes_with("one", "other")
    lanes.publish(2, 1.0)
    lanes.finished("one")
    assert list(lanes.lanes) == [1]
    lanes.end("other")
    assert not lanes.lanes


def test_lane_has_an_absolute_life_however_its_pulls_get_on() -> None:
    lanes = lanes_with("slow")
    lanes.publish(2, 1.0)
    for second in range(2, 11):
        lanes.progress("slow", second, float(second))
        assert lanes.expire(float(second)) == []
    lanes.progress("slow", 99, 11.0)
    assert lanes.expire(11.1) == ["slow"] and not lanes.lanes and lanes.lost == {"slow": 1}


def test_pull_without_progress_does_not_keep_its_lane() -> None:
    lanes = lanes_with("frozen", "slow")
    lanes.progress("frozen", 5, 0.5)
    lanes.publish(2, 1.0)
    lanes.progress("slow", 5, 3.0)
    # That it says again and again how far it is moves nothing.
    lanes.progress("frozen", 5, 4.0)
    assert lanes.expire(4.5) == ["frozen"] and list(lanes.lanes) == [1]


def test_newest_has_no_deadline() -> None:
    lanes = lanes_with("slow")
    assert lanes.expire(1000.0) == [] and lanes.pulls


def test_new_registry_hears_of_pulls_before_it_has_published() -> None:
    lanes = Lanes(Settings(1, lease_s=10.0, progress_timeout_s=3.0))
    lanes.begin("slow", 5, 0.0)
    lanes.begin("other", 4, 0.0)
    lanes.publish(5, 0.1)
    lanes.publish(6, 1.0)
    assert list(lanes.lanes) == [5] and set(lanes.pulls) == {"slow"}


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


def test_lane_expires_where_no_registry_says_so() -> None:
    slots = LiveSlots(words(1, 2))
    slots.live(2, [1], [], 5.0)
    slots.live(2, [1], [], 9.0)
    slots.expire(14.9, 10.0)
    assert slots.lives(1)
    slots.expire(15.1, 10.0)
    assert sorted(slots.filled()) == [2]


def test_base_is_what_most_actors_hold() -> None:
    lanes = Lanes(Settings(1, delta=True))
    lanes.publish(1, 0.0)
    for actor in ("a", "b", "slow"):
        lanes.begin(actor, 1, 0.0)
    for actor in ("a", "b"):
        lanes.finished(actor)
    lanes.publish(2, 1.0)
    assert (lanes.base, list(lanes.lanes)) == (1, [1])
    # Nobody holds it any more, and the slow actor still pulls it; then that one alone does.
    for actor in ("a", "b"):
        lanes.begin(actor, 2, 1.0)
        lanes.finished(actor)
    assert (lanes.base, list(lanes.lanes)) == (None, [1])
    lanes.finished("slow")
    assert (lanes.base, list(lanes.lanes)) == (1, []) and not lanes.lives(1)
    lanes.begin("slow", 2, 1.5)
    # The others hold what now is the older one: two against one.
    lanes.publish(3, 2.0)
    assert (lanes.base, list(lanes.lanes)) == (2, [2])
    lanes.leave("a")
    lanes.leave("b")
    lanes.finished("slow")
    assert lanes.base == 2
    lanes.leave("slow")
    assert lanes.base is None


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


def test_lanes_lost_in_a_row_end_with_a_whole_version_or_a_new_process() -> None:
    lanes = lanes_with("one", "other")
    lanes.publish(2, 1.0)
    assert sorted(lanes.expire(20.0)) == ["one", "other"] and lanes.lost == {"one": 1, "other": 1}
    lanes.begin("one", 2, 21.0)
    lanes.finished("one")
    assert lanes.lost == {"other": 1}
    lanes.begin("other", 2, 22.0)
    lanes.publish(3, 23.0)
    lanes.forget("other")
    assert not lanes.lost and not lanes.pulls and not lanes.lanes


def test_what_is_let_go_twice_is_not_held_by_the_second_thread() -> None:
    slots = LiveSlots(words(1, 2))
    slots.hold(1)
    slots.hold(1)
    slots.live(2, [], [], 0.0)
    slots.let_go(1)
    assert 1 in slots.filled()
    slots.let_go(1)
    assert list(slots.filled()) == [2] and slots._words[0] == 0
