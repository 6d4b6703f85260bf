"""Mutations of the protocol, each made in the real code, each of which some invariant must notice.

Most run in the world of weight_sync_world.py, in a bounded number of seeded runs that pass without the mutation. Where
that world ends (device copies, the engine's thread) the real part is driven alone.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from tests.unit_tests.weight_sync.parts import Shape, Violation, require
from tests.unit_tests.weight_sync.runs import random_run
from tests.unit_tests.weight_sync.streams import DelayedStream
from tests.unit_tests.weight_sync.world import FAULTS
from torchtitan.inference.embedded.loop import Applied, EngineLoop
from torchtitan.weight_sync.publisher import FenceWaiter, Publisher
from torchtitan.weight_sync.states import actor as actor_states
from torchtitan.weight_sync.states import attempt as attempt_states
from torchtitan.weight_sync.states.actor import Actor, ActorState
from torchtitan.weight_sync.states.attempt import Attempt, AttemptState
from torchtitan.weight_sync.states.base import Bases
from torchtitan.weight_sync.states.boundary import Boundary
from torchtitan.weight_sync.states.coordinator import CoordinatorMachine
from torchtitan.weight_sync.states.delivery import Deliveries
from torchtitan.weight_sync.states.receiver import ReceiverMachine, ReceiverState
from torchtitan.weight_sync.states.slot import SlotKeeper, SlotState, SlotView, SlotWriter

RUNS = 400
Mutation = Callable[[pytest.MonkeyPatch], None]


class Runs(NamedTuple):
    """What random_run is asked for."""

    shape: Shape
    versions: int = 3
    faults: int = 3
    steps: int = 90
    kinds: tuple[int, ...] = tuple(range(FAULTS))

    def check(self) -> None:
        """Raises Violation as soon as an invariant is broken."""
        for seed in range(RUNS):
            random_run(seed, *self)


PLAIN = Runs(Shape(buckets=1))
SCARCE = Runs(Shape(buckets=1, slots=2))
MANY_VERSIONS = Runs(Shape(buckets=1), versions=8, steps=200)
SCARCE_MANY_VERSIONS = Runs(Shape(buckets=1, slots=2), versions=8, steps=120)
RESUMED = Runs(Shape(buckets=1), kinds=(11,))
DELTA = Runs(Shape(buckets=1, delta=True, full_every=4))
RELAY = Runs(Shape(buckets=1, relay=True))


@functools.cache
def passes_unmutated(runs: Runs) -> None:
    runs.check()


def parity_slots(patch: pytest.MonkeyPatch) -> None:
    """Slots are alternated, not leased."""

    def reserve(self: SlotWriter) -> int:
        turn = getattr(self, "turn", -1) + 1
        self.turn = turn  # type: ignore[attr-defined]
        index = turn % len(self._words)
        self._words[index] = SlotView(SlotState.RESERVED, 0, 0).pack()
        return index

    patch.setattr(SlotWriter, "reserve", reserve)


def acknowledge_before_verify(patch: pytest.MonkeyPatch) -> None:
    original = ReceiverMachine.bucket
    patch.setattr(
        ReceiverMachine, "bucket", lambda self, attempt, key, intact: original(self, attempt, key, intact=True)
    )


def acknowledge_before_all_is_there(patch: pytest.MonkeyPatch) -> None:
    original = ReceiverMachine.bucket

    def bucket(self: ReceiverMachine, attempt: int, key: tuple[int, int], intact: bool) -> list[Any]:
        commands = original(self, attempt, key, intact)
        self.missing.clear()
        return commands

    patch.setattr(ReceiverMachine, "bucket", bucket)


def rank_local_skip(patch: pytest.MonkeyPatch) -> None:
    """A rank skips when it has no slot itself, whatever the others vote."""
    original = Boundary.commit
    patch.setattr(Boundary, "commit", lambda self, version, noes: original(self, version, not self._slots.reserve()))


def forget_a_lease_on_eviction(patch: pytest.MonkeyPatch) -> None:
    original = Deliveries._evict

    def evict(self: Deliveries, actor: Actor, reason: str) -> None:
        actor.attempt = None
        original(self, actor, reason)

    patch.setattr(Deliveries, "_evict", evict)


def delta_on_the_wrong_base(patch: pytest.MonkeyPatch) -> None:
    """What is retained is the base, whatever the actor holds."""

    def base_for(self: Bases, actor: Actor, record: Any) -> Any:
        base = self.versions.records.get(self.retained or 0)
        usable = base is not None and base is not record and self.versions.whole(base) and actor.acknowledged
        return base if usable else None

    patch.setattr(Bases, "_base_for", base_for)
    patch.setattr(ReceiverMachine, "_shadow_is", lambda self, version: version is not None)


def rejoin_without_full_version(patch: pytest.MonkeyPatch) -> None:
    original = CoordinatorMachine.actor_joined

    def joined(self: CoordinatorMachine, name: str, session: int, fields: Any, now: float) -> Any:
        commands = original(self, name, session, fields, now)
        self.actors[name].acknowledged = True
        return commands

    patch.setattr(CoordinatorMachine, "actor_joined", joined)


def rejoin_without_any_version(patch: pytest.MonkeyPatch) -> None:
    """Who rejoins is offered nothing before something newer is published."""
    original = CoordinatorMachine._ready

    def ready(self: CoordinatorMachine, actor: Actor, message: Any) -> None:
        original(self, actor, message)
        actor.mailbox = False

    patch.setattr(CoordinatorMachine, "_ready", ready)


def accept_an_older_version(patch: pytest.MonkeyPatch) -> None:
    """An older version whose slot is held anyway is offered, and taken."""
    choose, decline = Deliveries._choose, ReceiverMachine._reason_to_decline

    def offer_older(self: Deliveries, actor: Actor, children: Any) -> Any:
        held = [self.versions.records.get(serial) for serial in sorted(self._held_serials())]
        older = [record for record in held if record is not None and record.version < actor.version]
        return (older[0], None) if older else choose(self, actor, children)

    def accept(self: ReceiverMachine, version: int) -> str:
        reason = decline(self, version)
        return "" if "served already" in reason else reason

    patch.setattr(Deliveries, "_choose", offer_older)
    patch.setattr(ReceiverMachine, "_reason_to_decline", accept)


def serve_while_poisoned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReceiverMachine, "serving", property(lambda self: self.served))


def send_prompts_while_poisoned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Actor, "serves", property(lambda self: self.has_version and self.state is not ActorState.EVICTED))


def accept_an_old_epoch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReceiverMachine, "acceptable", lambda self, epoch, term: True)


def free_the_newest_slot(patch: pytest.MonkeyPatch) -> None:
    original = SlotKeeper.publish

    def publish(self: SlotKeeper, serial: int) -> None:
        original(self, serial)
        self.pinned = serial + 1
        self._sweep()

    patch.setattr(SlotKeeper, "publish", publish)


def forget_owed_versions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Boundary, "owed", lambda self, newest, dropped: None)


def abort_after_apply(patch: pytest.MonkeyPatch) -> None:
    leasing = (AttemptState.OFFERED, AttemptState.RECEIVING, AttemptState.APPLYING)
    patch.setattr(Attempt, "leases", property(lambda self: self.state in leasing))
    patch.setitem(attempt_states._NEXT, AttemptState.APPLYING, {AttemptState.DONE, AttemptState.ABORTED})
    after = actor_states._NEXT[ActorState.APPLYING] | {ActorState.SUSPECT}
    patch.setitem(actor_states._NEXT, ActorState.APPLYING, after)
    original = ReceiverMachine.abort

    def abort(self: ReceiverMachine, attempt: int) -> list[Any]:
        if self.state is ReceiverState.APPLYING and attempt == self.attempt:
            return self._drop_attempt()
        return original(self, attempt)

    patch.setattr(ReceiverMachine, "abort", abort)


def ignore_transport_holds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotKeeper, "hold", lambda self, serial, reason: None)


def write_what_is_passed_on(patch: pytest.MonkeyPatch) -> None:
    """A source takes a newer version into the memory that its children are being sent."""
    patch.setattr(Deliveries, "_freed", lambda self, actor, children: True)
    original = ReceiverMachine._reason_to_decline

    def accept(self: ReceiverMachine, version: int) -> str:
        reason = original(self, version)
        return "" if "passing on" in reason else reason

    patch.setattr(ReceiverMachine, "_reason_to_decline", accept)


def forget_the_fan_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Deliveries, "_trainer_may_send", lambda self, actor, record: True)


IN_THE_WORLD: list[tuple[Mutation, Runs, str]] = [
    (parity_slots, SCARCE, "reused|freed"),
    (acknowledge_before_verify, PLAIN, "torn"),
    (acknowledge_before_all_is_there, PLAIN, "torn"),
    (rank_local_skip, SCARCE, "ranks disagree"),
    (forget_a_lease_on_eviction, PLAIN, "leaked"),
    (delta_on_the_wrong_base, DELTA, "nothing was corrupted"),
    (rejoin_without_full_version, DELTA, "after a rejoin"),
    (rejoin_without_any_version, PLAIN, "starves"),
    (accept_an_older_version, MANY_VERSIONS, "went back"),
    (serve_while_poisoned, PLAIN, "torn"),
    (send_prompts_while_poisoned, PLAIN, "poisoned actor"),
    (accept_an_old_epoch, RESUMED, "old epoch"),
    (free_the_newest_slot, PLAIN, "newest version's slot"),
    (forget_owed_versions, SCARCE, "never published"),
    (abort_after_apply, PLAIN, "torn"),
    (ignore_transport_holds, SCARCE_MANY_VERSIONS, "while it was"),
    (write_what_is_passed_on, RELAY, "passed on"),
    (forget_the_fan_out, RELAY, "the trainer sent"),
]


@pytest.mark.parametrize(
    ("mutation", "runs", "symptom"), IN_THE_WORLD, ids=[mutation.__name__ for mutation, _, _ in IN_THE_WORLD]
)
def test_a_mutated_protocol_breaks_an_invariant(
    mutation: Mutation, runs: Runs, symptom: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes_unmutated(runs)
    mutation(monkeypatch)
    with pytest.raises(Violation, match=symptom):
        runs.check()


# Where the world ends


def take_snapshots(folder: Path) -> None:
    """An optimizer that steps right after each snapshot, and copies that are late."""
    stream = DelayedStream()
    parameter = torch.zeros(64)
    publisher = Publisher(
        {"p": parameter}, rank=0, dtype="float32", num_slots=2, bucket_bytes=1024, folder=folder, stream=stream
    )
    keeper = publisher.slots.keeper()
    try:
        for version in range(3):
            stream.go.clear()
            parameter.fill_(version)
            require(publisher.reserve(), "no slot is free")
            publisher.snapshot(version, version + 1)
            publisher.fence()
            stepped = threading.Event()
            stream.queue(lambda: parameter.fill_(-1.0))
            stream.queue(stepped.set)
            stepped.wait(0.1)  # what nothing holds back has happened by now
            ready_early = version + 1 in keeper.filled()
            stream.go.set()
            stream.finish()
            publisher._waiter._fences.put(None)  # all fences are out
            publisher._waiter._thread.join(10)
            publisher._waiter = FenceWaiter(publisher._finish)
            index, _ = keeper.filled()[version + 1]
            held = torch.frombuffer(bytearray(publisher.slots.slot(index)), dtype=torch.float32)
            require(not ready_early, "READY before its fence")
            require(bool((held == version).all()), f"torn: version {version} is {held.unique().tolist()}")
            keeper.publish(version + 1)
    finally:
        publisher.close()


def drop_the_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Publisher, "fence", lambda self: None)


def ready_before_the_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FenceWaiter, "add", lambda self, fence, slot: self._reached(slot))


class HalfWayEngine:
    """An engine whose step reads one half of its weights early and the other late."""

    def __init__(self) -> None:
        self.weights = [0, 0]
        self.stepping, self.changed = threading.Event(), threading.Event()
        self.torn: list[tuple[int, int]] = []
        self.steps = 0
        self.poisoned = self.paused = self.held_back = self.stands = False
        self.begun = self.busy = True
        self.version, self.progressed_at = 0, 0.0
        self.statistics = SimpleNamespace(generated_tokens=0, drain_seconds=0.0, versions_applied=0)

    def step(self) -> list[Any]:
        first = self.weights[0]
        self.stepping.set()
        self.changed.wait(0.1)
        self.changed.clear()
        second = self.weights[1]
        if first != second:
            self.torn.append((first, second))
        self.steps += 1
        return []

    def apply_weights(self, _epoch: str, version: int, _tensors: object) -> float:
        self.weights = [version, version]
        self.changed.set()
        return 0.0

    def take_failures(self) -> dict[str, str]:
        return {}

    def abort_all(self) -> None:
        pass


def generate_and_apply(_folder: Path) -> None:
    """Weights change while the engine generates."""
    engine = HalfWayEngine()
    loop = EngineLoop(engine, 0, False, lambda error: None)  # type: ignore[arg-type]
    loop.start()
    try:
        for version in range(1, 4):
            engine.stepping.clear()
            require(engine.stepping.wait(10), "the engine stands still")
            loop.apply("e1", version, {})
    finally:
        loop.close(10)
    require(engine.steps >= 3 and not engine.torn, f"torn: steps with weights of two versions: {engine.torn}")


def apply_without_pause(patch: pytest.MonkeyPatch) -> None:
    def apply(self: EngineLoop, epoch: str, version: int, tensors: Any, check: Any = None) -> Applied:
        return Applied(self.engine.apply_weights(epoch, version, tensors), 0.0)

    patch.setattr(EngineLoop, "apply", apply)


ALONE: list[tuple[Mutation, Callable[[Path], None]]] = [
    (drop_the_fence, take_snapshots),
    (ready_before_the_fence, take_snapshots),
    (apply_without_pause, generate_and_apply),
]


@pytest.mark.parametrize(("mutation", "scenario"), ALONE, ids=[mutation.__name__ for mutation, _ in ALONE])
def test_a_mutated_part_breaks_an_invariant(
    mutation: Mutation, scenario: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario(tmp_path)
    mutation(monkeypatch)
    with pytest.raises(Violation):
        scenario(tmp_path)
