"""The ranks of a run on one machine: their start, what they print, their restarts and their end. No torch here.

With several ranks, rank 0 serves the store in which they find each other, on a socket that is open before it starts:
no other process can take the port in between, and each start has a store of its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import psutil

from torchtitan.utils.child_process import KILL_GRACE_S, LOSS_VARIABLE, STORE_VARIABLE

# Ranks leave within checkpoint.save_deadline_s (at most 600) by themselves; SIGKILL is only the backstop.
SHUTDOWN_TIMEOUT_S = 630
# What a rank ends with that has said what a person has to change: it would only say so again.
FINAL_CODES = (1, 2)
STOPPED_S = 10
LOOPBACK = "127.0.0.1"
# The ranks beside one that has failed may fail because of it, or have failed just before it.
TOGETHER_S = 0.2
LOOK_S = 1.0
TAIL_S = 0.1
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


@dataclass
class Launch:
    """What is started."""

    ranks: int
    restarts: int
    shown: Collection[int]
    """Ranks whose output is shown"""
    tee: bool
    """It is shown with the rank before each line, and not given the terminal"""
    role: str
    command: Sequence[str]


class StoppedRanks:
    """Says once of each process that it has been stopped (SIGSTOP) for STOPPED_S: the others only wait for it."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        """When each was seen stopped first; inf once it was said"""

    def check(self, ranks: Sequence[int]) -> None:
        """Look at the ranks of this machine, by their process ids."""
        now = time.monotonic()
        for number, rank in enumerate(ranks):
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(rank).status() != psutil.STATUS_STOPPED:
                    self._since.pop(rank, None)
                elif now - self._since.setdefault(rank, now) >= STOPPED_S:
                    self._since[rank] = math.inf
                    say(f"local rank {number} has been stopped for {STOPPED_S} s: kill -CONT {rank} continues it")


class LocalRanks:
    """Starts all ranks, again if one is lost, and ends when they have. Use it in the main thread."""

    def __init__(self, launch: Launch, folder: Path):
        """folder: for what the ranks print until it is shown."""
        self._launch, self._folder = launch, folder
        self._events: queue.SimpleQueue[_Ended | signal.Signals] = queue.SimpleQueue()
        self._starts = 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._printer = _Printer()
        self._stopped = StoppedRanks()
        self._started = threading.Event()
        """Set while the processes that there are are those that run"""

    def running(self) -> list[int]:
        """Return the process ids of the ranks when there are some that run. For other threads."""
        self._started.wait()
        return self._ids()

    def _ids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def run(self) -> int:
        """Return the exit code: of the rank that failed first, or 128 + the signal that stopped the ranks."""
        with self._printer, _handling(self._take_signal):
            self._start()
            try:
                return self._supervise()
            finally:
                self._end(signal.SIGKILL, 0.0)

    def _take_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:  # a terminal that closes may say so twice
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._events.put(signal.Signals(number))

    def _supervise(self) -> int:
        left, succeeded = self._launch.restarts, set[int]()
        while len(succeeded) < self._launch.ranks:
            event = self._next(LOOK_S)
            if event is None:
                self._stopped.check(self._ids())
            elif isinstance(event, signal.Signals):
                self._end(event, _shutdown_s())
                say(f"stopped by {event.name}")
                return 128 + event
            elif event.start == self._starts and event.code == 0:
                succeeded.add(event.rank)
            elif event.start == self._starts:
                if stopped := self._again(event, left):
                    return stopped
                left, succeeded = left - 1, set()
        return 0

    def _again(self, first: _Ended, left: int) -> int:
        """Start all ranks again because one has failed, if it may; otherwise return the exit code."""
        codes = [first.code]
        deadline = time.monotonic() + TOGETHER_S
        while (event := self._next(max(0.0, deadline - time.monotonic()))) is not None:
            if isinstance(event, signal.Signals):
                self._events.put(event)
                break
            codes.append(event.code)
        final = left == 0 or any(code in FINAL_CODES for code in codes)
        if not final:
            os.environ[LOSS_VARIABLE] = f"rank {first.rank} {end_of(first.code)}"
            say(f"{os.environ[LOSS_VARIABLE]}: all ranks start again ({left} restarts left)")
        stopped_by = self._end(signal.SIGTERM, _shutdown_s())
        if stopped_by is not None:
            say(f"stopped by {stopped_by.name}")
            return 128 + stopped_by
        if final:
            say(f"rank {first.rank} failed first: it {end_of(first.code)}")
            # Popen reports death by signal n as -n, shells as 128 + n.
            return first.code if first.code >= 0 else 128 - first.code
        self._start()
        return 0

    def _next(self, seconds: float) -> _Ended | signal.Signals | None:
        with contextlib.suppress(queue.Empty):
            return self._events.get(timeout=seconds)
        return None

    def _start(self) -> None:
        launch = self._launch
        self._starts += 1
        self._processes = []
        with contextlib.ExitStack() as opened:
            store = None
            if launch.ranks > 1:
                store = opened.enter_context(socket.create_server((LOOPBACK, 0), backlog=launch.ranks))
            for rank in range(launch.ranks):
                process = self._start_rank(rank, store)
                self._processes.append(process)
                waiting = threading.Thread(target=self._wait, args=(self._starts, rank, process), daemon=True)
                waiting.start()
        self._started.set()

    def _start_rank(self, rank: int, store: socket.socket | None) -> subprocess.Popen[bytes]:
        launch, descriptors = self._launch, list[int]()
        environment = {**os.environ, **self._variables(rank)}
        if store is not None:
            environment["MASTER_PORT"] = str(store.getsockname()[1])
            if rank == 0:
                descriptors = [store.fileno()]
                environment[STORE_VARIABLE] = str(store.fileno())
        with contextlib.ExitStack() as opened:
            files: list[int | None] = [None, None]
            if rank not in launch.shown:
                files = [subprocess.DEVNULL, subprocess.DEVNULL]
            elif launch.tee:
                for number, target in enumerate((1, 2)):
                    path = self._folder / f"{self._starts}.{rank}.{target}"
                    files[number] = opened.enter_context(path.open("wb")).fileno()
                    self._printer.show(path, target, f"[{launch.role}{rank}]:")
            # A session of its own: what a terminal sends is for us.
            return subprocess.Popen(
                launch.command, env=environment, stdout=files[0], stderr=files[1], start_new_session=True,
                pass_fds=descriptors,
            )  # fmt: skip

    def _variables(self, rank: int) -> dict[str, str]:
        """What torchrun would put into a rank's environment."""
        ranks, role = str(self._launch.ranks), self._launch.role
        variables = {
            "LOCAL_RANK": str(rank), "RANK": str(rank), "ROLE_RANK": str(rank), "GROUP_RANK": "0", "ROLE_NAME": role,
            "LOCAL_WORLD_SIZE": ranks, "WORLD_SIZE": ranks, "ROLE_WORLD_SIZE": ranks, "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": LOOPBACK, "MASTER_PORT": "0",
            "TORCHELASTIC_RUN_ID": "one-machine",
            "TORCHELASTIC_RESTART_COUNT": str(self._starts - 1),
            "TORCHELASTIC_MAX_RESTARTS": str(self._launch.restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }  # fmt: skip
        if self._launch.ranks > 1:
            variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        return variables

    def _wait(self, start: int, rank: int, process: subprocess.Popen[bytes]) -> None:
        self._events.put(_Ended(start, rank, process.wait()))

    def _end(self, number: signal.Signals, seconds: float) -> signal.Signals | None:
        """Send this signal to the ranks that run, and kill them after so many seconds. A signal that we get meanwhile
        is passed on, and the last one is returned."""
        self._started.clear()
        self._send(number)
        deadline, received = time.monotonic() + seconds, None
        while any(process.poll() is None for process in self._processes) and time.monotonic() < deadline:
            event = self._next(TAIL_S)
            if isinstance(event, signal.Signals):
                received = event
                self._send(event)
        self._send(signal.SIGKILL)
        deadline = time.monotonic() + KILL_GRACE_S
        for process in self._processes:
            while process.poll() is None:
                if time.monotonic() >= deadline:
                    say(f"process {process.pid} outlived SIGKILL")
                    break
                time.sleep(TAIL_S)
        return received

    def _send(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)


@dataclass
class _Ended:
    """A rank has ended."""

    start: int
    """Of which start it was, from 1"""
    rank: int
    code: int


@dataclass
class _Output:
    """A file to which a rank prints."""

    path: Path
    target: int
    prefix: bytes
    read: int = 0
    rest: bytes = field(default=b"")


class _Printer:
    """Shows what ranks print to files, a line at a time. Use it as a context manager."""

    def __init__(self) -> None:
        self._outputs: list[_Output] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="output", daemon=True)

    def show(self, path: Path, target: int, prefix: str) -> None:
        """Show what comes to a file on the descriptor `target` of this process."""
        self._outputs.append(_Output(path, target, prefix.encode()))

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._ended.wait(TAIL_S):
            self._print()
        self._print(last=True)

    def _print(self, last: bool = False) -> None:
        for output in list(self._outputs):
            with output.path.open("rb") as file:
                file.seek(output.read)
                new = file.read()
            output.read += len(new)
            *lines, output.rest = (output.rest + new).split(b"\n")
            if last and output.rest:
                lines.append(output.rest)
            shown = b"".join(output.prefix + line + b"\n" for line in lines)
            with contextlib.suppress(OSError):  # the terminal may be gone
                while shown:
                    shown = shown[os.write(output.target, shown) :]


@contextlib.contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have `handler` take the signals that stop a run; under nohup SIGHUP stays ignored."""
    before = {}
    for number in STOP_SIGNALS:
        if not (number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN):
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _shutdown_s() -> float:
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_TIMEOUT_S))


def end_of(code: int) -> str:
    """Say how a process has ended, by Popen's returncode."""
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def say(text: str) -> None:
    """Print a line of the launcher's."""
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(2, f"[launch] {text}\n".encode())


def pass_on(running: Callable[[], Sequence[int]]) -> None:
    """From now on pass SIGUSR1 on to the ranks, from a thread. running() waits until there are some, so that a request
    that comes while they are started again is for those that come."""

    def work() -> None:
        while True:
            number = signal.sigwait({signal.SIGUSR1})
            for rank in running():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, number)

    threading.Thread(target=work, name="pass-on", daemon=True).start()
