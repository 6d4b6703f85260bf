"""Data connections as fluids that share links max-min fairly, as long-lived TCP connections about do.

A flow stands for `sources` equal connections, one from each of that many ranks with links of their own: its rate is one
connection's, the target's link carries all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from simulator.clock import Clock, Event

# Links this close to the fullest count as equally full.
EQUAL = 1e-9
# What is left of a flow after rounding: a share of its size, or what moves within a nanosecond.
NOTHING = 1e-9


class Network:
    """Links (bytes/s) and the flows over them. Rates change whenever a flow begins or ends or a link changes."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._capacity: list[float] = []
        self._capacities = np.zeros(0)
        self._links = np.zeros((2, 64), dtype=np.int64)
        self._sources = np.zeros(64)
        self._size = np.zeros(64)
        self._left = np.zeros(64)
        self._rate = np.zeros(64)
        self._alive = np.zeros(64, dtype=bool)
        self._done: list[Callable[[], None] | None] = [None] * 64
        self._free = list(range(63, -1, -1))
        self._used = 0
        self._updated_at = 0.0
        self._settling = False
        self._next: Event | None = None

    def add_link(self, bytes_per_s: float) -> int:
        """A new link's number."""
        self._capacity.append(bytes_per_s)
        self._capacities = np.array(self._capacity)
        return len(self._capacity) - 1

    def set_capacity(self, link: int, bytes_per_s: float) -> None:
        """From now on. With 0 its flows stand still."""
        self._capacity[link] = self._capacities[link] = bytes_per_s
        self._change()

    def start(self, source: int, target: int, size: float, sources: int, done: Callable[[], None]) -> int:
        """Move `size` bytes over each of `sources` connections, then call `done`. Returns the flow's number."""
        if not self._free:
            self._grow()
        flow = self._free.pop()
        self._used = max(self._used, flow + 1)
        self._change()
        self._links[0, flow], self._links[1, flow] = source, target
        self._sources[flow], self._size[flow], self._left[flow] = sources, size, size
        self._rate[flow], self._alive[flow], self._done[flow] = 0.0, True, done
        return flow

    def cancel(self, flow: int) -> None:
        """End a flow that is not done."""
        self._change()
        self._remove(flow)

    def moved(self, flow: int) -> float:
        """Bytes that have arrived over all of the flow's connections."""
        since = self._clock.now - self._updated_at
        left = max(0.0, float(self._left[flow]) - float(self._rate[flow]) * since)
        return (float(self._size[flow]) - left) * float(self._sources[flow])

    def _grow(self) -> None:
        old = len(self._done)
        self._links = np.concatenate([self._links, np.zeros_like(self._links)], axis=1)
        self._sources, self._size, self._left, self._rate, self._alive = (
            np.concatenate([values, np.zeros_like(values)])
            for values in (self._sources, self._size, self._left, self._rate, self._alive)
        )
        self._done += [None] * old
        self._free = list(range(2 * old - 1, old - 1, -1))

    def _remove(self, flow: int) -> None:
        self._alive[flow], self._rate[flow], self._done[flow] = False, 0.0, None
        self._free.append(flow)

    def _change(self) -> None:
        """Rates are computed once for all changes of a moment."""
        self._advance()
        if not self._settling:
            self._settling = True
            self._clock.call_at(self._clock.now, self._settle)

    def _advance(self) -> None:
        seconds, self._updated_at = self._clock.now - self._updated_at, self._clock.now
        if seconds > 0:
            self._left[: self._used] -= self._rate[: self._used] * seconds

    def _settle(self) -> None:
        self._settling = False
        self._advance()
        flows = np.flatnonzero(self._alive[: self._used])
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if len(flows) == 0:
            self._used = 0
            self._free.sort(reverse=True)
            return
        rates = fair_rates(self._capacities, self._links[0, flows], self._links[1, flows], self._sources[flows])
        self._rate[flows] = rates
        moving = rates > 0
        if moving.any():
            seconds = float(np.min(self._left[flows][moving] / rates[moving]))
            self._next = self._clock.call_later(max(seconds, 0.0), self._finish)

    def _finish(self) -> None:
        self._next = None
        self._advance()
        used = self._used
        over = self._alive[:used] & (self._left[:used] <= (self._size[:used] + self._rate[:used]) * NOTHING)
        calls: list[Any] = []
        for flow in np.flatnonzero(over).tolist():
            calls.append(self._done[flow])
            self._remove(flow)
        self._change()
        for call in calls:
            call()


def fair_rates(capacity: np.ndarray, source: np.ndarray, target: np.ndarray, sources: np.ndarray) -> np.ndarray:
    """Max-min fair rates of one connection of each flow, by progressive filling.

    capacity: (links,) bytes/s; source, target: (flows,) link numbers; sources: (flows,) equal connections that a flow
    stands for, which share the target's link but have source links of their own. Returns (flows,) bytes/s.
    """
    rates = np.zeros(len(source))
    left = capacity.astype(float)
    flows = np.arange(len(source))
    while len(flows):
        from_link, to_link, weight = source[flows], target[flows], sources[flows]
        load = np.bincount(from_link, minlength=len(left)) + np.bincount(to_link, weight, minlength=len(left))
        level = np.full(len(left), np.inf)
        np.divide(left, load, out=level, where=load > 0)
        lowest = max(float(level.min()), 0.0)
        full = level <= lowest * (1 + EQUAL)
        stuck = full[from_link] | full[to_link]
        rates[flows[stuck]] = lowest
        left -= lowest * np.bincount(from_link[stuck], minlength=len(left))
        left -= lowest * np.bincount(to_link[stuck], weight[stuck], minlength=len(left))
        flows = flows[~stuck]
    return rates
