"""Processes of a benchmark: a function that runs beside it, answers with lines of JSON, and ends with it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.common import REPOSITORY

_PR_SET_PDEATHSIG = 1


class Child:
    """`function(arguments)` in a process that does not outlive this one.

    function: of a module, and not of a class; it answers with `say`. prefix: in front of the command, say
    `ip netns exec NAME`; environment: variables beside this process's.
    """

    def __init__(
        self,
        function: Callable[[dict[str, Any]], None],
        arguments: Mapping[str, Any],
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] = {},
    ):
        place = f"{function.__module__}:{function.__name__}"
        command = [sys.executable, "-m", "benchmarks.weight_sync.processes", place, json.dumps(dict(arguments))]
        self.process = subprocess.Popen(
            [*prefix, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
        )

    def tell(self, message: Mapping[str, Any]) -> None:
        """One line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(dict(message)) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Its next line. Ends the benchmark when it has died."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a process of the benchmark has ended with code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        """Kill it: nothing of it is needed any more."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def say(message: Mapping[str, Any]) -> None:
    """A child's answer."""
    print(json.dumps(dict(message)), flush=True)


def die_with_parent() -> None:
    """Called by a child: the kernel kills it when its parent is gone, even while it is stopped. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == 1:
            os._exit(1)


if __name__ == "__main__":
    die_with_parent()
    module, _, name = sys.argv[1].partition(":")
    getattr(importlib.import_module(module), name)(json.loads(sys.argv[2]))
