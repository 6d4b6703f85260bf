"""Whole runs of a world in an order of events that a seed decides, faults included."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tests.unit_tests.weight_sync.parts import Shape, require
from tests.unit_tests.weight_sync.world import FAULTS, Event, World

TRAIN, TICK, FAULT, OWED = 100, 101, 102, 103
NAMES = {TRAIN: "train", TICK: "tick", FAULT: "fault", OWED: "tick and snapshot_owed"}


def random_run(
    seed: int,
    shape: Shape,
    versions: int = 3,
    faults: int = 3,
    steps: int = 90,
    kinds: Sequence[int] = range(FAULTS),
    trace: bool = False,
) -> tuple[int, World]:
    """Some `steps` events in random order, then everything heals and comes to rest; every invariant is checked.

    Returns a hash of the order of events, and the world. At least two versions are published and applied: the last is
    trained only after an actor has applied one. kinds: which faults; trace: print each event. Raises Violation.
    """
    random = Random(seed)
    draw = random.random
    world = World(shape)
    order = hash(shape)
    versions = 2 + int(draw() * (versions - 1))
    fault_steps = {int(draw() * steps) for _ in range(int(draw() * (faults + 1)))}
    trained = step = 0
    while step < steps or (trained < versions and step < 2 * steps):
        step += 1
        event: Event
        if step in fault_steps:
            event = (FAULT, kinds[int(draw() * len(kinds))], int(draw() * 4))
            world.fault(event[1], event[2])
        else:
            events = world.enabled()
            due = trained < versions - 1 or (trained < versions and world.applied_versions)
            if due and (not events or draw() < 3 * versions / steps):
                events = [(TRAIN, 0, 0)]
            if draw() < 0.04 or not events:
                event = (TICK, int(draw() * 4), 0)
                world.tick(0.1 * (1 + event[1]))
                if world.owed is not None and draw() < 0.3:
                    event = (OWED, event[1], 0)
                    world.snapshot_owed()
            else:
                event = events[int(draw() * len(events))]
                if event[0] == TRAIN:
                    trained += 1
                    world.train()
                else:
                    world.happen(event)
        order = hash((order, event))
        if trace:
            name = world.handlers[event[0]].__name__ if event[0] < TRAIN else NAMES[event[0]]
            print(f"{step:4d} {world.now:6.1f} s  {name}{event[1:]}")
    while True:
        if world.version >= 0:
            world.settle()
            if trained >= versions and len(world.applied_versions) >= 2:
                break
        trained += 1
        world.train()
    require(len(world.published) >= 2, "too few versions were published")
    return order, world
