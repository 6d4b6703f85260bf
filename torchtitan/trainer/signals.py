"""Signals as flags that the training loop checks between two steps.

SIGTERM, SIGINT and SIGHUP (unless it is ignored, as under nohup) request a save and a clean exit; a second one exits at
once. SIGUSR1 requests a Hugging Face export.
The first stop signal starts a deadline, so that a hanging save cannot keep the process alive.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

# torchrun passes Ctrl-C on although the terminal has already sent it: copies within this time are the same request.
REPEAT_WINDOW_S = 1.0


class SignalFlags:
    """Context manager that catches the signals; create and enter it in the main thread.

    The caller tells the other ranks about a signal: only the `stop_signal` of one rank should count.
    """

    def __init__(self, save_deadline_s: float, leads: bool = True, saves: bool = True):
        """leads: this rank's first stop signal counts for the job. Any other rank waits for the leader's decision,
        which comes with the next batch, because a rank that acted alone would make the others fail. saves: whether
        there are checkpoints."""
        self.save_deadline_s = save_deadline_s
        self.leads = leads
        self._way = "saving and exiting" if saves else "exiting without a checkpoint (checkpoint.enable = false)"
        self.stop_signal: int | None = None
        """Number of the first SIGTERM, SIGINT or SIGHUP"""
        self._stopped_at = 0.0
        self._export = False
        self._finished = threading.Event()
        self._previous: dict[int, object] = {}

    def __enter__(self) -> SignalFlags:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_stop)
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        self._previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_export)
        # The launcher has blocked it until now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        return self

    def __exit__(self, *_error: object) -> None:
        self._finished.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def stop_requested(self) -> bool:
        return self.stop_signal is not None

    @property
    def stop_received(self) -> bool:
        """Whether a stop signal has reached this rank, even if it has no effect yet."""
        return bool(self._stopped_at)

    @property
    def exit_code(self) -> int:
        """128 + signal after a stop signal, else 0."""
        return 0 if self.stop_signal is None else 128 + self.stop_signal

    def take_export_request(self) -> bool:
        """Whether an export was requested since the last call."""
        requested, self._export = self._export, False
        return requested

    def start_deadline(self) -> None:
        """Start the deadline on a rank that learned of the stop from another one. Safe to repeat."""
        if self.stop_signal is None:
            self._begin_stop(signal.SIGTERM)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            # Whoever writes to a terminal that is gone fails; the save must not.
            with open(os.devnull, "wb") as nowhere:
                for descriptor in self._terminals:
                    os.dup2(nowhere.fileno(), descriptor)
        if not self.leads and not self._stopped_at:
            self._stopped_at = time.monotonic()
        elif self.leads and self.stop_signal is None:
            name = signal.Signals(number).name
            _say(f"{name}: {self._way} within {self.save_deadline_s:g} s; signal again to exit at once")
            self._begin_stop(number)
        elif time.monotonic() - self._stopped_at > REPEAT_WINDOW_S:
            _say(f"{signal.Signals(number).name} again: exiting at once, without saving")
            os._exit(128 + number)

    def _on_export(self, number: int, frame: FrameType | None) -> None:
        self._export = True

    def _begin_stop(self, number: int) -> None:
        self.stop_signal = number
        self._stopped_at = time.monotonic()
        threading.Thread(target=self._watch, name="stop-deadline", daemon=True).start()

    def _watch(self) -> None:
        if not self._finished.wait(self.save_deadline_s):
            _say(
                f"not done {self.save_deadline_s:g} s after the stop signal (checkpoint.save_deadline_s): exiting now; "
                "the last whole checkpoint is intact"
            )
            os._exit(self.exit_code)


def _say(message: str) -> None:
    # Logging is unsafe here: the signal may have interrupted a call that holds a handler's lock.
    os.write(2, f"\n{message}\n".encode())
