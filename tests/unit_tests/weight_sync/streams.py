"""A device on the CPU: work that is queued and done later, by a thread, as a GPU's streams do it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from tests.patience import PATIENCE_S


class QueuedFence:
    """Reached when the side stream's thread has come to it. drops_hold: a fence that holds nothing back."""

    def __init__(self, compute: DelayedStream, drops_hold: bool):
        self._event = threading.Event()
        self._compute, self._drops_hold = compute, drops_hold

    def reach(self) -> None:
        self._event.set()

    def done(self) -> bool:
        return self._event.is_set()

    def wait(self) -> None:
        assert self._event.wait(PATIENCE_S), "the side stream stands still"

    def hold(self) -> None:
        if not self._drops_hold:
            self._compute.queue(self.wait)


class DelayedStream:
    """A compute stream (`queue`) and a side stream (`run`), each a thread; copies begin when `go` is set."""

    def __init__(self, drop_hold: bool = False):
        self.go = threading.Event()
        self._drop_hold = drop_hold
        self._compute: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._side: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        for work in (self._compute, self._side):
            threading.Thread(target=self._work, args=(work,), daemon=True).start()

    @staticmethod
    def _work(work: queue.SimpleQueue[Callable[[], None]]) -> None:
        while True:
            work.get()()

    def queue(self, work: Callable[[], None]) -> None:
        """Give the compute stream something to do; does not wait."""
        self._compute.put(work)

    def finish(self) -> None:
        """Wait for the compute stream."""
        done = threading.Event()
        self.queue(done.set)
        assert done.wait(PATIENCE_S), "the compute stream stands still"

    def run(self, work: Callable[[], None]) -> QueuedFence:
        """Behind what the compute stream has been given so far, as device.SideStream says."""
        fence, before = QueuedFence(self, self._drop_hold), threading.Event()
        self.queue(before.set)

        def delayed() -> None:
            assert before.wait(PATIENCE_S) and self.go.wait(PATIENCE_S)
            work()
            fence.reach()

        self._side.put(delayed)
        return fence
