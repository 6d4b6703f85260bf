"""The protocol's state machines: random interleavings of whole runs, and the decisions one by one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.unit_tests.weight_sync_parts import Shape
from tests.unit_tests.weight_sync_runs import random_run
from tests.unit_tests.weight_sync_world import FAULTS, World
from torchtitan.weight_sync.states.actor import ActorState
from torchtitan.weight_sync.states.commands import Disconnect, HangUp, Record, Settings, ToActor, ToCourier
from torchtitan.weight_sync.states.coordinator import CoordinatorMachine
from torchtitan.weight_sync.states.receiver import BeginApply, ReceiverMachine, ReceiverState, Send
from torchtitan.weight_sync.states.slot import SlotKeeper, SlotState, SlotView, SlotWriter
from torchtitan.weight_sync.states.version import Outcome, VersionTable

SHAPES = [
    Shape(),
    Shape(slots=2, workers=2),
    Shape(delta=True),
    Shape(relay=True, actors=3),
    Shape(delta=True, relay=True, workers=2, actors=3, fanout=2),
]


class WholeProtocol(RuleBasedStateMachine):
    """Any order of events: never torn, never unknown, nothing leaked, and after healing nobody starves.

    The world checks what must always hold where it could be broken, and raises Violation.
    """

    @initialize(shape=st.sampled_from(SHAPES))
    def start(self, shape: Shape) -> None:
        self.world = World(shape)

    @rule()
    def train(self) -> None:
        self.world.train()

    @rule()
    def snapshot_owed(self) -> None:
        self.world.snapshot_owed()

    @rule(choices=st.lists(st.integers(0, 20), min_size=1, max_size=6))
    def something_happens(self, choices: list[int]) -> None:
        for choice in choices:
            events = self.world.enabled()
            if events:
                self.world.happen(events[choice % len(events)])

    @rule(rounds=st.integers(5, 40))
    def everything_moves(self, rounds: int) -> None:
        """Whole deliveries have to be likely too."""
        for step in range(rounds):
            events = self.world.enabled()
            if events:
                self.world.happen(events[step % len(events)])

    @rule(seconds=st.sampled_from([0.1, 0.4, 3.0]), ticks=st.integers(1, 30))
    def time_passes(self, seconds: float, ticks: int) -> None:
        for _ in range(ticks):
            self.world.tick(seconds)

    @rule(kind=st.integers(0, FAULTS - 1), number=st.integers(0, 5))
    def something_breaks(self, kind: int, number: int) -> None:
        self.world.fault(kind, number)

    def teardown(self) -> None:
        if hasattr(self, "world") and self.world.version >= 0:
            self.world.settle()


WholeProtocol.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestWholeProtocol = WholeProtocol.TestCase


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_long_runs(shape: Shape) -> None:
    """Long runs with rare faults reach what short ones do not: many versions, several terms, slots running short."""
    counts: Counter[str] = Counter()
    skipped = 0
    for seed in range(40):
        _, world = random_run(seed, shape, versions=30, faults=10, steps=1500)
        counts.update(world.counts)
        skipped += sum(rank.boundary.skipped for rank in world.ranks)
    assert counts["applied"] > 150 and counts["poisoned"] > 0 and skipped > 0, "the runs did not go anywhere"


class SlotLife(RuleBasedStateMachine):
    """One rank's slots under every order of the writer's and the keeper's transitions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = [0, 0, 0]
        self.writer, self.keeper = SlotWriter(self.words), SlotKeeper(self.words)
        self.memory: list[int] = [0, 0, 0]
        self.serial = 0
        self.reading: dict[int, int] = {}
        self.sending: set[int] = set()
        self.dropped: set[int] = set()
        self.attempts = 0

    @rule()
    def snapshot(self) -> None:
        index = self.writer.reserve()
        if index is not None:
            self.serial += 1
            self.writer.begin(index, self.serial, self.serial)
            self.memory[index] = self.serial
            self.writer.finish(index)

    @rule()
    def reserve_and_release(self) -> None:
        index = self.writer.reserve()
        if index is not None:
            self.writer.release(index)

    @rule(back=st.integers(0, 3), sends=st.booleans())
    def lease(self, back: int, sends: bool) -> None:
        self.attempts += 1
        if self.keeper.lease(self.serial - back, self.attempts):
            if sends:
                self.sending.add(self.attempts)
                self.keeper.hold(self.serial - back, str(self.attempts))
            self.reading[self.attempts] = self.serial - back

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.reading:
            attempt = data.draw(st.sampled_from(sorted(self.reading)))
            self.keeper.end_lease(attempt)
            # A lease may be over while the transport still touches the memory.
            if attempt not in self.sending or data.draw(st.booleans()):
                self.keeper.let_go(self.reading.pop(attempt), str(attempt))

    @rule(back=st.integers(0, 2))
    def publish(self, back: int) -> None:
        if self.serial - back in self.keeper.filled():
            self.keeper.publish(self.serial - back)

    @rule(back=st.integers(0, 2))
    def drop(self, back: int) -> None:
        self.keeper.drop(self.serial - back)
        self.dropped.add(self.serial - back)

    @rule(back=st.integers(0, 2), keep=st.booleans())
    def retain(self, back: int, keep: bool) -> None:
        base = self.serial - back if keep and self.serial - back in self.keeper.filled() else None
        if base not in self.dropped:
            self.keeper.retain(base)

    @invariant()
    def readers_see_their_snapshot(self) -> None:
        filled = self.keeper.filled()
        for serial in self.reading.values():
            assert self.memory[filled[serial][0]] == serial
        for kept in (self.keeper.pinned, self.keeper.retained):
            assert kept is None or kept in filled or (kept in self.dropped and kept != self.keeper.pinned)

    def teardown(self) -> None:
        self.keeper.retain(None)
        for attempt, serial in self.reading.items():
            self.keeper.end_lease(attempt)
            self.keeper.let_go(serial, str(attempt))
        if self.serial in self.keeper.filled():
            self.keeper.publish(self.serial)
            assert [SlotView.unpack(word).state for word in self.words].count(SlotState.FREE) == 2


SlotLife.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestSlotLife = SlotLife.TestCase


def test_slot_transitions_have_one_owner() -> None:
    words = [0, 0]
    writer, keeper = SlotWriter(words), SlotKeeper(words)
    index = writer.reserve()
    assert index == 0
    with pytest.raises(RuntimeError, match="expected WRITING"):
        writer.finish(0)
    writer.begin(0, 7, 1)
    assert not keeper.lease(1, 1), "a slot that is being written cannot be leased"
    writer.finish(0)
    assert keeper.lease(1, 1) and SlotView.unpack(words[0]) == SlotView(SlotState.LEASED, 7, 1)
    with pytest.raises(RuntimeError, match="expected RESERVED"):
        writer.release(0)
    assert writer.reserve() == 1 and writer.reserve() is None


# Versions


def test_version_exists_when_all_ranks_have_it() -> None:
    table = VersionTable(2, deadline_s=10)
    assert table.snapped(0, 1, 0, ["a"], 0.0) is Outcome.PENDING
    assert table.newest is None
    assert table.snapped(1, 1, 0, ["b"], 1.0) is Outcome.PUBLISHED
    assert table.newest is not None and table.newest.published_checksums == [["a"], ["b"]]
    table.snapped(0, 2, 1, ["c"], 2.0)
    assert table.overdue(11.9) == [] and table.overdue(12.1) == [2]
    table.drop(2)
    assert table.snapped(1, 2, 1, ["d"], 13.0) is Outcome.DROPPED
    table.rank_lost(1)
    assert not table.whole(table.newest)
    with pytest.raises(ValueError, match="have changed"):
        table.snapped(1, 1, 0, ["other"], 14.0)
    table.snapped(1, 1, 0, ["b"], 14.0)
    assert table.whole(table.newest)


# The coordinator's decisions


class Desk:
    """One coordinator with one rank, driven by hand."""

    def __init__(self, **settings: Any):
        self.machine = CoordinatorMachine(Settings(**{"world_size": 1, **settings}), term=1)
        self.ranks = range(settings.get("world_size", 1))
        self.now = 0.0
        self.out: list[Any] = self.machine.layout_known({}, "layout", str, 0.0)
        self.serial = 0
        self.sessions: dict[str, int] = {}

    def take(self, commands: list[Any]) -> list[Any]:
        self.out = commands
        return commands

    def join(
        self, name: str, version: int | None = None, session: int = 1, poisoned: bool = False, **more: Any
    ) -> list[Any]:
        served = None if version is None else ["e", version, str([[str(version)]])]
        self.sessions[name] = session
        fields = {"data": [f"{name}:1"], "epoch": "e", "served": served, "poisoned": poisoned, **more}
        self.machine.actor_joined(name, session, fields, self.now)
        return self.say(name, "ready", layout_id="layout")

    def say(self, name: str, kind: str, **fields: Any) -> list[Any]:
        attempt = self.machine.actors[name].attempt
        message = {"type": kind, "attempt": attempt.number if attempt else 0, **fields}
        return self.take(self.machine.actor_message(name, self.sessions[name], message, self.now))

    def publish(self, version: int) -> list[Any]:
        self.serial += 1
        message = {"type": "snapped", "serial": self.serial, "version": version, "checksums": [str(version)]}
        return self.take([one for rank in self.ranks for one in self.machine.courier_message(rank, message, self.now)])

    def need_slot(self, rank: int = 0) -> list[Any]:
        return self.take(self.machine.courier_message(rank, {"type": "need_slot"}, self.now))

    def wait(self, seconds: float, pings: tuple[str, ...] = ()) -> list[Any]:
        events: list[Any] = []
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            for name in pings:
                events += self.machine.actor_message(name, self.sessions[name], {"type": "ping"}, self.now)
            events += self.machine.tick(self.now)
        return self.take([c for c in events if not isinstance(c, ToActor) or c.message["type"] != "pong"])

    def state(self, name: str) -> ActorState:
        return self.machine.actors[name].state

    def offers(self) -> list[tuple[str, int]]:
        return [
            (c.actor, c.message["version"]) for c in self.out if isinstance(c, ToActor) and c.message["type"] == "offer"
        ]

    def sent(self, kind: str) -> list[tuple[str | None, dict[str, Any]]]:
        """Messages of a kind, and which actor they are for (None: couriers)."""
        messages = [(getattr(c, "actor", None), c.message) for c in self.out if isinstance(c, ToActor | ToCourier)]
        return [(actor, message) for actor, message in messages if message["type"] == kind]

    def records(self, event: str) -> list[dict[str, Any]]:
        return [c.fields for c in self.out if isinstance(c, Record) and c.event == event]

    def apply(self, name: str) -> list[Any]:
        attempt = self.machine.actors[name].attempt
        assert attempt is not None
        digest = self.machine.versions.records[attempt.serial].digest
        self.say(name, "accept")
        self.say(name, "staged", digest=digest)
        return self.say(name, "applied", version=attempt.version, digest=digest, figures={})


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
    desk.say("a", "accept")
    desk.say("a", "staged", digest=desk.machine.versions.newest.digest)  # type: ignore[union-attr]
    for commands in (desk.need_slot(), desk.take(desk.machine.courier_lost(0, desk.now))):
        assert not [c for c in commands if not isinstance(c, Record)]
    assert desk.state("a") is ActorState.APPLYING


def test_lost_acknowledgement_is_settled_by_what_the_actor_serves() -> None:
    desk = Desk()
    desk.join("a")
    desk.publish(0)
    desk.say("a", "accept")
    desk.say("a", "staged", digest=desk.machine.versions.newest.digest)  # type: ignore[union-attr]
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
    desk.say("a", "accept")
    desk.say("a", "staged", digest=desk.machine.versions.newest.digest)  # type: ignore[union-attr]
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


# Delta


def test_delta_goes_against_the_acknowledged_version_and_every_so_often_in_full() -> None:
    desk = Desk(delta=True, full_every=3)
    desk.join("a")
    desk.publish(0)
    desk.apply("a")
    bases = []
    for version in range(1, 8):
        desk.publish(version)
        order = [message["type"] for _, message in desk.sent("retain") + desk.sent("publish")]
        assert order == ["retain", "publish"], "the base is kept before the publication could free it"
        (offer,) = [message for _, message in desk.sent("offer")]
        leases = [message["serial"] for _, message in desk.sent("lease")]
        assert leases == [version + 1, version] if offer["base"] else leases == [version + 1]
        desk.say("a", "accept", base=offer["base"] is not None)
        (send,) = [message for _, message in desk.sent("send")]
        assert send["base_serial"] == (version if offer["base"] else None)
        bases.append(None if offer["base"] is None else offer["base"][0])
        digest = desk.machine.versions.newest.digest  # type: ignore[union-attr]
        desk.say("a", "staged", digest=digest)
        desk.say("a", "applied", version=version, digest=digest, figures={})
    assert bases == [0, 1, None, 3, 4, None, 6]


def test_actor_without_the_base_gets_everything() -> None:
    desk = Desk(delta=True)
    desk.join("a")
    desk.publish(0)
    desk.apply("a")
    desk.publish(1)
    desk.say("a", "accept", base=False)
    assert desk.sent("send")[0][1]["base_serial"] is None
    desk.machine.actor_lost("a", 1, "reset", desk.now)
    desk.join("a", version=0, session=2)
    assert desk.sent("offer")[0][1]["base"] is None, "the first after a rejoin is full"


def test_base_is_what_most_actors_hold_and_nothing_without_actors() -> None:
    desk = Desk(delta=True)
    for name in "abc":
        desk.join(name)
    desk.publish(0)
    for name in "abc":
        desk.apply(name)
    desk.publish(1)
    desk.apply("a")
    for name in "bc":
        desk.say(name, "accept", base=True)
        desk.say(name, "refused", reason="checksum")
        desk.say(name, "decline", reason="busy")
    desk.publish(2)
    assert not desk.sent("retain"), "two hold version 0, one version 1"
    assert [message["base"] and message["base"][0] for _, message in desk.sent("offer")] == [None, 0, 0]
    for name in "abc":
        desk.machine.actor_lost(name, 1, "killed", desk.now)
    desk.publish(3)
    assert [message["serial"] for _, message in desk.sent("retain")] == [None]


# Relay


def relaying(fanout: int = 1, actors: str = "abc") -> Desk:
    """Version 0 is published, and so many actors have been offered it as the trainer sends to."""
    desk = Desk(relay=True, relay_fanout=fanout)
    for name in actors:
        desk.join(name)
    desk.publish(0)
    return desk


def test_the_trainer_sends_a_version_to_a_few_and_they_pass_it_on() -> None:
    desk = relaying(actors="abcd")
    assert desk.offers() == [("a", 0)]
    desk.apply("a")
    assert desk.offers() == [("b", 0)], "from a, which may serve one at a time"
    desk.say("b", "accept")
    assert not desk.sent("send")
    digest = desk.machine.versions.newest.digest  # type: ignore[union-attr]
    ((source, order),) = desk.sent("relay")
    assert source == "a" and (order["actor"], order["data"], order["digest"]) == ("b", ["b:1"], digest)
    desk.say("b", "staged", digest=digest)
    assert desk.sent("release") == [("a", {"type": "release", "attempt": order["attempt"]})]
    assert desk.offers() == [("c", 0)]
    desk.say("b", "applied", version=0, digest=digest, figures={})
    assert desk.offers() == [("d", 0)], "b serves too"
    assert {message["source"] for _, message in desk.sent("offer")} == {"b"}


def test_a_failed_relay_is_followed_by_the_trainer_and_is_not_counted_against_the_actor() -> None:
    desk = relaying()
    desk.apply("a")
    desk.say("b", "accept")
    attempt = desk.machine.actors["b"].attempt
    assert attempt is not None and attempt.source == "a"
    stranger = {"type": "broken", "attempt": attempt.number, "reason": "no"}
    desk.machine.actor_message("c", 1, stranger, desk.now)
    assert desk.machine.actors["b"].attempt is attempt, "only the source can say so"
    desk.take(desk.machine.actor_message("a", 1, {**stranger, "shadow": False}, desk.now))
    assert desk.machine.actors["b"].failures == 0 and not desk.machine.actors["a"].shadow
    offers = {actor: message["source"] for actor, message in desk.sent("offer")}
    assert offers == {"b": None}, "c waits: the trainer has sent this version often enough"


def test_a_lost_source_costs_its_children_one_attempt() -> None:
    desk = relaying()
    desk.apply("a")
    desk.say("b", "accept")
    desk.take(desk.machine.actor_lost("a", 1, "killed", desk.now))
    assert [record["reason"] for record in desk.records("abort")] == ["its source a is gone: killed"]
    assert desk.offers() == [("b", 0)] and desk.sent("offer")[0][1]["source"] is None


def test_a_frozen_source_is_not_blamed_on_the_actor_that_waits() -> None:
    desk = relaying(actors="ab")
    desk.apply("a")
    desk.say("b", "accept")
    desk.wait(5.2, pings=("b",))
    assert "suspect" not in [c.event for c in desk.out if isinstance(c, Record) and c.fields.get("actor") == "b"]
    assert desk.state("a") is ActorState.SUSPECT and desk.machine.actors["b"].missed_deadlines == 0
    assert {actor: message["source"] for actor, message in desk.sent("offer")} == {"b": None}, "a serves nobody now"


def test_a_source_waits_for_a_child_that_moves_and_not_for_one_that_does_not() -> None:
    desk = relaying(actors="ab")
    desk.apply("a")
    desk.say("b", "accept")
    desk.publish(1)
    assert not desk.offers(), "staging memory of a is being read"
    for received in range(10):
        desk.say("b", "progress", bytes=received + 1)
        assert not desk.wait(0.3, pings=("a", "b")), "as long as bytes move"
    desk.wait(0.5, pings=("a", "b"))
    assert [record["reason"] for record in desk.records("abort")] == ["its source takes a newer version"]
    assert desk.offers()[0] == ("a", 1)


def test_a_source_does_not_fall_behind_for_a_slow_child() -> None:
    desk = relaying(actors="ab")
    desk.apply("a")
    desk.say("b", "accept")
    for version in range(1, desk.machine.settings.evict_after_versions):
        desk.say("b", "progress", bytes=version)
        desk.publish(version)
        assert not desk.offers()
    desk.publish(desk.machine.settings.evict_after_versions)
    assert desk.offers()[0] == ("a", desk.machine.settings.evict_after_versions)


def test_workers_are_served_by_workers_with_the_same_buckets() -> None:
    desk = Desk(relay=True, relay_fanout=1)
    for name, parts in (("a", ["x"]), ("b", ["y"]), ("c", ["x"])):
        desk.join(name)
        desk.machine.actors[name].parts = parts
    desk.publish(0)
    desk.apply("a")
    assert [record["source"] for record in desk.records("offer")] == ["a"]
    assert desk.offers() == [("c", 0)]
    assert desk.state("b") is ActorState.OFFERED, "the trainer sends it one more, which a can be no source for"


# The receiver


def receiving(buckets: int = 1) -> ReceiverMachine:
    machine = ReceiverMachine("e")
    machine.connected(1)
    machine.layout("layout")
    machine.offer(10, 5, "d5", [(0, bucket) for bucket in range(buckets)])
    return machine


def applied(machine: ReceiverMachine) -> ReceiverMachine:
    machine.bucket(10, (0, 0), True)
    machine.staged(10)
    machine.apply(10)
    machine.apply_finished(10, None, {})
    return machine


def kinds(commands: list[Any]) -> list[str]:
    return [c.message["type"] if isinstance(c, Send) else type(c).__name__ for c in commands]


def test_receiver_stages_only_what_is_whole() -> None:
    machine = receiving(2)
    machine.bucket(10, (0, 0), True)
    assert machine.staged(10) == [] and machine.apply(10) == []
    machine.bucket(10, (0, 1), True)
    assert kinds(machine.staged(10)) == ["staged"]
    assert machine.served is None
    assert kinds(machine.apply(10)) == ["BeginApply"]
    assert kinds(machine.abort(10)) == [], "nothing is aborted once apply has begun"
    assert kinds(machine.apply_finished(10, None, {})) == ["applied"]
    assert machine.served is not None and machine.served.version == 5


def test_receiver_refuses_what_is_corrupt_and_keeps_the_old() -> None:
    machine = receiving()
    assert kinds(machine.bucket(10, (0, 0), False)) == ["refused", "Discard"]
    assert machine.state is ReceiverState.READY and machine.refused_versions == 1 and machine.served is None
    assert machine.bucket(10, (0, 0), True) == []


def test_receiver_refuses_old_epochs_terms_attempts_and_versions() -> None:
    machine = applied(receiving())
    assert not machine.acceptable("other", 1) and not machine.acceptable("e", 0)
    assert machine.offer(9, 6, "d6", [(0, 0)]) == []
    assert kinds(machine.offer(11, 5, "d5", [(0, 0)])) == ["decline"]
    assert kinds(machine.offer(12, 4, "d4", [(0, 0)])) == ["decline"]
    assert kinds(machine.offer(13, 6, "d6", [(0, 0)])) == ["accept"]
    with pytest.raises(ValueError, match="term"):
        machine.connected(0)


def test_poisoned_receiver_takes_the_same_version_again() -> None:
    machine = applied(receiving())
    machine.offer(11, 6, "d6", [(0, 0)])
    machine.bucket(11, (0, 0), True)
    machine.staged(11)
    machine.apply(11)
    assert kinds(machine.apply_finished(11, "half written", {})) == ["poisoned"]
    assert machine.poisoned and machine.served is not None and machine.served.version == 5
    assert kinds(machine.offer(12, 5, "d5", [(0, 0)])) == ["accept"]


def test_receiver_of_an_engine_that_refuses_is_not_poisoned() -> None:
    machine = applied(receiving())
    machine.offer(11, 6, "d6", [(0, 0)])
    machine.bucket(11, (0, 0), True)
    machine.staged(11)
    machine.apply(11)
    assert kinds(machine.apply_finished(11, "does not fit", {}, refused=True)) == ["refused"]
    assert not machine.poisoned and machine.refused_versions == 1
    assert machine.served is not None and machine.served.version == 5
    assert kinds(machine.offer(12, 6, "d6", [(0, 0)])) == ["accept"]


def test_receiver_takes_a_delta_only_on_what_its_staging_memory_holds() -> None:
    machine = applied(receiving())
    bases = []
    for attempt, base in ((11, (5, "other")), (12, (5, "d5"))):
        machine.offer(attempt, 6, "d6", [(0, 0)], base)
        bases.append(machine.delta)
        machine.abort(attempt)
    assert bases == [False, False], "the first offer has invalidated it, from before the first byte"
    machine = applied(receiving())
    (accept,) = machine.offer(11, 6, "d6", [(0, 0)], (5, "d5"))
    assert isinstance(accept, Send) and accept.message["base"] is True and machine.delta
    machine.refuse(11, "checksum")
    machine.offer(12, 6, "d6", [(0, 0)], (5, "d5"))
    assert not machine.delta, "half a delta is no base"


def test_poisoned_receiver_has_no_base_and_relays_nothing() -> None:
    machine = applied(receiving())
    machine.offer(11, 6, "d6", [(0, 0)])
    machine.bucket(11, (0, 0), True)
    machine.staged(11)
    machine.apply(11)
    machine.apply_finished(11, "half written", {})
    assert machine.serving is None and machine.hello_fields()["shadow"] is False
    assert kinds(machine.relay(12, "b", 5, "d5", ["h:1"])) == ["broken"]
    machine.offer(13, 6, "d6", [(0, 0)], (5, "d5"))
    assert not machine.delta


def test_receiver_passes_on_what_it_holds_and_nothing_else() -> None:
    machine = applied(receiving())
    assert kinds(machine.relay(11, "b", 5, "other", ["h:1"])) == ["broken"]
    assert kinds(machine.relay(12, "b", 5, "d5", ["h:1"])) == ["BeginRelay"]
    assert kinds(machine.offer(13, 6, "d6", [(0, 0)])) == ["decline"], "its staging memory is being read"
    assert kinds(machine.abort(12)) == ["EndRelay"] and machine.relay_finished(12, "late") == []
    machine.relay(14, "b", 5, "d5", ["h:1"])
    assert kinds(machine.relay_finished(14, "connection lost")) == ["broken"]
    machine.relay(15, "b", 5, "d5", ["h:1"])
    assert kinds(machine.release(15)) == ["EndRelay"]
    machine.relay(16, "b", 5, "d5", ["h:1"])
    assert kinds(machine.disconnected()) == ["EndRelay"] and not machine.relays
    machine.connected(2)
    machine.layout("another layout")
    assert kinds(machine.relay(17, "b", 5, "d5", ["h:1"])) == ["broken"], "new staging memory"


def test_apply_survives_the_loss_of_the_coordinator() -> None:
    machine = receiving()
    machine.bucket(10, (0, 0), True)
    machine.staged(10)
    assert isinstance(machine.apply(10)[0], BeginApply)
    machine.disconnected()
    assert machine.state is ReceiverState.APPLYING
    assert machine.apply_finished(10, None, {}) == [], "nobody is there to hear it"
    assert machine.state is ReceiverState.DISCONNECTED
    assert machine.hello_fields()["served"] == ["e", 5, "d5"]
