"""One thread, many non-blocking sockets: what registry, shard servers and actors run on."""

from __future__ import annotations

import heapq
import itertools
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(order=True)
class Timer:
    """A call in the future; cancel() makes it a no-op."""

    due: float
    order: int
    callback: Callable[[], None] | None = field(compare=False)

    def cancel(self) -> None:
        self.callback = None


class EventLoop:
    """Readiness callbacks, timers and calls from other threads, all run by the one thread that runs the loop."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[Timer] = []
        self._orders = itertools.count()
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._stopped = False
        self._thread: int | None = None
        self.watch(self._wake_read, selectors.EVENT_READ, self._drain_wake)

    def watch(self, file: socket.socket, events: int, callback: Callable[[int], None]) -> None:
        """Call `callback(events)` whenever `file` is ready for one of `events`; replaces an earlier watch."""
        if file.fileno() in self._selector.get_map():
            self._selector.modify(file, events, callback)
        else:
            self._selector.register(file, events, callback)

    def forget(self, file: socket.socket) -> None:
        """Stop watching `file`. When run() has ended nothing is watched any more."""
        watched = self._selector.get_map()
        if watched is not None and file.fileno() in watched:
            self._selector.unregister(file)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Run `callback` after `seconds`."""
        timer = Timer(time.monotonic() + seconds, next(self._orders), callback)
        heapq.heappush(self._timers, timer)
        return timer

    def call_from_thread(self, callback: Callable[[], None]) -> None:
        """Run `callback` on the loop's thread soon. Safe from every thread, never blocks."""
        self._calls.append(callback)
        if threading.get_ident() != self._thread:
            try:
                self._wake_write.send(b"x")
            except BlockingIOError:
                pass  # a wake-up is pending already
            except OSError:
                if not self._stopped:
                    raise

    def stop(self) -> None:
        """Make run() return. Safe from every thread."""
        self.call_from_thread(self._stop)

    def run(self) -> None:
        """Run until stop(), then close the loop's own files. An exception of a callback ends the loop."""
        self._thread = threading.get_ident()
        try:
            while not self._stopped:
                self._run_once()
        finally:
            self._stopped = True
            self._selector.close()
            self._wake_read.close()
            self._wake_write.close()

    def run_leftover_calls(self) -> None:
        """After run() has returned: the calls from other threads that came too late for it."""
        while self._calls:
            self._calls.popleft()()

    def _stop(self) -> None:
        self._stopped = True

    def _drain_wake(self, _events: int) -> None:
        self._wake_read.recv(4096)

    def _run_once(self) -> None:
        timeout = 1.0
        if self._calls:
            timeout = 0.0
        elif self._timers:
            timeout = min(timeout, max(0.0, self._timers[0].due - time.monotonic()))
        for key, events in self._selector.select(timeout):
            # An earlier callback of this round may have closed or replaced this file.
            current = self._selector.get_map().get(key.fd)
            if current is not None and current.fileobj is key.fileobj and current.data is key.data:
                key.data(events)
        now = time.monotonic()
        while self._timers and self._timers[0].due <= now:
            callback = heapq.heappop(self._timers).callback
            if callback is not None:
                callback()
        for _ in range(len(self._calls)):
            self._calls.popleft()()
