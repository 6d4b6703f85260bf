"""The training loop of all ranks: wait for data, train, snapshot or skip, and (blocking) wait for the actors."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from random import Random
from typing import Protocol

from torchtitan.weight_sync.simulation.clock import Clock, Event
from torchtitan.weight_sync.simulation.courier import Courier
from torchtitan.weight_sync.simulation.rollouts import Rollouts
from torchtitan.weight_sync.simulation.scenario import Scenario, slowest_of

# As in components.director: when an owed version is tried first, and how often again, while there is no data.
FIRST_OWED_TRY_S = 0.01
OWED_RETRY_S = 0.25
# The coordinator gathers what it tells the trainer for this long.
STATUS_S = 0.01


@dataclass
class StepTimes:
    """Where a step's seconds went."""

    step_s: float = 0.0
    data_wait_s: float = 0.0
    train_s: float = 0.0
    snapshot_s: float = 0.0
    stall_s: float = 0.0


class Versions(Protocol):
    """What the trainer knows of the coordinator."""

    def everyone_has(self, version: int) -> bool:
        """Whether `version` is published and all live actors serve it or a newer one."""

    def was_dropped(self, serial: int, version: int) -> bool:
        """Whether this snapshot was given up and nothing newer is published."""

    def committed(self, version: int) -> None:
        """All ranks have snapshotted `version`."""


class Trainer:
    """`classes` are the ranks by speed: (number of ranks, factor of their time); couriers are in the same order."""

    def __init__(
        self,
        clock: Clock,
        scenario: Scenario,
        asynchronous: bool,
        random: Random,
        classes: list[tuple[int, float, list[Courier]]],
        rollouts: Rollouts,
        versions: Versions,
    ):
        self.version = -1
        self.skipped = self.snapshots = 0
        self.steps: list[StepTimes] = []
        self.began_at: float | None = None
        """When the first batch was handed out"""
        self._clock, self._scenario, self._asynchronous, self._random = clock, scenario, asynchronous, random
        self._classes, self._rollouts, self._versions = classes, rollouts, versions
        self._couriers = [courier for _, _, couriers in classes for courier in couriers]
        self._serial = 0
        self._owed: int | None = None
        self._last_snapshot = (0, -1)
        self._times = StepTimes()
        self._since = self._boundary = 0.0
        self._waiting_for_data = self._snapshotting = False
        self._waited_for: int | None = None
        self._deadline: Event | None = None

    # Steps

    def start(self) -> None:
        """Publish version 0."""
        for courier in self._couriers:
            courier.reserve()
        self._boundary = self._clock.now
        self._train_done()
        self._rollouts.start()

    def data_came(self) -> None:
        """A group has become ready."""
        if self._waiting_for_data and not self._snapshotting and self._rollouts.take_batch():
            self._waiting_for_data = False
            self._times.data_wait_s += self._clock.now - self._since
            self._train()

    def _wait_for_data(self) -> None:
        self._since = self._clock.now
        self._waiting_for_data = True
        self.data_came()
        if self._waiting_for_data:
            self._clock.call_later(FIRST_OWED_TRY_S, self._snapshot_owed, len(self.steps))

    def _train(self) -> None:
        if self.began_at is None:
            self.began_at = self._boundary = self._clock.now
            self._times = StepTimes()
        self._since = self._clock.now
        longest = 0.0
        for count, factor, couriers in self._classes:
            # The slowest of the class speaks for it: ranks meet in collectives all the time.
            sigmas = slowest_of(count, self._random.random())
            seconds = self._scenario.train_s * factor * math.exp(self._scenario.step_jitter * sigmas)
            longest = max(longest, seconds)
            for courier in couriers:
                self._clock.call_later(seconds * self._scenario.reserve_share, courier.reserve)
        self._clock.call_later(longest, self._train_done)

    def _train_done(self) -> None:
        if self.began_at is not None:
            self._times.train_s += self._clock.now - self._since
        self.version += 1
        self._serial += 1
        if all(courier.reserved is not None for courier in self._couriers):
            self._owed = None
            self._snapshot(self._couriers)
            self._clock.call_later(self._snapshot_seconds, self._snapshotted, self._couriers, True)
        else:
            for courier in self._couriers:
                courier.release()
            self._owed = self.version
            self.skipped += 1
            self._step_done()

    @property
    def _snapshot_seconds(self) -> float:
        return self._scenario.shard_bytes / (self._scenario.snapshot_gigabytes_per_s * 1e9)

    def _snapshot(self, couriers: list[Courier]) -> None:
        for courier in couriers:
            courier.begin_snapshot(self.version, self._serial)
        self._last_snapshot = (self._serial, self.version)
        self._snapshotting = True

    def _snapshotted(self, couriers: list[Courier], at_boundary: bool) -> None:
        self._snapshotting = False
        for courier in couriers:
            courier.finish_snapshot()
        self._times.snapshot_s += self._snapshot_seconds
        if len(couriers) == len(self._couriers):
            self.snapshots += 1
            self._versions.committed(self.version)
        if not at_boundary:
            # It happened within a wait for data, which goes on.
            self._since += self._snapshot_seconds
            self.data_came()
        elif self._asynchronous:
            self._step_done()
        else:
            self._since, self._waited_for = self._clock.now, self.version
            timeout = self._scenario.weight_sync.blocking_timeout_s
            self._deadline = self._clock.call_later(timeout, self._waited, self.version)
            self.look()

    # Blocking

    def look(self) -> None:
        """The coordinator has news: perhaps it is what the trainer waits for."""
        if self._waited_for is not None and self._versions.everyone_has(self._waited_for):
            version, self._waited_for = self._waited_for, None
            self._clock.call_later(STATUS_S, self._waited, version)

    def _waited(self, version: int) -> None:
        if self._deadline is not None and version == self.version:
            self._deadline.cancel()
            self._deadline, self._waited_for = None, None
            self._times.stall_s += self._clock.now - self._since
            self._step_done()

    # Ends of steps, owed versions

    def _step_done(self) -> None:
        if self.began_at is not None:
            self._times.step_s = self._clock.now - self._boundary
            self.steps.append(self._times)
            self._times, self._boundary = StepTimes(), self._clock.now
        if self.version > 0:
            self._rollouts.set_version(self.version)
        self._wait_for_data()

    def _snapshot_owed(self, step: int) -> None:
        """While there is no data, a version that was skipped or dropped goes out after all."""
        if not self._waiting_for_data or step != len(self.steps):
            return
        self._clock.call_later(OWED_RETRY_S, self._snapshot_owed, step)
        dropped = self._versions.was_dropped(*self._last_snapshot)
        if self._snapshotting or (self._owed is None and not dropped):
            return
        self._serial += 1
        able = [courier for courier in self._couriers if courier.reserve()]
        for courier in self._couriers:
            if courier not in able:
                courier.fail(self.version, self._serial)
        self._owed = None if len(able) == len(self._couriers) else self.version
        self._snapshot(able)
        self._clock.call_later(self._snapshot_seconds, self._snapshotted, able, False)


def total(steps: list[StepTimes]) -> StepTimes:
    """The sum of all."""
    return StepTimes(*(sum(getattr(step, item.name) for step in steps) for item in fields(StepTimes)))
