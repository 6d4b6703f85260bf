"""Groups on their way from prompts to batches: engines that generate them as a fluid, the real pace and staleness gate,
and a pool that routes as the real one.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from deterministic.machine import Event, Machine
from simulator.scenario import Scenario
from torchtitan.inference.pool import GRACE_S
from torchtitan.rollout.flow import MOST_SPARES, Pace

# Sequences end at once that would end within this share of a mean completion of each other: half of that too early or
# too late. Fewer events, the same figures.
TOGETHER = 0.02


@dataclass(eq=False)
class Work:
    """One group: a prompt and its completions."""

    index: int
    lengths: list[int]
    usable: bool
    min_version: int
    left: int = 0
    oldest: int = -1
    """Version of its oldest token"""
    grace_until: float | None = None

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


class Engine:
    """Continuous batching: up to max_sequences at a time, all equally fast. slowness: what its speed is divided by."""

    def __init__(self, machine: Machine, scenario: Scenario, slowness: float, finished: Callable[[Work], None]):
        self.version: int | None = None
        """What it serves; None while it has no weights that it may serve"""
        self.up = False
        """Whether requests are sent to it, as far as is known"""
        self.load = 0
        """Sequences of the groups that it has, as the pool counts them"""
        self.busy_s = self.tokens = 0.0
        self.tokens_per_s = scenario.tokens_per_s / slowness
        self._sequence_tokens_per_s = scenario.sequence_tokens_per_s / slowness
        self._machine, self._finished, self._most = machine, finished, scenario.max_sequences
        self._margin = TOGETHER * scenario.completion_tokens / 2
        self._halted: set[str] = set()
        self._active: list[tuple[float, int, Work]] = []
        """(what the engine's token clock says at its end, number, group)"""
        self._queue: deque[tuple[int, Work]] = deque()
        self._works: dict[Work, None] = {}
        self._token_clock = self._rate = self._updated_at = 0.0
        self._number = 0
        self._next: Event | None = None

    def serves(self, version: int) -> bool:
        """Whether requests that need `version` may be sent to it."""
        return self.up and self.version is not None and self.version >= version

    def add(self, work: Work) -> None:
        """Generate a group."""
        work.left, work.oldest = len(work.lengths), -1
        self._works[work] = None
        self.load += len(work.lengths)
        self._queue.extend((length, work) for length in work.lengths)
        self._changed()

    def halt(self, reason: str, halted: bool = True) -> None:
        """Stand still, for one more reason (a pause to apply, a freeze, a death), or for one less."""
        (self._halted.add if halted else self._halted.discard)(reason)
        self._changed()

    def abandon(self) -> list[Work]:
        """Forget all groups, for others to redo."""
        works = list(self._works)
        self._works.clear()
        self._active.clear()
        self._queue.clear()
        self.load = 0
        self._changed()
        return works

    def account(self) -> None:
        """Bring the sums up to date."""
        seconds, self._updated_at = self._machine.now - self._updated_at, self._machine.now
        if self._rate > 0:
            self._token_clock += self._rate * seconds
            self.tokens += self._rate * seconds * len(self._active)
            self.busy_s += seconds

    def _changed(self) -> None:
        self.account()
        while self._queue and not self._halted and len(self._active) < self._most:
            length, work = self._queue.popleft()
            self._number += 1
            heapq.heappush(self._active, (self._token_clock + length, self._number, work))
            version = self.version or 0
            work.oldest = version if work.oldest < 0 else min(work.oldest, version)
        moving = bool(self._active) and not self._halted
        self._rate = min(self._sequence_tokens_per_s, self.tokens_per_s / len(self._active)) if moving else 0.0
        if self._next is not None:
            self._next.cancel()
        if moving:
            left = self._active[0][0] + self._margin - self._token_clock
            self._next = self._machine.at(max(left, 0.0) / self._rate, None, self._end)

    def _end(self) -> None:
        self.account()
        done = []
        # Rounding may leave the token clock a little short of the first one's end.
        until = max(self._active[0][0], self._token_clock + self._margin)
        while self._active and self._active[0][0] <= until:
            work = heapq.heappop(self._active)[2]
            work.left -= 1
            if work.left == 0:
                del self._works[work]
                self.load -= len(work.lengths)
                done.append(work)
        self._changed()
        for work in done:
            self._finished(work)


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
