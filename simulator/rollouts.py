"""Groups on their way from prompts to batches: the real pace and staleness gate, a pool that routes as the real one."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from random import Random

from simulator.clock import Clock
from simulator.engine import Engine, Work
from simulator.scenario import Scenario
from torchtitan.inference.pool import GRACE_S
from torchtitan.rollout.flow import MOST_SPARES
from torchtitan.rollout.staleness import Pace


class Rollouts:
    """Keeps the engines busy and hands out batches, as rollout.flow and inference.pool do."""

    def __init__(self, clock: Clock, scenario: Scenario, changed: Callable[[], None]):
        """changed: called when a group has become ready."""
        self.engines: list[Engine] = []
        self.staleness: Counter[int] = Counter()
        """Samples trained on, by how many versions their oldest token was behind"""
        self.trained_tokens = self.stale_tokens = self.unusable_tokens = self.redone_groups = 0
        self._clock, self._scenario, self._changed = clock, scenario, changed
        self._pace = Pace(scenario.groups_per_batch, scenario.max_staleness, scenario.max_groups_in_flight)
        self._spread = scenario.completion_spread
        self._center = math.log(scenario.completion_tokens) - self._spread**2 / 2
        self._survival = 1.0
        self._drawn = 0
        self._running = False
        self._in_flight: dict[int, Work] = {}
        self._ready: dict[int, Work] = {}
        self._waiting: deque[Work] = deque()
        self._dispatching = False

    @property
    def held_tokens(self) -> int:
        """Tokens of groups that are ready and not handed out."""
        return sum(work.tokens for work in self._ready.values())

    def start(self) -> None:
        """Begin to generate for the batch of version 0."""
        self._running = True
        self._fill()

    def set_version(self, version: int) -> None:
        """The trainer has made `version` out of the last batch."""
        self._pace.version, self._pace.handed_out = version, False
        for index, work in list(self._ready.items()):
            if version - self._gate_version(work) > self._scenario.max_staleness:
                self.stale_tokens += self._ready.pop(index).tokens
        self._fill()

    def take_batch(self) -> bool:
        """Hand out the next batch, if it is complete."""
        if len(self._ready) < self._scenario.groups_per_batch:
            self._fill()
            return False
        for index in sorted(self._ready)[: self._scenario.groups_per_batch]:
            work = self._ready.pop(index)
            self.staleness[self._pace.version - work.oldest] += len(work.lengths)
            self.trained_tokens += work.tokens
        self._pace.handed_out = True
        self._fill()
        return True

    def finished(self, work: Work) -> None:
        """An engine has generated a whole group."""
        if self._scenario.reward_s:
            self._clock.call_later(self._scenario.reward_s, self._scored, work)
        else:
            self._scored(work)
        self.dispatch()

    def redo(self, works: list[Work]) -> None:
        """An engine has lost these groups."""
        self.redone_groups += len(works)
        for work in reversed(works):
            work.engine, work.grace_until = None, None
            self._waiting.appendleft(work)
        self.dispatch()

    def dispatch(self) -> None:
        """Some engine can take more, or serves a newer version."""
        if not self._dispatching:
            self._dispatching = True
            self._clock.call_at(self._clock.now, self._dispatch)

    def _gate_version(self, work: Work) -> float:
        return work.oldest if self._scenario.gate_on == "oldest" else work.mean

    def _scored(self, work: Work) -> None:
        del self._in_flight[work.index]
        # As the real flow estimates it, over about two batches.
        self._survival += (work.usable - self._survival) / (2 * self._scenario.groups_per_batch)
        self._survival = max(self._survival, 1 / MOST_SPARES)
        if not work.usable:
            self.unusable_tokens += work.tokens
        elif self._pace.version - self._gate_version(work) > self._scenario.max_staleness:
            self.stale_tokens += work.tokens
        else:
            self._ready[work.index] = work
        self._fill()
        if work.index in self._ready:
            self._changed()

    def _fill(self) -> None:
        while self._running:
            missing = self._pace.wanted() - len(self._ready)
            if len(self._in_flight) >= math.ceil(missing / self._survival):
                return
            position = len(self._ready) + len(self._in_flight) * self._survival
            work = self._draw(self._pace.oldest_useful_version(position))
            self._in_flight[work.index] = work
            self._waiting.append(work)
            self.dispatch()

    def _draw(self, min_version: int) -> Work:
        index = self._drawn
        self._drawn += 1
        # A group's lengths depend on its number alone, whatever the order in which groups are drawn.
        random = Random(self._scenario.seed * 1_000_003 + index)
        longest = self._scenario.max_completion_tokens
        lengths = [
            min(max(round(random.lognormvariate(self._center, self._spread)), 1), longest)
            for _ in range(self._scenario.group_size)
        ]
        return Work(index, lengths, random.random() < self._scenario.usable_share, min_version, len(lengths))

    def _dispatch(self) -> None:
        """Waiting groups, oldest first, go to the least loaded engines that may take them."""
        self._dispatching = False
        if not self._waiting:
            return
        ready = [engine for engine in self.engines if engine.up and engine.version is not None]
        newest = max((engine.version or 0 for engine in ready), default=-1)
        left: list[Work] = []
        waiting, self._waiting = self._waiting, deque()
        while waiting:
            work = waiting.popleft()
            if work.min_version > newest:
                left.append(work)
                continue
            engines = [engine for engine in ready if engine.serves(work.min_version)]
            count = len(work.lengths)
            limit = self._limit(work, len(engines), ready, len(waiting) + len(left) + 1)
            least = min(engines, key=lambda engine: engine.load)
            if least.load > 0 and least.load + count > limit:
                left.append(work)
                break  # all are busy; who came later waits longer
            least.add(work)
        self._waiting.extend(left)
        self._waiting.extend(waiting)

    def _limit(self, work: Work, able: int, ready: list[Engine], waiting: int) -> int:
        """Sequences that an engine may have with this group; while others are about to have the version, its share."""
        count = len(work.lengths)
        limit = self._scenario.max_sequences + count
        if able == len(ready):
            return limit
        if work.grace_until is None:
            work.grace_until = self._clock.now + GRACE_S
            self._clock.call_later(GRACE_S, self.dispatch)
        if self._clock.now >= work.grace_until:
            return limit
        total = sum(engine.load for engine in self.engines) + waiting * count
        return min(limit, math.ceil(total / len(ready)))
