"""Groups on their way from prompts to batches: the real pace and staleness gate, a pool that routes as the real one."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from random import Random

from deterministic.machine import Machine
from simulator.engine import Engine, Work
from simulator.scenario import Scenario
from torchtitan.inference.pool import GRACE_S
from torchtitan.rollout.flow import MOST_SPARES, Pace


class Rollouts:
    """Keeps the engines busy and hands out batches, as rollout.flow and inference.pool do."""

    def __init__(self, machine: Machine, scenario: Scenario, changed: Callable[[], None]):
        """changed: called when a group has become ready."""
        self.engines: list[Engine] = []
        self.staleness: Counter[int] = Counter()
        """Samples trained on, by how many versions their oldest token was behind"""
        self.trained_tokens = self.stale_tokens = self.unusable_tokens = self.redone_groups = 0
        self.ready: dict[int, Work] = {}
        self._machine, self._scenario, self._changed = machine, scenario, changed
        self._pace = Pace(scenario.groups_per_batch, scenario.max_staleness, scenario.max_groups_in_flight)
        self._survival = 1.0
        self._drawn = 0
        self._in_flight: dict[int, Work] = {}
        self._waiting: deque[Work] = deque()
        self._dispatching = False

    def set_version(self, version: int) -> None:
        """The trainer has made `version` out of the last batch, if there was one."""
        self._pace.version, self._pace.handed_out = version, False
        for index, work in list(self.ready.items()):
            if self._is_stale(work):
                self.stale_tokens += self.ready.pop(index).tokens
        self._fill()

    def take_batch(self) -> bool:
        """Hand out the next batch, if it is complete."""
        if len(self.ready) < self._scenario.groups_per_batch:
            return False
        for index in sorted(self.ready)[: self._scenario.groups_per_batch]:
            work = self.ready.pop(index)
            self.staleness[self._pace.version - work.oldest] += len(work.lengths)
            self.trained_tokens += work.tokens
        self._pace.handed_out = True
        self._fill()
        return True

    def finished(self, work: Work) -> None:
        """An engine has generated a whole group."""
        del self._in_flight[work.index]
        # As the real flow estimates it, over about two batches.
        self._survival += (work.usable - self._survival) / (2 * self._scenario.groups_per_batch)
        self._survival = max(self._survival, 1 / MOST_SPARES)
        usable = work.usable and not self._is_stale(work)
        if usable:
            self.ready[work.index] = work
        elif work.usable:
            self.stale_tokens += work.tokens
        else:
            self.unusable_tokens += work.tokens
        self._fill()
        self.dispatch()
        if usable:
            self._changed()

    def redo(self, works: list[Work]) -> None:
        """An engine has lost these groups."""
        self.redone_groups += len(works)
        for work in reversed(works):
            work.grace_until = None
            self._waiting.appendleft(work)
        self.dispatch()

    def dispatch(self) -> None:
        """Some engine can take more, or serves a newer version."""
        if not self._dispatching:
            self._dispatching = True
            self._machine.at(0.0, None, self._dispatch)

    def _is_stale(self, work: Work) -> bool:
        return self._pace.version - work.oldest > self._scenario.max_staleness

    def _fill(self) -> None:
        while len(self._in_flight) < math.ceil((self._pace.wanted() - len(self.ready)) / self._survival):
            position = len(self.ready) + len(self._in_flight) * self._survival
            work = self._draw(self._pace.oldest_useful_version(position))
            self._in_flight[work.index] = work
            self._waiting.append(work)
            self.dispatch()

    def _draw(self, min_version: int) -> Work:
        # A group's lengths depend on its number alone, whatever the order in which groups are drawn.
        scenario, random = self._scenario, Random(self._scenario.seed * 1_000_003 + self._drawn)
        self._drawn += 1
        center = math.log(scenario.completion_tokens) - scenario.completion_spread**2 / 2
        drawn = [random.lognormvariate(center, scenario.completion_spread) for _ in range(scenario.group_size)]
        lengths = [min(max(round(length), 1), scenario.max_completion_tokens) for length in drawn]
        return Work(self._drawn - 1, lengths, random.random() < scenario.usable_share, min_version)

    def _dispatch(self) -> None:
        """Waiting groups, oldest first, go to the least loaded engines that may take them."""
        self._dispatching = False
        ready = [engine for engine in self.engines if engine.serves(0)]
        newest = max((engine.version or 0 for engine in ready), default=-1)
        left: list[Work] = []
        while self._waiting:
            work = self._waiting.popleft()
            if work.min_version > newest:
                left.append(work)
                continue
            engines = [engine for engine in ready if engine.serves(work.min_version)]
            least = min(engines, key=lambda engine: engine.load)
            waiting = len(self._waiting) + len(left) + 1
            if least.load and least.load + len(work.lengths) > self._limit(work, len(engines), len(ready), waiting):
                left.append(work)
                break  # all are busy; what came later waits longer
            least.add(work)
        self._waiting.extendleft(reversed(left))

    def _limit(self, work: Work, able: int, ready: int, waiting: int) -> int:
        """Sequences that an engine may have with this group; while others are about to have the version, its share."""
        count = len(work.lengths)
        if able < ready and work.grace_until is None:
            work.grace_until = self._machine.now + GRACE_S
            self._machine.at(GRACE_S, None, self.dispatch)
        share = math.ceil((sum(engine.load for engine in self.engines) + waiting * count) / ready)
        in_grace = able < ready and self._machine.now < (work.grace_until or 0.0)
        return min(self._scenario.max_sequences + count, share if in_grace else self._scenario.max_sequences + count)
