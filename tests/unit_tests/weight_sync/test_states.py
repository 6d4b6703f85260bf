"""The protocol's state machines: random interleavings of whole runs; slots and versions."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.unit_tests.weight_sync.parts import Shape
from tests.unit_tests.weight_sync.runs import random_run
from tests.unit_tests.weight_sync.world import FAULTS, World
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
