"""Control connections: messages in order on each, at random against those of others; and random numbers by use."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

from simulator.clock import Clock
from torchtitan.weight_sync.states.commands import Message


def random_for(seed: int, use: str) -> Random:
    """A stream of its own for every use, so that one more draw here changes nothing there."""
    return Random(f"{seed}/{use}")


class Latency:
    """One way of a message: a constant and an exponential part."""

    def __init__(self, constant_s: float, jitter_s: float, random: Random):
        self._constant_s, self._jitter_s, self._random = constant_s, jitter_s, random

    def draw(self, of: int = 1) -> float:
        """Seconds until the last of `of` messages, sent at once over as many connections, has arrived."""
        if not self._jitter_s:
            return self._constant_s
        share = self._random.random() ** (1 / of)
        return self._constant_s - self._jitter_s * math.log(max(1 - share, 1e-12))


class Channel:
    """One direction of a connection. `of` equal connections together count as one that is as slow as the slowest."""

    def __init__(self, clock: Clock, latency: Latency, receive: Callable[[Message], None], of: int = 1):
        self._clock, self._latency, self._receive, self._of = clock, latency, receive, of
        self._last = 0.0
        self._open = True

    def send(self, message: Message) -> None:
        if self._open:
            self._later(self._deliver, message)

    def end(self, then: Callable[[], None]) -> None:
        """Nothing more is sent; `then` happens at the other end, after what was sent before."""
        if self._open:
            self._later(self._ended, then)

    def cut(self) -> None:
        """What is on its way is lost."""
        self._open = False

    def _later(self, function: Callable[[Any], None], argument: Any) -> None:
        self._last = max(self._last, self._clock.now + self._latency.draw(self._of))
        self._clock.call_at(self._last, function, argument)

    def _deliver(self, message: Message) -> None:
        if self._open:
            self._receive(message)

    def _ended(self, then: Callable[[], None]) -> None:
        if self._open:
            self._open = False
            then()
