"""Processes that tests start: each in a group of its own with a log, ended with everything that they started."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tests.patience import until

ROOT = Path(__file__).resolve().parents[1]
# What every one is run with: no downloads, no usage reports, one thread, a small KV cache.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
STOP_SECONDS = 15.0
LOG_TAIL = 6000


def free_ports(count: int) -> int:
    """The first of so many ports in a row of the loopback interface that were free a moment ago.

    They lie below those that the system gives to connections that go out: those come and go by the hundred.
    """
    for first in random.sample(range(20_000, 32_000), 100):
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probes.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError(f"no {count} free ports in a row")


def status_of(pid: int) -> str:
    """What the system says that a process does: "dead" where it knows of none any more.

    Asking first whether there is one would leave it time to end in between.
    """
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_DEAD)


def has_ended(pid: int) -> bool:
    """Whether it has; also where its parent has not asked for its exit code yet."""
    return status_of(pid) in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE)


def started_by(process: psutil.Process, words: str) -> list[psutil.Process]:
    """All that it has started, and they in turn, whose command has these words. Others may come and go meanwhile."""
    found = []
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if words in " ".join(child.cmdline()):
                found.append(child)
    return found


# Importing torch would take longest of all that a small process does.
_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(
    ["pytest", "tests.integration_tests.pulling_actor", "tests.integration_tests.weight_sync_worker"]
)


def fork(
    run: Callable[[Mapping[str, Any], Callable[[], None]], None], arguments: Mapping[str, Any], **environment: str
) -> BaseProcess:
    """A process that calls run(arguments, until_the_end); until_the_end() returns once this process has ended."""
    lives, ended = _FORKING.Pipe(duplex=False)
    process = _FORKING.Process(target=_forked, args=(run, arguments, lives, environment), daemon=True)
    process.start()
    lives.close()
    process.ended = ended  # type: ignore[attr-defined]  # open as long as a test holds the process
    return process


def _forked(run: Callable[..., None], arguments: Mapping[str, Any], lives: Connection, more: Mapping[str, str]) -> None:
    os.environ.update(more)

    def until_the_end() -> None:
        with contextlib.suppress(EOFError):
            lives.recv()

    run(arguments, until_the_end)


class Processes:
    """Starts processes, waits for them, and kills at the end what is left. Use it as a context manager."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in reversed(self._running):
            self.stop(name)

    def start(self, name: str, command: Sequence[str | Path], **environment: str) -> subprocess.Popen[bytes]:
        """Run a command from this checkout; its output goes to {name}.log in the folder."""
        assert name not in self._running or self._running[name].poll() is not None, f"{name} runs already"
        everything = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), **environment}
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                [str(word) for word in command],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=everything,
                cwd=ROOT,
                start_new_session=True,
            )
        self._running[name] = process
        return process

    def start_server(
        self, name: str, command: Sequence[str | Path], deadline_s: float = 180.0, **environment: str
    ) -> int:
        """Start a server with `--port-file`, and wait for the port that it writes there."""
        port_file = self.folder / f"{name}.port"
        port_file.unlink(missing_ok=True)
        self.start(name, [*command, "--port-file", port_file], **environment)
        self.wait(name, port_file.exists, deadline_s)
        return int(port_file.read_text())

    def wait(self, name: str, condition: Callable[[], bool], deadline_s: float) -> None:
        """Until condition() holds; fails with the end of the log when the process ends or the deadline passes."""
        process = self._running[name]

        def why() -> str:
            took = f"took longer than {deadline_s:g} s" if process.poll() is None else f"ended with {process.poll()}"
            return f"{name} {took}:\n{self.tail(name)}"

        until(condition, deadline_s, process, why)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def tail(self, name: str) -> str:
        """The end of its log."""
        return self.log(name).read_text(errors="replace")[-LOG_TAIL:]

    def signal(self, name: str, number: int) -> None:
        """To the process and all that it started (but for what left its session)."""
        os.killpg(self._running[name].pid, number)

    def stop(self, name: str) -> int:
        """SIGTERM, and SIGKILL to what is left of its group; returns the exit code."""
        process = self._running[name]
        if process.poll() is None:
            # A frozen one could not react.
            for number in (signal.SIGCONT, signal.SIGTERM):
                _signal_group(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        _signal_group(process.pid, signal.SIGKILL)
        return process.wait(STOP_SECONDS)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
