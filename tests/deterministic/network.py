"""Data connections as fluids that share links max-min fairly, approximately as long-lived TCP connections do."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tests.deterministic.machine import Event, Machine

# Links whose fair rate is this close to the lowest count as equally full.
EQUAL = 1e-9
# What may be left of a finished flow after rounding: this share of its size, plus this many seconds at its rate.
NOTHING = 1e-9


class Flow:
    """Bytes in transit from one link to another, at most `limit` bytes per second."""

    def __init__(self, network: Network, source: int, target: int, size: float, done: Callable[[], None], limit: float):
        self._network, self.done, self.limit = network, done, limit
        self.source, self.target, self.size, self.left, self.rate = source, target, size, size, 0.0

    def cancel(self) -> None:
        """End the flow before it is done."""
        if self in self._network.flows:
            self._network.change()
            del self._network.flows[self]


class Network:
    """Links (bytes/s) and the flows over them. Rates change whenever a flow begins or ends or a link changes."""

    def __init__(self, machine: Machine):
        self._machine = machine
        self._capacity: list[float] = []
        self.flows: dict[Flow, None] = {}
        self._updated_at = 0.0
        self._settling = False
        self._next: Event | None = None

    def add_link(self, bytes_per_s: float) -> int:
        """Add a link and return its number."""
        self._capacity.append(bytes_per_s)
        return len(self._capacity) - 1

    def set_capacity(self, link: int, bytes_per_s: float) -> None:
        """Set a link's capacity from now on. With 0, its flows stand still."""
        self._capacity[link] = bytes_per_s
        self.change()

    def start(self, source: int, target: int, size: float, done: Callable[[], None], limit: float = math.inf) -> Flow:
        """Move `size` bytes, at most `limit` of them per second, then call `done`."""
        self.change()
        flow = Flow(self, source, target, size, done, limit)
        self.flows[flow] = None
        return flow

    def change(self) -> None:
        """Note a change. Rates are computed once for all changes at the same time."""
        self._advance()
        if not self._settling:
            self._settling = True
            self._machine.at(0.0, None, self._settle)

    def _advance(self) -> None:
        seconds, self._updated_at = self._machine.now - self._updated_at, self._machine.now
        if seconds > 0:
            for flow in self.flows:
                flow.left -= flow.rate * seconds

    def _settle(self) -> None:
        self._settling = False
        if self._next is not None:
            self._next.cancel()
        links = np.array([(flow.source, flow.target) for flow in self.flows], dtype=np.int64).reshape(-1, 2)
        limits = np.array([flow.limit for flow in self.flows])
        rates = fair_rates(np.array(self._capacity), links[:, 0], links[:, 1], limits).tolist()
        for flow, rate in zip(self.flows, rates, strict=True):
            flow.rate = rate
        seconds = min((flow.left / flow.rate for flow in self.flows if flow.rate > 0), default=None)
        if seconds is not None:
            self._next = self._machine.at(max(seconds, 0.0), None, self._finish)

    def _finish(self) -> None:
        self.change()
        over = [flow for flow in self.flows if flow.left <= (flow.size + flow.rate) * NOTHING]
        for flow in over:
            del self.flows[flow]
        for flow in over:
            flow.done()


def fair_rates(capacity: np.ndarray, source: np.ndarray, target: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Max-min fair rates by progressive filling.

    capacity: (links,) bytes/s; source, target: (flows,) link numbers; limit: (flows,) bytes/s that a flow may have.
    Returns (flows,) bytes/s.
    """
    rates = np.zeros(len(source))
    left = capacity.astype(float)
    flows = np.arange(len(source))
    while len(flows):
        from_link, to_link = source[flows], target[flows]
        load = np.bincount(from_link, minlength=len(left)) + np.bincount(to_link, minlength=len(left))
        level = np.full(len(left), np.inf)
        np.divide(left, load, out=level, where=load > 0)
        lowest = max(min(float(level.min()), float(limit[flows].min())), 0.0)
        full = level <= lowest * (1 + EQUAL)
        stuck = full[from_link] | full[to_link] | (limit[flows] <= lowest * (1 + EQUAL))
        rates[flows[stuck]] = lowest
        left -= lowest * np.bincount(from_link[stuck], minlength=len(left))
        left -= lowest * np.bincount(to_link[stuck], minlength=len(left))
        flows = flows[~stuck]
    return rates
