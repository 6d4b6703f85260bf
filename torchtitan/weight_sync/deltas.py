"""Deltas of a shard server: each bucket of a snapshot is encoded once against a base, for all actors that hold it.

Threads encode. What it has made is kept as long as both snapshots are: less than the buckets themselves take.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torchtitan.weight_sync.delta import encode
from torchtitan.weight_sync.live_slots import LiveSlots
from torchtitan.weight_sync.runtime import Runtime

# Each does about a gigabyte of new weights per second where few of them have changed.
THREADS = 2


class _Key(NamedTuple):
    serial: int
    base: int
    bucket: int


class Deltas:
    """memory(serial, bucket): a bucket's bytes in its slot. made(): one more is there."""

    def __init__(
        self,
        runtime: Runtime,
        live: LiveSlots,
        memory: Callable[[int, int], memoryview],
        element_bytes: int,
        made: Callable[[], None],
    ):
        self._runtime, self._live, self._memory = runtime, live, memory
        self._element_bytes, self._on_made = element_bytes, made
        self._made: dict[_Key, memoryview | None] = {}
        """None where the bucket itself is better"""
        self._waiting: dict[_Key, None] = {}
        self._at: dict[int, tuple[_Key, float]] = {}
        """Thread -> the bucket that it is at, and since when"""

    @property
    def began(self) -> float | None:
        """Since when a thread has been at one bucket: the longest."""
        return min((since for _, since in self._at.values()), default=None)

    def is_made(self, serial: int, base: int, bucket: int) -> bool:
        """Whether get() has the last word. If not, the delta will be made."""
        key = _Key(serial, base, bucket)
        if key in self._made or not self._is_possible(serial, base):
            return True
        if all(key != one for one, _ in self._at.values()):
            self._waiting[key] = None
            self._make_next()
        return False

    def get(self, serial: int, base: int, bucket: int) -> memoryview | None:
        """What makes the base's bucket the newer one; None where the bucket itself is to be sent."""
        return self._made.get(_Key(serial, base, bucket))

    def _is_possible(self, serial: int, base: int) -> bool:
        return self._live.readable(serial) is not None and self._live.base_slot(base) is not None

    def _make_next(self) -> None:
        for thread in range(THREADS):
            while self._waiting and thread not in self._at:
                key = next(iter(self._waiting))
                del self._waiting[key]
                if self._is_possible(key.serial, key.base):
                    self._at[thread] = key, self._runtime.now()
                    self._live.hold(key.serial)
                    self._live.hold(key.base)
                    new, base = self._memory(key.serial, key.bucket), self._memory(key.base, key.bucket)
                    self._runtime.work(f"deltas-{thread}", partial(self._make, new, base), partial(self._done, thread))

    def _make(self, new: memoryview, base: memoryview) -> memoryview | None:
        return encode(new, base, self._element_bytes)

    def _done(self, thread: int, payload: memoryview | None, error: BaseException | None) -> None:
        if error is not None:
            # Ends the process: a new one starts with empty hands, this one would leave actors waiting.
            raise RuntimeError("a thread that encodes deltas has failed") from error
        key, _ = self._at.pop(thread)
        if self._is_possible(key.serial, key.base):
            self._made[key] = payload
        self._live.let_go(key.serial)
        self._live.let_go(key.base)
        self._make_next()
        self._on_made()

    def forget_what_is_gone(self) -> None:
        """After snapshots have ended. Whoever waits for a delta against one of them gets the bucket itself."""
        there = {pair for pair in {(key.serial, key.base) for key in self._made} if self._is_possible(*pair)}
        self._made = {key: payload for key, payload in self._made.items() if (key.serial, key.base) in there}
        self._on_made()
