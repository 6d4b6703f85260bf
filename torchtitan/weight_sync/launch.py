"""Starts registry and shard server as processes of their own, and again when they die or freeze. No torch."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan.utils.child_process import child_environment
from torchtitan.weight_sync import wire

logger = logging.getLogger(__name__)

RESTART_SECONDS = 0.2
# What lived for this long has earned its restarts back.
HEALTHY_SECONDS = 60.0
# What shows no sign of life at this many looks in a row is frozen. Looks, not seconds: a pause of this process is a
# single look.
LOOK_SECONDS = 1.0
FROZEN_LOOKS = 3
# What has shown none yet is still starting: from a cold network disk that takes a while.
STARTING_LOOKS = 60


class Supervised:
    """Lives again up to `max_restarts` times in a row. A subclass says what a life is; one has begun before
    supervise().

    pulse() is a number that changes while it works; where that stands still for long, _end_frozen() ends the life.
    """

    def __init__(self, name: str, max_restarts: int, pulse: Callable[[], int] | None):
        self.name, self._max_restarts, self._pulse = name, max_restarts, pulse
        self.failure = ""
        """Why it does not live again, if so"""
        self.restarts = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name=f"supervise-{name}", daemon=True)

    def supervise(self) -> None:
        """Begin to."""
        self._thread.start()
        if self._pulse is not None:
            threading.Thread(target=self._watch, args=(self._pulse,), name=f"pulse-{self.name}", daemon=True).start()

    def _begin(self) -> None:
        raise NotImplementedError

    def _live(self) -> str:
        """Wait for the end of the life that has begun. Returns what is to be said of it."""
        raise NotImplementedError

    def _end_frozen(self) -> None:
        raise NotImplementedError

    def _watch(self, pulse: Callable[[], int]) -> None:
        last, still, starting = (self.restarts, pulse()), 0, True
        while not self._closing.wait(LOOK_SECONDS):
            now = self.restarts, pulse()
            if now != last:
                starting = now[0] != last[0]
            last, still = now, still + 1 if now == last else 0
            if still >= (STARTING_LOOKS if starting else FROZEN_LOOKS):
                self._end_frozen()
                still = 0

    def _supervise(self) -> None:
        in_a_row = 0
        try:
            while not self._closing.is_set():
                begun = time.monotonic()
                end = self._live()
                if self._closing.is_set():
                    return
                in_a_row = 0 if time.monotonic() - begun > HEALTHY_SECONDS else in_a_row + 1
                if in_a_row > self._max_restarts:
                    self.failure = f"the {self.name} failed {in_a_row} times in a row, the last time: {end}"
                    logger.error("%s", self.failure)
                    return
                logger.warning("the %s has ended, starting it again: %s", self.name, end)
                if self._closing.wait(RESTART_SECONDS * in_a_row):
                    return
                self._begin()
                self.restarts += 1
        except Exception as error:
            self.failure = f"the {self.name} cannot be started again: {error!r}"
            logger.exception("%s", self.failure)


class SupervisedProcess(Supervised):
    """`python -m module '{arguments}'`; arguments(number) is asked anew for each start, 1, 2, …; `descriptors` are
    passed on."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Callable[[int], dict[str, Any]],
        descriptors: list[int],
        token: str,
        log_file: Path,
        max_restarts: int,
        pulse: Callable[[], int] | None = None,
    ):
        super().__init__(name, max_restarts, pulse)
        self._module, self._arguments, self._descriptors = module, arguments, descriptors
        self._token, self._log_file = token, log_file
        self._starts = 0
        self._begin()
        self.supervise()

    def _begin(self) -> None:
        self._starts += 1
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with self._log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self._module, json.dumps(self._arguments(self._starts))],
                pass_fds=self._descriptors,
                env=child_environment(1, **{wire.TOKEN_VARIABLE: self._token}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A signal to the trainer's group is the trainer's to answer; this process ends when its parent does.
                start_new_session=True,
            )
        if self._closing.is_set():
            self.process.terminate()

    def _live(self) -> str:
        return f"exit code {self.process.wait()}, see {self._log_file}"

    def _end_frozen(self) -> None:
        logger.error("the %s shows no sign of life, killing it", self.name)
        self.process.kill()

    def close(self, deadline: float) -> None:
        """Terminate, and kill what has not ended by `deadline` (time.monotonic())."""
        self._closing.set()
        self.process.terminate()
        try:
            self.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(1.0)
        self._thread.join(max(0.1, deadline - time.monotonic()))
