"""A virtual clock: a heap of calls that are due. Those of one moment happen in the order in which they were made."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Event:
    """A call that is due; cancel() makes it a no-op."""

    __slots__ = ("arguments", "function")

    def __init__(self, function: Callable[..., None], arguments: tuple[Any, ...]):
        self.function: Callable[..., None] | None = function
        self.arguments = arguments

    def cancel(self) -> None:
        """Idempotent, also after the call."""
        self.function = None


class Clock:
    """Seconds since the simulation's start."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls = 0
        self._heap: list[tuple[float, int, Event]] = []
        self._number = 0

    def call_at(self, time: float, function: Callable[..., None], *arguments: Any) -> Event:
        """Call at `time`, or now where that has passed."""
        event = Event(function, arguments)
        self._number += 1
        heapq.heappush(self._heap, (max(time, self.now), self._number, event))
        return event

    def call_later(self, seconds: float, function: Callable[..., None], *arguments: Any) -> Event:
        return self.call_at(self.now + seconds, function, *arguments)

    def run(self, until: float) -> None:
        """Make every call that is due up to `until` seconds."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, event = heapq.heappop(heap)
            function, event.function = event.function, None
            if function is not None:
                self.calls += 1
                function(*event.arguments)
        self.now = until
