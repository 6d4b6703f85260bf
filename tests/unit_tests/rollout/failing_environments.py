"""Environments that fail at odd numbers, each in its own way; even ones pass."""

from __future__ import annotations

import contextlib
import os
import signal
import time


class Sound:
    """Takes a while, so that many calls are in one process at a time."""

    def reset(self, row_fails: bool = False) -> None:
        if row_fails:
            raise ValueError("there is no such task")

    def step(self, action: str) -> tuple[str, float, bool]:
        time.sleep(0.1)
        if int(action) % 2:
            self.fail()
            return "", 0.0, True
        return "", 1.0, True

    def fail(self) -> None:
        """Not at all."""


class Raises(Sound):
    def fail(self) -> None:
        raise ValueError("the program under test has crashed")


class Exits(Sound):
    def fail(self) -> None:
        os._exit(3)


class KillsItself(Sound):
    def fail(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Hangs(Sound):
    def fail(self) -> None:
        time.sleep(1000)


class Swells(Sound):
    def fail(self) -> None:
        raise MemoryError


class HasNoReward(Sound):
    """Fails after the last turn."""

    failed = False

    def fail(self) -> None:
        self.failed = True

    def get_reward(self) -> float:
        if self.failed:
            raise KeyError("score")
        return 1.0


class IsKilledOnce(Sound):
    """The first process that has two calls is killed from outside; `once` is a file that says it has been."""

    def reset(self, once: str) -> None:  # type: ignore[override]
        self.once = once

    def step(self, action: str) -> tuple[str, float, bool]:
        with contextlib.suppress(FileExistsError):  # of two calls at once, one is the first
            open(self.once, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)
