"""The coordinator's decisions one by one: offers, deadlines, evictions, settlements."""

from __future__ import annotations

import pytest

from tests.unit_tests.weight_sync.coordinator_desk import Desk
from torchtitan.weight_sync.states.actor import ActorState
from torchtitan.weight_sync.states.commands import Disconnect, HangUp, Record, Settings, ToActor, ToCourier
from torchtitan.weight_sync.states.coordinator import CoordinatorMachine


def test_slots_are_held_before_the_offer_and_sent_after_the_accept() -> None:
    desk = Desk()
    desk.join("a")
    desk.publish(0)
    kinds = [c.message["type"] for c in desk.out if isinstance(c, ToCourier | ToActor)]
    assert kinds == ["publish", "lease", "offer"]
    desk.say("a", "accept")
    assert [c.message["type"] for c in desk.out] == ["send"]
    digest = desk.machine.versions.newest.digest  # type: ignore[union-attr]
    desk.say("a", "staged", digest=digest)
    assert [c.message["type"] for c in desk.out if not isinstance(c, Record)] == ["release", "apply"]
    desk.say("a", "applied", version=0, digest=digest, figures={})
    assert desk.state("a") is ActorState.READY and desk.machine.actors["a"].version == 0


def test_mailbox_holds_the_latest_only() -> None:
    desk = Desk()
    desk.join("a")
    for version in range(4):
        desk.publish(version)
    desk.apply("a")
    assert desk.offers() == [("a", 3)]


def test_late_messages_of_an_aborted_attempt_change_nothing() -> None:
    desk = Desk()
    desk.join("a")
    desk.publish(0)
    old = desk.machine.actors["a"].attempt.number  # type: ignore[union-attr]
    desk.say("a", "accept")
    desk.say("a", "refused", reason="checksum")
    assert desk.offers() == [("a", 0)], "a refused version is sent again"
    desk.say("a", "staged", attempt=old, digest=desk.machine.versions.newest.digest)  # type: ignore[union-attr]
    assert desk.state("a") is ActorState.OFFERED and not desk.out


def test_repeated_corruption_evicts() -> None:
    desk = Desk()
    desk.join("a")
    desk.publish(0)
    for _ in range(3):
        desk.say("a", "accept")
        desk.say("a", "refused", reason="checksum")
    assert desk.state("a") is ActorState.EVICTED
    assert "checksum" in desk.records("evict")[0]["reason"]


def test_failures_outlive_a_rejoin_and_delay_the_next_offer() -> None:
    desk = Desk()
    desk.join("a")
    desk.publish(0)
    for _ in range(3):
        desk.say("a", "accept")
        desk.say("a", "refused", reason="checksum")
    delays = []
    for session in range(2, 12):
        assert desk.machine.status()["actors"]["a"]["on_probation"]
        desk.join("a", session=session)
        assert not desk.offers()
        begun = desk.now
        while desk.state("a") is ActorState.READY and desk.now < begun + 100:
            desk.wait(0.1, pings=("a",))
        delays.append(desk.now - begun)
        desk.say("a", "accept")
        desk.say("a", "refused", reason="checksum")
        assert desk.state("a") is ActorState.EVICTED, "one attempt per rejoin"
    assert delays[:4] == pytest.approx([0.5, 1, 2, 4], abs=0.11)
    assert delays[-3:] == pytest.approx([60, 60, 60], abs=0.11)
    desk.join("a", session=20)
    desk.wait(60.5, pings=("a",))
    desk.apply("a")
    assert not desk.machine.status()["actors"]["a"]["on_probation"]
    desk.machine.actor_lost("a", 20, "killed", desk.now)
    desk.join("a", session=21)
    assert desk.offers() == [("a", 0)], "an applied version clears the record"


def test_an_actor_that_always_hangs_is_waited_for_a_few_times_only() -> None:
    desk = Desk()
    desk.publish(0)
    for session in range(1, 4):
        assert not desk.machine.actors or not desk.machine.actors["a"].on_probation
        desk.join("a", session=session)
        assert desk.offers() == [("a", 0)]
        desk.wait(11)
        assert desk.state("a") is ActorState.EVICTED
    desk.join("a", session=4)
    assert desk.machine.actors["a"].on_probation and not desk.offers()


def test_a_late_apply_that_succeeded_is_no_failure() -> None:
    desk = Desk()
    desk.join("a")
    for version in range(5):
        desk.publish(version)
        desk.say("a", "accept")
        desk.say("a", "staged", digest=desk.machine.versions.newest.digest)  # type: ignore[union-attr]
        desk.wait(10.2, pings=("a",))
        assert desk.state("a") is ActorState.EVICTED
        desk.join("a", version=version, session=version + 2)
        assert desk.machine.actors["a"].failures == 0


@pytest.mark.parametrize("phase", ["OFFERED", "RECEIVING", "APPLYING", "READY"])
def test_frozen_actor_is_evicted_and_named_with_its_phase(phase: str) -> None:
    desk = Desk()
    desk.join("a")
    desk.join("b")
    desk.publish(0)
    desk.apply("b")
    if phase == "READY":
        desk.apply("a")
    if phase in ("RECEIVING", "APPLYING"):
        desk.say("a", "accept")
    if phase == "APPLYING":
        desk.say("a", "staged", digest=desk.machine.versions.newest.digest)  # type: ignore[union-attr]
    assert desk.state("a").value == phase
    events = desk.wait(12, pings=("b",))
    assert desk.state("a") is ActorState.EVICTED
    phases = [c.fields["phase"] for c in events if isinstance(c, Record) and c.event in ("suspect", "evict")]
    assert phases[0] == phase
    assert desk.state("b") is ActorState.READY, "its peer is unaffected"


def test_slow_but_moving_transfer_is_never_given_up() -> None:
    desk = Desk()
    desk.join("a")
    desk.publish(0)
    desk.say("a", "accept")
    for step in range(30):
        desk.publish(step + 1)
        desk.wait(4, pings=("a",))
        desk.say("a", "progress", bytes=step + 1)
    assert desk.state("a") is ActorState.RECEIVING
    desk.wait(5.2, pings=("a",))
    assert desk.state("a") is ActorState.EVICTED, "far behind and without progress"


def test_a_frozen_courier_costs_its_attempts_and_no_actor() -> None:
    desk = Desk()
    desk.machine.courier_joined(0, desk.now)
    desk.join("a")
    desk.publish(0)
    desk.say("a", "accept")
    desk.wait(2, pings=("a",))
    desk.machine.courier_heard(0, desk.now)
    desk.say("a", "progress", bytes=1)
    events = desk.wait(6, pings=("a",))
    desk.take(events)
    assert [command.rank for command in events if isinstance(command, HangUp)] == [0]
    assert not desk.records("suspect") and not desk.records("evict") and len(desk.records("courier_lost")) == 1
    actor = desk.machine.actors["a"]
    assert actor.state is ActorState.READY and not actor.missed_deadlines and not actor.failures
    # It is back: the version is sent.
    desk.machine.courier_joined(0, desk.now)
    message = {"type": "snapped", "serial": 1, "version": 0, "checksums": ["0"]}
    desk.take(desk.machine.courier_message(0, message, desk.now))
    assert desk.offers() == [("a", 0)]


def test_no_byte_while_a_courier_is_quiet_is_no_missed_deadline() -> None:
    desk = Desk(progress_timeout_s=2.0)
    desk.machine.courier_joined(0, desk.now)
    desk.join("a")
    desk.publish(0)
    desk.say("a", "accept")
    events = desk.wait(2.2, pings=("a",))
    desk.take(events)
    assert len(desk.records("abort")) == 1 and not desk.records("suspect") and desk.offers() == [("a", 0)]
    # An actor that is as quiet as the courier is not excused.
    desk.machine.courier_heard(0, desk.now)
    desk.say("a", "accept")
    desk.take(desk.wait(2.2))
    assert desk.records("suspect")[0]["actor"] == "a"


def test_what_an_actor_says_it_applied_is_what_was_sent() -> None:
    for version, digest in ((1, None), (0, "other")):
        desk = Desk()
        desk.join("a")
        desk.publish(0)
        right = desk.machine.versions.newest.digest  # type: ignore[union-attr]
        desk.say("a", "accept")
        desk.say("a", "staged", digest=right)
        desk.say("a", "applied", version=version, digest=digest or right, figures={})
        assert desk.state("a") is ActorState.EVICTED and any(isinstance(c, Disconnect) for c in desk.out)
        assert "protocol error" in desk.records("evict")[0]["reason"] and not desk.records("applied")
        assert desk.machine.actors["a"].version == -1


def test_the_join_deadline_counts_from_the_layout() -> None:
    desk = Desk()
    machine = desk.machine = CoordinatorMachine(Settings(world_size=1), term=1)
    fields = {"data": ["a:1"], "epoch": "e", "served": None, "poisoned": False}
    machine.actor_joined("a", 1, fields, 0.0)
    desk.sessions["a"] = 1
    desk.wait(100, pings=("a",))
    machine.layout_known({}, "layout", str, desk.now)
    desk.wait(59, pings=("a",))
    assert desk.state("a") is ActorState.JOINING
    desk.wait(2, pings=("a",))
    assert desk.state("a") is ActorState.EVICTED


def test_actors_that_never_come_back_are_forgotten() -> None:
    desk = Desk()
    for number in range(3):
        desk.join(f"a{number}")
        desk.machine.actor_lost(f"a{number}", 1, "connection reset", desk.now)
    desk.join("b")
    events = desk.wait(310, pings=("b",))
    assert list(desk.machine.status()["actors"]) == ["b"] and desk.machine.status()["forgotten_evictions"] == 3
    desk.take(events)
    assert [message["actor"] for _, message in desk.sent("forget")] == ["a0", "a1", "a2"]


def test_suspect_recovers_when_it_is_heard() -> None:
    desk = Desk()
    desk.join("a")
    desk.publish(0)
    desk.wait(5.2)
    assert desk.state("a") is ActorState.SUSPECT
    assert not desk.machine.actors["a"].attempt
    desk.say("a", "ping")
    assert desk.offers() == [("a", 0)]


def test_a_pause_of_the_coordinator_extends_deadlines() -> None:
    desk = Desk()
    desk.join("a")
    desk.publish(0)
    desk.now += 60
    desk.machine.tick(desk.now)
    assert desk.state("a") is ActorState.OFFERED


def test_no_abort_after_apply() -> None:
    desk = Desk()
    desk.join("a")
    desk.publish(0)
    desk.stage("a")
    for commands in (desk.need_slot(), desk.take(desk.machine.courier_lost(0, desk.now))):
        assert not [c for c in commands if not isinstance(c, Record)]
    assert desk.state("a") is ActorState.APPLYING


def test_lost_acknowledgement_is_settled_by_what_the_actor_serves() -> None:
    desk = Desk()
    desk.join("a")
    desk.publish(0)
    desk.stage("a")
    desk.machine.actor_lost("a", 1, "reset", desk.now)
    assert desk.state("a") is ActorState.EVICTED
    desk.join("a", version=0, session=2)
    assert desk.machine.actors["a"].version == 0 and not desk.offers()
    stale = {"type": "applied", "attempt": 1, "version": 0, "digest": "x", "figures": {}}
    assert desk.machine.actor_message("a", 1, stale, desk.now) == []


def test_rejoined_actor_gets_a_full_version() -> None:
    desk = Desk()
    desk.join("a")
    desk.publish(5)
    desk.apply("a")
    desk.machine.actor_lost("a", 1, "killed", desk.now)
    desk.join("a", session=2)
    assert desk.offers() == [("a", 5)]


def test_poisoned_actor_does_not_serve_until_it_applied() -> None:
    desk = Desk()
    desk.join("a")
    desk.publish(0)
    desk.apply("a")
    desk.publish(1)
    desk.stage("a")
    desk.say("a", "poisoned", reason="out of memory")
    assert not desk.machine.actors["a"].serves and desk.offers() == [("a", 1)]
    desk.apply("a")
    assert desk.machine.actors["a"].serves


def test_refused_version_leaves_the_actor_serving_and_is_offered_a_bounded_number_of_times() -> None:
    desk = Desk()
    desk.join("a")
    desk.publish(0)
    desk.apply("a")
    desk.publish(1)
    for _ in range(3):
        actor = desk.machine.actors["a"]
        assert actor.serves and actor.version == 0 and desk.offers() == [("a", 1)]
        desk.say("a", "accept")
        desk.say("a", "staged", digest=desk.machine.versions.newest.digest)  # type: ignore[union-attr]
        desk.say("a", "refused", reason="does not fit the model")
    assert actor.state is ActorState.EVICTED and not actor.poisoned and "does not fit" in actor.reason


def test_shortage_aborts_the_least_progress_but_each_actor_once_in_a_row() -> None:
    desk = Desk()
    desk.join("a")
    desk.publish(0)
    desk.say("a", "accept")
    desk.say("a", "progress", bytes=100)
    desk.publish(1)
    desk.join("b")
    desk.say("b", "accept")
    desk.say("b", "progress", bytes=10)
    desk.publish(2)
    desk.need_slot()
    assert [r["actor"] for r in desk.records("abort")] == ["b"], "10 bytes against 100"
    assert desk.offers() == [("b", 0)], "it is offered what is leased anyway"
    desk.say("b", "accept")
    desk.say("b", "progress", bytes=1)
    desk.need_slot()
    assert not desk.records("abort"), "b has been aborted once, its turn protects the slot it shares with a"


def test_ranks_that_lack_a_slot_at_one_boundary_cost_one_slot() -> None:
    desk = Desk(world_size=2)
    for version, name in enumerate(("a", "b", "c")):
        desk.publish(version)
        desk.join(name)
        desk.say(name, "accept")
        desk.say(name, "progress", bytes=10 + version)
    desk.publish(3)
    aborted = [[r["actor"] for r in desk.records("abort")] for rank in (0, 1) if desk.need_slot(rank) is not None]
    assert aborted == [["a"], []], "the second rank tells of the same shortage"
    aborted = [[r["actor"] for r in desk.records("abort")] for rank in (1, 0) if desk.need_slot(rank) is not None]
    assert aborted == [["b"], []], "a rank that tells again has come to the next boundary"


def test_frozen_actor_that_answers_no_offer_is_not_protected() -> None:
    desk = Desk()
    desk.join("a")
    desk.publish(0)
    desk.say("a", "accept")
    desk.say("a", "progress", bytes=1)
    desk.publish(1)
    desk.need_slot()
    desk.publish(2)
    desk.wait(1)
    desk.need_slot()
    assert [r["phase"] for r in desk.records("abort")] == ["OFFERED"]
    desk.wait(4.2)
    assert desk.state("a") is ActorState.SUSPECT, "aborts do not restart the clock of an unanswered offer"


def test_pinned_actor_keeps_its_version_for_the_evaluation() -> None:
    desk = Desk()
    desk.join("a")
    desk.publish(0)
    desk.apply("a")
    desk.machine.pin(0, desk.now)
    desk.publish(1)
    desk.wait(30)
    assert desk.state("a") is ActorState.READY and desk.machine.actors["a"].pinned
    desk.take(desk.machine.pin(None, desk.now))
    assert desk.offers() == [("a", 1)]


def test_rank_without_a_slot_drops_the_version_for_all() -> None:
    machine = CoordinatorMachine(Settings(world_size=2), term=1)
    machine.layout_known({}, "layout", str, 0.0)
    machine.courier_message(0, {"type": "snapped", "serial": 1, "version": 3, "checksums": []}, 0.0)
    commands = machine.courier_message(1, {"type": "failed", "serial": 1, "version": 3}, 0.0)
    assert ToCourier(None, {"type": "drop", "serial": 1}) in commands
    assert machine.status()["dropped"] == [[1, 3]]


def test_declined_offer_is_repeated_later_and_later() -> None:
    desk = Desk()
    desk.join("a")
    desk.publish(0)
    delays = []
    for _ in range(10):
        begun = desk.now
        desk.say("a", "decline", reason="applying")
        while desk.state("a") is ActorState.READY and desk.now < begun + 100:
            desk.wait(0.1, pings=("a",))
        delays.append(desk.now - begun)
    assert delays[:4] == pytest.approx([0.5, 1, 2, 4], abs=0.11)
    assert delays[-2:] == pytest.approx([60, 60], abs=0.11)
    desk.say("a", "decline", reason="applying")
    desk.publish(1)
    assert desk.offers() == [("a", 1)], "something newer is offered at once"
    desk.apply("a")
    assert desk.machine.actors["a"].version == 1


def test_a_new_process_starts_afresh_unless_one_after_the_other_ends() -> None:
    desk = Desk()
    desk.publish(0)
    desk.join("a", process="p0")
    for _ in range(3):
        desk.say("a", "accept")
        desk.say("a", "refused", reason="checksum")
    desk.join("a", session=2, process="p0")
    assert desk.machine.actors["a"].on_probation, "the same process keeps its failures"
    desk.join("a", session=3, process="p1")
    assert not desk.machine.actors["a"].on_probation and desk.offers() == [("a", 0)]
    for life in range(2, 8):
        desk.machine.actor_lost("a", desk.sessions["a"], "killed", desk.now)
        desk.join("a", session=2 + life, process=f"p{life}")
        assert desk.machine.actors["a"].on_probation is (life >= 3), "a crash loop costs nobody a wait"
    delay = desk.machine.actors["a"].backoff
    assert delay > 1
    desk.wait(delay + 0.2, pings=("a",))
    desk.apply("a")
    desk.join("a", session=20, process="p20")
    assert not desk.machine.actors["a"].on_probation and desk.offers() == [("a", 0)]
