"""One actor's engine: sequences that share its speed, generated as a fluid."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from deterministic.machine import Event, Machine
from simulator.scenario import Scenario

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
