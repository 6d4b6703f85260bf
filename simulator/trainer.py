"""The training loop of all ranks: wait for data, train, snapshot or skip, and (blocking) wait for the actors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from deterministic.machine import Event
from simulator.scenario import slowest_of
from torchtitan.weight_sync.registry import STATUS_SECONDS

if TYPE_CHECKING:
    from simulator.world import World

# As in trainer.controller: when an owed version is tried first, and how often again, while there is no data.
FIRST_OWED_TRY_S = 0.01
OWED_RETRY_S = 0.25


@dataclass
class StepTimes:
    """Where a step's seconds went."""

    step_s: float = 0.0
    data_wait_s: float = 0.0
    train_s: float = 0.0
    snapshot_s: float = 0.0
    sync_stall_s: float = 0.0


class Trainer:
    """Call start() once. `steps` are those that are over."""

    def __init__(self, world: World):
        self.version = -1
        self.steps: list[StepTimes] = []
        self.boundary = world.ranks.boundary
        self._world, self._scenario, self._rollouts = world, world.scenario, world.rollouts
        self._random = Random(f"{world.scenario.seed}/trainer")
        self._times = StepTimes()
        self._began_at: float | None = None
        """When the step began; None before the first batch was handed out"""
        self._since = 0.0
        self._has_slot = self._waiting_for_data = False
        self._waited_for: int | None = None
        self._deadline: Event | None = None

    def start(self) -> None:
        """Publish version 0."""
        self._reserve()
        self._train_done()

    def data_came(self) -> None:
        """A group has become ready."""
        if self._waiting_for_data and self._rollouts.take_batch():
            self._waiting_for_data = False
            if self._began_at is None:
                self._began_at = self._since = self._world.now
            self._times.data_wait_s = self._world.now - self._since
            self._train()

    def _train(self) -> None:
        # Ranks meet in collectives all the time: the slowest speaks for all.
        sigmas = slowest_of(self._scenario.ranks, self._random.random())
        seconds = self._times.train_s = self._scenario.train_s * math.exp(self._scenario.step_jitter * sigmas)
        self._world.at(seconds * self._scenario.reserve_share, None, self._reserve)
        self._world.at(seconds, None, self._train_done)

    def _reserve(self) -> None:
        self._has_slot = self.boundary.reserve()

    def _train_done(self) -> None:
        self.version += 1
        taken = self.boundary.commit(self.version, noes=not self._has_slot)
        if taken:
            self._world.committed(self.version)
            self._times.snapshot_s = self._scenario.snapshot_s
        wait = taken and not self._world.asynchronous
        self._world.at(self._times.snapshot_s, None, self._wait_for_actors if wait else self._step_done)

    def _wait_for_actors(self) -> None:
        self._since, self._waited_for = self._world.now, self.version
        self._deadline = self._world.at(self._scenario.weight_sync.blocking_timeout_s, None, self._waited)
        self.look()

    def look(self) -> None:
        """The registry has news: perhaps it is what the trainer waits for."""
        if self._waited_for is not None and self._world.everyone_has(self._waited_for):
            self._waited_for = None
            self._world.at(STATUS_SECONDS, None, self._waited)

    def _waited(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline, self._waited_for = None, None
            self._times.sync_stall_s = self._world.now - self._since
            self._step_done()

    def _step_done(self) -> None:
        now = self._world.now
        if self._began_at is not None:
            self._times.step_s = now - self._began_at
            self.steps.append(self._times)
            self._began_at = now
        self._times, self._since, self._waiting_for_data = StepTimes(), now, True
        self._rollouts.set_version(self.version)
        self.data_came()
        step = len(self.steps)
        self._world.at(FIRST_OWED_TRY_S, None, lambda: self._snapshot_owed(step))

    def _snapshot_owed(self, step: int) -> None:
        """While there is no data, a version that was skipped or dropped goes out after all."""
        if self._waiting_for_data and step == len(self.steps):
            self._world.at(OWED_RETRY_S, None, lambda: self._snapshot_owed(step))
            owed = self._world.owed()
            if owed is not None and self.boundary.snapshot_owed(owed):
                self._world.committed(owed)
