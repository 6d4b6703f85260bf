"""One actor's engine: sequences that share its speed, generated as a fluid."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from simulator.clock import Clock, Event

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
    left: int
    oldest: int = -1
    """Version of its oldest token"""
    mean: float = 0.0
    """Mean version of the tokens of its stalest sample"""
    grace_until: float | None = None
    engine: Engine | None = None

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


class _Sequence(NamedTuple):
    ends: float
    """What the engine's token clock says then"""
    number: int
    began: float
    versions_before: float
    work: Work


class Engine:
    """Continuous batching: up to `max_sequences` at a time, all equally fast."""

    def __init__(
        self,
        clock: Clock,
        name: str,
        tokens_per_s: float,
        sequence_tokens_per_s: float,
        max_sequences: int,
        mean_tokens: float,
        finished: Callable[[Work], None],
        idle: Callable[[], None],
    ):
        self.name = name
        self.version: int | None = None
        """What it serves; None while it has no weights that it may serve"""
        self.up = False
        """Whether requests are sent to it, as far as is known"""
        self.load = 0
        """Sequences of the groups that it has, as the pool counts them"""
        self.busy_s = self.tokens = 0.0
        self._clock, self._finished, self._idle = clock, finished, idle
        self.tokens_per_s, self._sequence_tokens_per_s = tokens_per_s, sequence_tokens_per_s
        self._max_sequences, self._margin = max_sequences, TOGETHER * mean_tokens / 2
        self._halted: set[str] = set()
        self._closed = False
        self._active: list[_Sequence] = []
        self._queue: deque[tuple[int, Work]] = deque()
        self._works: dict[int, Work] = {}
        self._token_clock = self._versions = 0.0
        self._rate = self._updated_at = 0.0
        self._number = 0
        self._next: Event | None = None

    def serves(self, version: int) -> bool:
        """Whether requests that need `version` may be sent to it."""
        return self.up and self.version is not None and self.version >= version

    @property
    def generating(self) -> int:
        """Sequences under way."""
        return len(self._active)

    def add(self, work: Work) -> None:
        """Generate a group."""
        work.engine, work.left, work.oldest, work.mean = self, len(work.lengths), -1, 0.0
        self._works[work.index] = work
        self.load += len(work.lengths)
        self._queue.extend((length, work) for length in work.lengths)
        self._changed()

    def halt(self, reason: str) -> None:
        """Stand still, for one more reason (a pause to apply, a freeze, a death)."""
        self.account()
        self._halted.add(reason)
        self._changed()

    def resume(self, reason: str) -> None:
        """That reason is over."""
        self.account()
        self._halted.discard(reason)
        self._changed()

    def admit(self, open_: bool) -> None:
        """Whether waiting sequences may begin (not while it drains)."""
        self._closed = not open_
        self._changed()

    def set_version(self, version: int | None) -> None:
        """New weights; sequences under way go on with them."""
        self.account()
        self.version = version

    def abandon(self) -> list[Work]:
        """Forget all groups, for others to redo."""
        self.account()
        works = list(self._works.values())
        self._works.clear()
        self._active.clear()
        self._queue.clear()
        self.load = 0
        self._changed()
        return works

    def account(self) -> None:
        """Bring the sums up to date."""
        seconds, self._updated_at = self._clock.now - self._updated_at, self._clock.now
        if seconds > 0 and self._rate > 0:
            tokens = self._rate * seconds
            self._token_clock += tokens
            self._versions += tokens * (self.version or 0)
            self.tokens += tokens * len(self._active)
            self.busy_s += seconds

    def _changed(self) -> None:
        self.account()
        while self._queue and not self._closed and not self._halted and len(self._active) < self._max_sequences:
            length, work = self._queue.popleft()
            self._number += 1
            ends = self._token_clock + length
            heapq.heappush(self._active, _Sequence(ends, self._number, self._token_clock, self._versions, work))
            version = self.version or 0
            work.oldest = version if work.oldest < 0 else min(work.oldest, version)
        count = len(self._active)
        moving = count and not self._halted
        self._rate = min(self._sequence_tokens_per_s, self.tokens_per_s / count) if moving else 0.0
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if moving:
            left = self._active[0].ends + self._margin - self._token_clock
            self._next = self._clock.call_later(max(left, 0.0) / self._rate, self._end)

    def _end(self) -> None:
        self._next = None
        self.account()
        done = []
        # Rounding may leave the token clock a little short of the first one's end.
        until = max(self._active[0].ends, self._token_clock + self._margin)
        while self._active and self._active[0].ends <= until:
            sequence = heapq.heappop(self._active)
            work = sequence.work
            grown = self._token_clock - sequence.began
            # With a span of one version this is that version, but for rounding.
            mean = (self._versions - sequence.versions_before) / grown if grown > 0 else float(work.oldest)
            mean = max(mean, float(work.oldest))
            work.mean = mean if work.left == len(work.lengths) else min(work.mean, mean)
            work.left -= 1
            if work.left == 0:
                del self._works[work.index]
                self.load -= len(work.lengths)
                done.append(work)
        self._changed()
        for work in done:
            self._finished(work)
        if not self._active:
            self._idle()
