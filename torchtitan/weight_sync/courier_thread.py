"""The courier as a thread of the trainer, for transports that read slots on a device (nccl, ipc).

Another process could not read them, or would take turns with this one on the GPU. It is the same Courier; what differs
is who starts it again when it fails, and that nobody can when it hangs: a thread cannot be killed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from torchtitan.weight_sync import launch
from torchtitan.weight_sync.courier import Courier

logger = logging.getLogger(__name__)

RESTART_SECONDS = 0.2
# A courier that worked for this long has earned its restarts back.
HEALTHY_SECONDS = 60.0


class CourierThread:
    """Runs a courier, and a new one up to `max_restarts` times in a row when it fails.

    arguments(): asked anew for each start; what the Courier takes, with the slots instead of descriptors and a bell of
    its own, which is closed with it. pulse() is a number that changes while the courier works; where it stands still
    for long, that is a failure.
    """

    def __init__(
        self,
        name: str,
        arguments: Callable[[], dict[str, Any]],
        token: str,
        max_restarts: int,
        pulse: Callable[[], int],
    ):
        self.name, self._arguments, self._token, self._max_restarts = name, arguments, token, max_restarts
        self.failure = ""
        self.restarts = 0
        self._closing = threading.Event()
        self._courier = self._create()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._watch = launch.watch_pulse(name, lambda: (self.restarts, pulse()), self._closing, self._give_up)

    def _create(self) -> Courier:
        arguments = self._arguments()
        try:
            return Courier(arguments, self._token)
        except Exception:
            arguments["bell"].close()
            raise

    def _run(self) -> None:
        try:
            self._restart_until_closed()
        except Exception as error:
            self.failure = f"the {self.name} cannot be started again: {error!r}"
            logger.exception("%s", self.failure)

    def _give_up(self) -> None:
        if not self.failure:
            seconds = launch.FROZEN_LOOKS * launch.LOOK_SECONDS
            self.failure = (
                f"the {self.name} has shown no sign of life for {seconds:g} s; as a thread it cannot be killed, so the "
                "trainer has to be started again"
            )
            logger.error("%s", self.failure)

    def _restart_until_closed(self) -> None:
        in_a_row = 0
        while True:
            begun = time.monotonic()
            try:
                self._courier.run()
                reason = "it ended by itself"
            except Exception as error:
                logger.exception("the %s failed", self.name)
                reason = repr(error)
            if self._closing.is_set():
                return
            in_a_row = 0 if time.monotonic() - begun > HEALTHY_SECONDS else in_a_row + 1
            if in_a_row > self._max_restarts:
                self.failure = f"the {self.name} failed {in_a_row} times in a row, the last time: {reason}"
                return
            if self._closing.wait(RESTART_SECONDS * in_a_row):
                return
            self.restarts += 1
            self._courier = self._create()
            if self._closing.is_set():
                self._courier.stop()

    def close(self, deadline: float) -> None:
        """End it; waits until `deadline` (time.monotonic())."""
        self._closing.set()
        self._courier.stop()
        self._watch.join()
        self._thread.join(max(0.1, deadline - time.monotonic()))
