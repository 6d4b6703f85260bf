"""The training loop of all ranks: wait for data, train, snapshot or skip, and (blocking) wait for the actors."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from random import Random
from typing import Protocol

from simulator.clock import Clock, Event
from simulator.courier import Courier
from simulator.rollouts import Rollouts
from simulator.scenario import Scenario, slowest_of

# As in components.controller: when an owed version is tried first, and how often again, while there is no data.
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

    def newest_and_dropped(self) -> tuple[int | None, list[tuple[int, int]]]:
        """The newest published version, and (serial, version) of snapshots that were dropped lately."""

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
        self.steps: list[StepTimes] = []
        self.began_at: float | None = None
        """When the first batch was handed out"""
        self._clock, self._scenario, self._asynchronous, self._random = clock, scenario, asynchronous, random
        self._classes, self._rollouts, self._versions = classes, rollouts, versions
        self._couriers = [courier for _, _, couriers in classes for courier in couriers]
        self._noes = 0
        self._times = StepTimes()
        self._since = self._boundary = 0.0
        self._waiting_for_data = False
        self._waited_for: int | None = None
        self._deadline: Event | None = None

    @property
    def skipped(self) -> int:
        """Versions that were not snapshotted at their boundary."""
        return self._couriers[0].boundary.skipped

    # Steps

    def start(self) -> None:
        """Publish version 0."""
        for courier in self._couriers:
            courier.boundary.reserve()
        self._train_done()
        self._rollouts.start()

    def data_came(self) -> None:
        """A group has become ready."""
        if self._waiting_for_data and self._rollouts.take_batch():
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
        longest = 0.0
        for count, factor, couriers in self._classes:
            # The slowest of the class speaks for it: ranks meet in collectives all the time.
            sigmas = slowest_of(count, self._random.random())
            seconds = self._scenario.train_s * factor * math.exp(self._scenario.step_jitter * sigmas)
            longest = max(longest, seconds)
            for courier in couriers:
                self._clock.call_later(seconds * self._scenario.reserve_share, self._reserve, courier)
        # Parameters must not change before the last snapshot's copies are complete.
        change_at = self._clock.now + longest * self._scenario.first_update_share
        fence_s = max(0.0, max(courier.fenced_at for courier in self._couriers) - change_at)
        self._times.train_s += longest
        self._times.snapshot_s += fence_s
        self._clock.call_later(longest + fence_s, self._train_done)

    def _reserve(self, courier: Courier) -> None:
        self._noes += not courier.boundary.reserve()

    def _train_done(self) -> None:
        self.version += 1
        noes, self._noes = self._noes, 0
        done = [courier.boundary.commit(self.version, noes) for courier in self._couriers]
        snapshotted = all(done)
        if snapshotted:
            self._versions.committed(self.version)
            self._times.snapshot_s += self._scenario.snapshot_s
        self._clock.call_later(self._scenario.snapshot_s if snapshotted else 0.0, self._committed, snapshotted)

    def _committed(self, snapshotted: bool) -> None:
        if self._asynchronous or not snapshotted:
            self._step_done()
            return
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
        newest, dropped = self._versions.newest_and_dropped()
        owed = self._couriers[0].boundary.owed(newest, dropped)
        if owed is not None:
            done = [courier.boundary.snapshot_owed(owed) for courier in self._couriers]
            if all(done):
                self._versions.committed(owed)


def total(steps: list[StepTimes]) -> StepTimes:
    """The sum of all."""
    return StepTimes(*(sum(getattr(step, item.name) for step in steps) for item in fields(StepTimes)))
