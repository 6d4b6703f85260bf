"""Which snapshots live."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from torchtitan.weight_sync.memory.slots import LiveSlots, SlotState, SlotView, SlotWriter
from torchtitan.weight_sync.registry.snapshots import Snapshots
from torchtitan.weight_sync.registry.state import RegistrySettings


def snapshots_with(*pulls: str, limit: int = 1) -> Snapshots:
    """Snapshot 1 is the newest, and being pulled by these."""
    snapshots = Snapshots(RegistrySettings(1, limit, lease_s=10.0, progress_timeout_s=3.0))
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
        snapshots.moved("slow", 1, 1, float(second))
        assert snapshots.expire(float(second)) == []
    snapshots.moved("slow", 1, 99, 11.0)
    assert snapshots.expire(11.1) == ["slow"] and not snapshots.retained and snapshots.lost == {"slow": 1}


def test_pull_without_progress_does_not_keep_its_snapshot() -> None:
    snapshots = snapshots_with("frozen", "slow")
    snapshots.moved("frozen", 1, 5, 0.5)
    snapshots.publish(2, 1.0)
    snapshots.moved("slow", 1, 5, 3.0)
    # That it says how far it is moves nothing, nor that it begins again, nor bytes of another snapshot.
    snapshots.progress("frozen", 10**9, 4.0)
    snapshots.begin("frozen", 1, 4.0)
    snapshots.moved("frozen", 2, 5, 4.0)
    assert snapshots.expire(4.5) == ["frozen"] and list(snapshots.retained) == [1]


Trick = Callable[[Snapshots, int, float], object]
TRICKS: dict[str, Trick] = {
    "says that it has all": lambda snapshots, _serial, _now: snapshots.finished("liar"),
    "says that it has ended": lambda snapshots, _serial, _now: snapshots.end("liar"),
    "begins with the newest": lambda snapshots, serial, now: snapshots.begin("liar", serial + 1, now),
    "leaves": lambda snapshots, _serial, _now: snapshots.leave("liar"),
    "comes as another process": lambda snapshots, _serial, _now: snapshots.forget("liar"),
    "says how far it is": lambda snapshots, _serial, now: snapshots.progress("liar", int(1000 * now), now),
    "begins again": lambda snapshots, serial, now: snapshots.begin("liar", serial, now),
    "comes back": lambda snapshots, serial, now: (snapshots.leave("liar"), snapshots.begin("liar", serial, now)),
    "takes little": lambda snapshots, serial, now: snapshots.moved("liar", serial, 1, now),
    "takes another one": lambda snapshots, serial, now: snapshots.moved("liar", serial + 1, 500, now),
}


@pytest.mark.parametrize("after_s", [0.0, 2.5])
@pytest.mark.parametrize("trick", TRICKS)
def test_an_actor_that_held_a_snapshot_in_vain_retains_none_for_a_while(trick: str, after_s: float) -> None:
    """Versions of 1,000 bytes, one a second, for 200 s: a liar begins each, and tries a trick on what is retained for
    it, at once or when it has held that for a while."""
    snapshots = snapshots_with("liar")
    snapshots.version_bytes = 1000
    held = times = 0
    for fifth in range(5, 1000):
        now = fifth / 5
        if fifth % 5 == 0:
            before = set(snapshots.retained)
            snapshots.publish(fifth // 5 + 1, now)
            times += bool(set(snapshots.retained) - before)
        for serial, since in list(snapshots.retained.items()):
            if now - since >= after_s:
                TRICKS[trick](snapshots, serial, now)
        held += bool(snapshots.retained)
        snapshots.expire(now)
        if fifth % 5 == 4 and "liar" not in snapshots.pulls:
            snapshots.begin("liar", fifth // 5 + 1, now)
    assert times > 0 and held / 5 < 0.15 * 200


def test_an_actor_that_holds_another_snapshot_before_it_is_judged_rests_for_both() -> None:
    snapshots = snapshots_with("liar")
    snapshots.version_bytes = 1000
    snapshots.publish(2, 1.0)  # the first is retained from now on
    snapshots.begin("liar", 2, 3.0)
    snapshots.publish(3, 3.2)  # and the second
    snapshots.end("liar")
    assert snapshots.expire(3.5) == [] and not snapshots.resting and not snapshots.retained
    snapshots.expire(4.6)
    assert snapshots.resting == {"liar": pytest.approx(4.6 + 10 * (3.5 - 1.0))}


@pytest.mark.parametrize("sees_bytes", [True, False])
def test_an_actor_that_takes_a_complete_version_retains_the_next(sees_bytes: bool) -> None:
    """Also if the shard servers count its last bytes after it has said so, and if it was disconnected. Where they
    see no bytes, its word has to do."""
    snapshots = snapshots_with("slow", "other")
    snapshots.settings, snapshots.version_bytes = replace(snapshots.settings, sees_bytes=sees_bytes), 900

    def takes(serial: int, count: int, now: float) -> None:
        snapshots.moved("slow", serial, count, now) if sees_bytes else snapshots.progress("slow", 10**6 + count, now)

    snapshots.publish(2, 1.0)
    takes(1, 300, 2.0)
    snapshots.leave("slow")
    snapshots.begin("slow", 1, 2.5)
    takes(1, 300, 4.0)
    assert snapshots.expire(4.2) == ["other"]
    snapshots.finished("slow")
    snapshots.begin("slow", 2, 4.3)
    assert snapshots.expire(4.4) == []
    takes(1, 300, 4.5)
    snapshots.expire(5.8)
    snapshots.publish(3, 6.0)
    assert list(snapshots.retained) == [2] and set(snapshots.resting) == {"other"}


def test_pull_from_another_actor_retains_nothing_before_it_comes_to_a_shard_server() -> None:
    snapshots = snapshots_with()
    snapshots.begin("child", 1, 0.0, relayed=True)
    snapshots.publish(2, 1.0)
    assert not snapshots.retained
    snapshots.begin("child", 2, 1.0, relayed=True)
    snapshots.moved("child", 2, 5, 1.5)
    snapshots.publish(3, 2.0)
    assert list(snapshots.retained) == [2]


def _staged(snapshots: Snapshots, count: int) -> None:
    snapshots.publish(2, 1.0)
    snapshots.moved("slow", 1, count, 1.5)
    snapshots.expire(2.0)
    snapshots.finished("slow")


@pytest.mark.parametrize("count", [499, 500])
def test_lost_counts_do_not_make_a_liar_of_who_says_that_it_has_all(count: int) -> None:
    """A shard server or a connection that ends takes up to .2 s of counts with it."""
    snapshots = snapshots_with("slow")
    snapshots.version_bytes = 1000
    _staged(snapshots, count)
    for now in (2.0, 4.0):
        snapshots.expire(now)
    assert set(snapshots.resting) == ({"slow"} if count < 500 else set())


@pytest.mark.parametrize("how", ["begun at another actor", "begun before this registry"])
def test_pull_of_which_shard_servers_do_not_send_the_whole_is_not_judged_by_bytes(how: str) -> None:
    snapshots = Snapshots(RegistrySettings(1, 1, lease_s=10.0, progress_timeout_s=3.0), version_bytes=1000)
    if how == "begun at another actor":
        snapshots.publish(1, 0.0)
        snapshots.begin("slow", 1, 0.0, relayed=True)
    else:
        snapshots.begin("slow", 1, 0.0)
        snapshots.publish(1, 0.1)
    snapshots.moved("slow", 1, 1, 0.5)
    snapshots.publish(2, 1.0)
    for now in (3.0, 5.0, 7.0, 9.0):
        snapshots.moved("slow", 1, 1, now)
        assert snapshots.expire(now) == []
    snapshots.finished("slow")
    for now in (9.1, 11.0):
        snapshots.expire(now)
    assert not snapshots.resting
    # Its lease ends all the same.
    snapshots.begin("other", 2, 11.0, relayed=True)
    snapshots.moved("other", 2, 1, 11.0)
    snapshots.publish(3, 12.0)
    snapshots.moved("other", 2, 1, 22.0)
    assert snapshots.expire(22.1) == ["other"] and "other" in snapshots.resting


def test_newest_has_no_deadline() -> None:
    snapshots = snapshots_with("slow")
    assert snapshots.expire(1000.0) == [] and snapshots.pulls


def test_new_registry_hears_of_pulls_before_it_has_published() -> None:
    snapshots = Snapshots(RegistrySettings(1, lease_s=10.0, progress_timeout_s=3.0))
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
    slots.retain(1)
    slots.live(2, [], [], 0.0)
    assert 1 in slots.filled() and slots.readable(1) is None
    slots.release(1)
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
    snapshots = Snapshots(RegistrySettings(1, delta=True))
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


def test_a_snapshot_released_by_all_its_readers_is_dropped() -> None:
    slots = LiveSlots(words(1, 2))
    slots.retain(1)
    slots.retain(1)
    slots.live(2, [], [], 0.0)
    slots.release(1)
    assert 1 in slots.filled()
    slots.release(1)
    assert list(slots.filled()) == [2] and slots._words[0] == 0
