"""Groups from prompts to batches: engines as fluids, the real pace and staleness gate, and a pool that routes alike."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.deterministic.machine import Event, Machine
from tests.simulator.scenario import Scenario
from torchtitan.inference.pool.actor_pool import GRACE_S
from torchtitan.rollout.flow.staleness_budget import StalenessBudget

# Sequences that would end within this share of a mean completion of each other end together, up to half of it too early
# or too late. This saves events without changing the figures.
END_MERGE_SHARE = 0.02


@dataclass(eq=False)
class Group:
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
    """Continuous batching: up to max_sequences at a time, all equally fast. slowness: divides the engine's speed."""

    def __init__(self, machine: Machine, scenario: Scenario, slowness: float, finished: Callable[[Group], None]):
        self.version: int | None = None
        """The version that it serves; None while it has no weights to serve"""
        self.up = False
        """Whether requests are sent to it, as far as is known"""
        self.load = 0
        """How many sequences its groups have, as the pool counts them"""
        self.busy_s = self.tokens = 0.0
        self.tokens_per_s = scenario.tokens_per_s / slowness
        self._sequence_tokens_per_s = scenario.sequence_tokens_per_s / slowness
        self._machine, self._finished, self._most = machine, finished, scenario.max_sequences
        self._margin = END_MERGE_SHARE * scenario.completion_tokens / 2
        self._halted: set[str] = set()
        self._active: list[tuple[float, int, Group]] = []
        """(the engine's token clock when the sequence ends, number, group)"""
        self._queue: deque[tuple[int, Group]] = deque()
        self._groups: dict[Group, None] = {}
        self._token_clock = self._rate = self._updated_at = 0.0
        self._number = 0
        self._next: Event | None = None

    def serves(self, version: int) -> bool:
        """Return whether requests that need `version` may be sent to it."""
        return self.up and self.version is not None and self.version >= version

    def add(self, group: Group) -> None:
        """Generate a group."""
        group.left, group.oldest = len(group.lengths), -1
        self._groups[group] = None
        self.load += len(group.lengths)
        self._queue.extend((length, group) for length in group.lengths)
        self._changed()

    def halt(self, reason: str, halted: bool = True) -> None:
        """Add a reason to stop (a pause to apply, a freeze, a death), or remove one."""
        (self._halted.add if halted else self._halted.discard)(reason)
        self._changed()

    def abandon(self) -> list[Group]:
        """Drop all groups and return them, to be redone elsewhere."""
        groups = list(self._groups)
        self._groups.clear()
        self._active.clear()
        self._queue.clear()
        self.load = 0
        self._changed()
        return groups

    def account(self) -> None:
        """Bring the token clock and the sums up to date."""
        seconds, self._updated_at = self._machine.now - self._updated_at, self._machine.now
        if self._rate > 0:
            self._token_clock += self._rate * seconds
            self.tokens += self._rate * seconds * len(self._active)
            self.busy_s += seconds

    def _changed(self) -> None:
        self.account()
        while self._queue and not self._halted and len(self._active) < self._most:
            length, group = self._queue.popleft()
            self._number += 1
            heapq.heappush(self._active, (self._token_clock + length, self._number, group))
            version = self.version or 0
            group.oldest = version if group.oldest < 0 else min(group.oldest, version)
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
        # Through rounding, the token clock may be slightly short of the first sequence's end.
        until = max(self._active[0][0], self._token_clock + self._margin)
        while self._active and self._active[0][0] <= until:
            group = heapq.heappop(self._active)[2]
            group.left -= 1
            if group.left == 0:
                del self._groups[group]
                self.load -= len(group.lengths)
                done.append(group)
        self._changed()
        for group in done:
            self._finished(group)


class Rollouts:
    """Keeps the engines busy and hands out batches, as rollout.flow and inference.pool do."""

    def __init__(self, machine: Machine, scenario: Scenario, changed: Callable[[], None]):
        """changed: called when a group has been finished."""
        self.engines: list[Engine] = []
        self.staleness: Counter[int] = Counter()
        """Versions that a sample's oldest token was behind -> number of trained samples"""
        self.trained_tokens = self.stale_tokens = self.unusable_tokens = self.redone_groups = 0
        self.ready: dict[int, Group] = {}
        self._machine, self._scenario, self._changed = machine, scenario, changed
        self._budget = StalenessBudget(scenario.groups_per_batch, scenario.max_staleness)
        self._numbers = itertools.count()
        self._in_flight: dict[int, Group] = {}
        self._redo: list[int] = []
        self._waiting: deque[Group] = deque()
        self._dispatching = False

    def set_version(self, version: int) -> None:
        """Adopt `version`, which the trainer has made from the last batch, if there was one."""
        self._budget.version, self._budget.handed_out = version, False
        self._redo_stale()
        self._fill()

    def take_batch(self) -> bool:
        """Hand out the next batch if it is complete."""
        batch = self._budget.batch([*self._in_flight, *self._redo])
        if batch is None:
            return False
        for index in batch:
            group = self.ready.pop(index)
            self.staleness[self._budget.version - group.oldest] += len(group.lengths)
            self.trained_tokens += group.tokens
        self._budget.consumed(batch)
        self._redo_stale()
        self._fill()
        return True

    def finished(self, group: Group) -> None:
        """Handle a group that an engine has generated completely."""
        del self._in_flight[group.index]
        self._budget.count(group.usable)
        if group.usable:
            self.ready[group.index] = group
        else:
            self.unusable_tokens += group.tokens
        self._budget.add(group.index, group.oldest, group.usable)
        self._redo_stale(group.index)
        self._fill()
        self.dispatch()
        self._changed()

    def redo(self, groups: list[Group]) -> None:
        """Queue groups again that an engine has lost."""
        self.redone_groups += len(groups)
        for group in reversed(groups):
            group.grace_until = None
            self._waiting.appendleft(group)
        self.dispatch()

    def dispatch(self) -> None:
        """Schedule a dispatch: an engine can take more, or serves a newer version."""
        if not self._dispatching:
            self._dispatching = True
            self._machine.at(0.0, None, self._dispatch)

    def _redo_stale(self, only: int | None = None) -> None:
        for index in self._budget.take_stale(self._scenario.max_staleness, only):
            heapq.heappush(self._redo, index)
            if index in self.ready:
                self.stale_tokens += self.ready.pop(index).tokens

    def _fill(self) -> None:
        while True:
            position = self._budget.position(self._redo[0] if self._redo else None, self._in_flight)
            if position >= self._budget.wanted():
                return
            index = heapq.heappop(self._redo) if self._redo else next(self._numbers)
            self._in_flight[index] = self._draw(index, self._budget.oldest_useful_version(position))
            self._waiting.append(self._in_flight[index])
            self.dispatch()

    def _draw(self, index: int, min_version: int) -> Group:
        # A group's lengths depend only on its number, not on the order in which groups are drawn.
        scenario, random = self._scenario, Random(self._scenario.seed * 1_000_003 + index)
        center = math.log(scenario.completion_tokens) - scenario.completion_spread**2 / 2
        drawn = [random.lognormvariate(center, scenario.completion_spread) for _ in range(scenario.group_size)]
        lengths = [min(max(round(length), 1), scenario.max_completion_tokens) for length in drawn]
        return Group(index, lengths, random.random() < scenario.usable_share, min_version)

    def _dispatch(self) -> None:
        """Send waiting groups, oldest first, to the least loaded engines that may take them."""
        self._dispatching = False
        ready = [engine for engine in self.engines if engine.serves(0)]
        newest = max((engine.version or 0 for engine in ready), default=-1)
        left: list[Group] = []
        while self._waiting:
            group = self._waiting.popleft()
            if group.min_version > newest:
                left.append(group)
                continue
            engines = [engine for engine in ready if engine.serves(group.min_version)]
            least = min(engines, key=lambda engine: engine.load)
            waiting = len(self._waiting) + len(left) + 1
            if least.load and least.load + len(group.lengths) > self._limit(group, len(engines), len(ready), waiting):
                left.append(group)
                break  # all are busy, so later groups wait too
            least.add(group)
        self._waiting.extendleft(reversed(left))

    def _limit(self, group: Group, able: int, ready: int, waiting: int) -> int:
        """Return how many sequences an engine may have with this group: a fair share while other engines are about to
        get the version, else the usual limit."""
        count = len(group.lengths)
        if able < ready and group.grace_until is None:
            group.grace_until = self._machine.now + GRACE_S
            self._machine.at(GRACE_S, None, self.dispatch)
        share = math.ceil((sum(engine.load for engine in self.engines) + waiting * count) / ready)
        in_grace = able < ready and self._machine.now < (group.grace_until or 0.0)
        return min(self._scenario.max_sequences + count, share if in_grace else self._scenario.max_sequences + count)
