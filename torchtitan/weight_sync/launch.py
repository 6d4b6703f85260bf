"""Starts registry and shard server as processes of their own, and again when they die or freeze. No torch."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torchtitan
from torchtitan.weight_sync import wire

logger = logging.getLogger(__name__)

RESTART_SECONDS = 0.2
# A process that lived for this long has earned its restarts back.
HEALTHY_SECONDS = 60.0
# A process whose pulse stands still at this many looks in a row is frozen. Looks, not seconds: a pause of this process
# is a single look.
LOOK_SECONDS = 1.0
FROZEN_LOOKS = 30
# One that has shown no sign of life yet is still starting: from a cold network disk that takes a while.
STARTING_LOOKS = 60


def watch_pulse(
    name: str,
    pulse: Callable[[], tuple[int, int]],
    closing: threading.Event,
    on_frozen: Callable[[], None],
    frozen_looks: int = FROZEN_LOOKS,
) -> threading.Thread:
    """A thread that calls on_frozen() each time that pulse() = (restarts, beats) has stood still for so many looks,
    or for STARTING_LOOKS after a start; until closing."""

    def watch() -> None:
        last, still, starting = pulse(), 0, True
        while not closing.wait(LOOK_SECONDS):
            now = pulse()
            if now != last:
                starting = now[0] != last[0]
            last, still = now, still + 1 if now == last else 0
            if still >= (STARTING_LOOKS if starting else frozen_looks):
                on_frozen()
                still = 0

    thread = threading.Thread(target=watch, name=f"pulse-{name}", daemon=True)
    thread.start()
    return thread


class SupervisedProcess:
    """`python -m module '{arguments}'`, restarted up to `max_restarts` times in a row when it exits.

    arguments(number) is asked anew for each start, 1, 2, …; `descriptors` are passed on. pulse() is a number that
    changes while the process works; where it stands still for long the process is killed, and started again.
    """

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
        frozen_looks: int = FROZEN_LOOKS,
    ):
        self.name, self._module, self._arguments, self._descriptors = name, module, arguments, descriptors
        self._token, self._log_file, self._max_restarts = token, log_file, max_restarts
        self.failure = ""
        self.restarts = 0
        self._starts = 0
        self._closing = threading.Event()
        self.process = self._start()
        self._thread = threading.Thread(target=self._supervise, name=f"supervise-{name}", daemon=True)
        self._thread.start()
        if pulse is not None:
            watch_pulse(name, lambda: (self.restarts, pulse()), self._closing, self._kill_frozen, frozen_looks)

    def _start(self) -> subprocess.Popen[bytes]:
        self._starts += 1
        root = str(Path(torchtitan.__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
        environment = {**os.environ, wire.TOKEN_VARIABLE: self._token, "PYTHONPATH": path}
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with self._log_file.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", self._module, json.dumps(self._arguments(self._starts))],
                pass_fds=self._descriptors,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A signal to the trainer's group is the trainer's to answer; this process ends when its parent does.
                start_new_session=True,
            )

    def _supervise(self) -> None:
        try:
            self._restart_until_closed()
        except Exception as error:
            self.failure = f"the {self.name} cannot be started again: {error!r}"
            logger.exception("%s", self.failure)

    def _kill_frozen(self) -> None:
        logger.error("the %s shows no sign of life, killing it", self.name)
        self.process.kill()

    def _restart_until_closed(self) -> None:
        in_a_row = 0
        while True:
            begun = time.monotonic()
            code = self.process.wait()
            if self._closing.is_set():
                return
            in_a_row = 0 if time.monotonic() - begun > HEALTHY_SECONDS else in_a_row + 1
            if in_a_row > self._max_restarts:
                self.failure = (
                    f"the {self.name} died {in_a_row} times in a row (exit code {code}), see {self._log_file}"
                )
                logger.error("%s", self.failure)
                return
            logger.warning("the %s ended with exit code %d, starting it again", self.name, code)
            if self._closing.wait(RESTART_SECONDS * in_a_row):
                return
            self.restarts += 1
            self.process = self._start()
            if self._closing.is_set():
                self.process.terminate()

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
