"""Whether the engine beside an agent lives, answers, and still holds what was put into it; asked from a thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from torchtitan.inference.agent.applier import Applier
from torchtitan.inference.agent.control import EngineControl, EngineError, EngineNotListening

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
PROBE_S = 5.0


class Watch:
    """Asks the engine every second.

    lost(reason) is called, from the thread, when the engine holds other weights than it was given: whoever runs it has
    started it anew, or changed them.
    """

    def __init__(
        self,
        control: EngineControl,
        applier: Applier,
        lost: Callable[[str], None],
        interval_s: float = INTERVAL_S,
        probe_s: float = PROBE_S,
    ):
        self._control, self._applier, self._lost = control, applier, lost
        self._interval_s, self._probe_s = interval_s, probe_s
        self._ended = threading.Event()
        self._silent_since: float | None = None
        """When the first of the probes began that had no answer since the last one that had"""
        self._closed_since: float | None = None
        """Likewise of those that found its port closed"""
        self._answered_at = time.monotonic()
        self.trouble: str | None = None
        """Why the last probe failed"""
        self._thread = threading.Thread(target=self._run, name="engine-watch", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Stop asking; a probe that hangs is left behind after `timeout_s`."""
        self._ended.set()
        if self._thread.is_alive():  # it may never have started
            self._thread.join(timeout_s)

    @property
    def age_s(self) -> float:
        """Seconds for which the engine has answered no probe; 0 while it answers, or applies a version (which has
        deadlines of its own)."""
        since = self._silent_since
        return 0.0 if since is None or self._is_excused() else time.monotonic() - since

    @property
    def closed_s(self) -> float:
        """Seconds for which the engine's port has been closed; 0 while it is open."""
        since = self._closed_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def answered_age_s(self) -> float:
        """Seconds since the last probe that had an answer began."""
        return time.monotonic() - self._answered_at

    def _is_excused(self) -> bool:
        """Applying takes the engine's time. Not where it has not even obeyed the order to stand still: else one that is
        frozen would be excused by each attempt to give it a version."""
        return self._applier.busy and self._applier.lost_pause is None

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            begun = time.monotonic()
            try:
                self._control.check_health(self._probe_s)
                self._silent_since = self._closed_since = self.trouble = None
                self._answered_at = begun
                self._applier.undo_lost_pause()
                if (reason := self._applier.find_lost_weights()) is not None:
                    logger.error("%s", reason)
                    self._lost(reason)
            except EngineError as error:
                closed = isinstance(error, EngineNotListening)
                self._closed_since = (self._closed_since or begun) if closed else None
                if self._is_excused():
                    self._silent_since = None
                    continue
                if self._silent_since is None:
                    logger.warning("the engine does not answer: %s", error)
                    self._silent_since = begun
                self.trouble = str(error)
