"""A process that has loaded what others need, and of which they are forks: they start in a fraction of a second, and
share the memory of what is loaded.

    python -m torchtitan.utils.fork_server DESCRIPTOR

The fork server is started by exec, never by a fork of this process, which has threads, tensors and perhaps a GPU. It
has one thread, computes nothing, knows nothing of this process's `__main__`, and ends with this process. Its children
have sessions, logs, environments, seeds and exit codes of their own. They outlive it, if it is killed.

What comes to a child in its environment is seen by the child alone: /proc shows with which environment the fork server
began, and that has none of the run's keys.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import gc
import importlib
import json
import os
import random
import re
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil

from torchtitan.utils.child_process import (
    KILL_GRACE_S,
    PARENT_CHECK_SECONDS,
    UNKNOWN_CODE,
    StarterLost,
    is_run_key,
)
from torchtitan.utils.machine import leave, sleep_between_regions, without_collector

# Of a new child, which also waits for the fork server to have loaded everything.
START_TIMEOUT_S = 120.0
# A request is on its way when the fork server is told of it.
REQUEST_TIMEOUT_S = 10.0
POLL_S = 0.1
LENGTH = struct.Struct("!I")
# Variables that libraries read when they are loaded: in these, children are like the fork server. MKL reads MKL_CBWR,
# and NCCL all of its own, when they first work.
READ_AT_LOAD = re.compile(
    r"PYTHON|LD_|DYLD_|MALLOC_|GLIBC_|OMP_|GOMP_|KMP_|MKL_(?!CBWR)|DNNL_|ONEDNN_|OPENBLAS_|BLIS_|NPY_|NUMEXPR_|CUDA_"
    r"|HIP_|HF_|PYTORCH_|ATEN_|TORCH_(?!NCCL_)|TORCHINDUCTOR_|TRANSFORMERS_|AIOHTTP_|(PATH|HOME|LANG|LC_\w+|TZ|TMPDIR)$"
)
# Room for a child's command line, as `ps` shows it, in that of the fork server. Linux shows no more of one.
TITLE_BYTES = 4000


class Fork:
    """A child of the fork server, like asyncio's Process. Belongs to one asyncio loop."""

    def __init__(self, pid: int, channel: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.pid = pid
        self.returncode: int | None = None
        """UNKNOWN_CODE where the fork server ended before this child did"""
        self._writer = writer
        self._watch = asyncio.ensure_future(self._wait(channel))

    async def wait(self) -> int:
        """Return its exit code when it has ended, -n if signal n has killed it."""
        return await asyncio.shield(self._watch)

    async def _wait(self, channel: asyncio.StreamReader) -> int:
        try:
            line = await channel.readline()
        except ConnectionError:
            line = b""
        if line.endswith(b"\n"):
            self.returncode = int(line)
        else:
            while _runs(self.pid):  # noqa: ASYNC110 — another process's end is no event of this loop
                await asyncio.sleep(POLL_S)
            self.returncode = UNKNOWN_CODE
        self._writer.close()
        return self.returncode


class ForkServer:
    """Starts the fork server, and children from it. Any thread and any asyncio loop may call `start`.

    Args:
        modules: what it loads.
        environment: its own, for which the run's keys are taken out. See READ_AT_LOAD for what children share of it.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]):
        self._environment = _loading(environment)
        parent_end, child_end = socket.socketpair()
        with child_end:
            command = [sys.executable, "-m", __spec__.name, str(child_end.fileno()), " " * TITLE_BYTES]
            # numpy's threads are started when it is loaded, and a process with threads must not be forked.
            server_environment = {name: value for name, value in environment.items() if not is_run_key(name, value)}
            self._process = subprocess.Popen(
                command, env={**server_environment, "OPENBLAS_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
                start_new_session=True, pass_fds=[child_end.fileno()],
            )  # fmt: skip
        names = json.dumps(list(modules)).encode()
        parent_end.sendall(LENGTH.pack(len(names)) + names)
        self._control = parent_end
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        with self._lock:
            return self._process.poll() is None

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether a child with this environment is what a new process with it would be."""
        return self._environment == _loading(environment)

    async def start(self, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes] | None) -> Fork:
        """Start a child that does what `command` (python -m MODULE …) would do. What it prints goes to `log`, or where
        the fork server's errors go.

        Raises:
            StarterLost: there is no fork server any more, or it starts nothing in time. It has been ended then.
        """
        parent_end, child_end = socket.socketpair()
        with child_end:
            request = json.dumps({"command": list(command), "environment": dict(environment)}).encode()
            reader, writer = await asyncio.open_connection(sock=parent_end)
            writer.write(LENGTH.pack(len(request)) + request)
            try:
                self._hand_over(child_end, log)
            except OSError as error:
                writer.close()
                self.close()
                raise StarterLost(str(error)) from error
        try:
            line = await asyncio.wait_for(reader.readline(), START_TIMEOUT_S)
        except TimeoutError:
            line = f"nothing within {START_TIMEOUT_S:g} s".encode()
        except OSError:
            line = b""
        if line.startswith(b"pid "):
            return Fork(int(line.split()[1]), reader, writer)
        writer.close()
        self.close()
        raise StarterLost(f"it answers: {line.decode().strip()}" if line else "it has ended")

    def _hand_over(self, channel: socket.socket, log: IO[bytes] | None) -> None:
        """Give the fork server the channel of a new child, and its log. Raises OSError."""
        files = [channel.fileno(), *([] if log is None else [log.fileno()])]
        with self._lock:
            self._control.setblocking(False)
            self._control.sendmsg([b"+"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])

    def close(self) -> None:
        """End the fork server; its children live on. May be called again."""
        with self._lock:
            self._control.close()
            self._process.kill()
            self._process.wait(KILL_GRACE_S)


def _loading(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if READ_AT_LOAD.match(name)}


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# The fork server


class _Server:
    """Forks children on request, and tells how they end."""

    def __init__(self, control: socket.socket):
        self._control = control
        self._channels: dict[int, socket.socket] = {}
        """Of each child that runs, by its process id"""
        self._ended, wakes = socket.socketpair()
        self._ended.setblocking(False)
        wakes.setblocking(False)
        self._wakes = wakes
        self._selector = selectors.DefaultSelector()
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        """Work until the parent has gone."""
        parent = os.getppid()
        for source in (self._control, self._ended):
            self._selector.register(source, selectors.EVENT_READ)
        # A fork of the parent may hold the other end of the socket longer than the parent lives.
        while os.getppid() == parent:
            ready = [key.fileobj for key, _ in self._selector.select(PARENT_CHECK_SECONDS)]
            if self._ended in ready:
                with contextlib.suppress(BlockingIOError):
                    self._ended.recv(4096)
                self._reap()
            if self._control in ready and not self._take():
                return

    def _take(self) -> bool:
        """Take one request; False where none will come any more."""
        word, descriptors, _, _ = socket.recv_fds(self._control, 1, 2)
        if not word:
            return False
        channel = socket.socket(fileno=descriptors[0])
        channel.settimeout(REQUEST_TIMEOUT_S)
        log = descriptors[1] if len(descriptors) > 1 else None
        try:
            (size,) = LENGTH.unpack(_read(channel, LENGTH.size))
            request = json.loads(_read(channel, size))
        except OSError as error:
            print(f"fork server: a request was broken off ({error})", file=sys.stderr, flush=True)
            channel.close()
        else:
            self._fork(request, channel, log)
        if log is not None:
            os.close(log)
        return True

    def _fork(self, request: Mapping[str, Any], channel: socket.socket, log: int | None) -> None:
        pid = os.fork()
        if not pid:
            self._become(request, channel, log)
        self._channels[pid] = channel

    def _become(self, request: Mapping[str, Any], channel: socket.socket, log: int | None) -> NoReturn:
        """In the child: do what the command says, and end."""
        code = 1
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if log is not None:
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.close(log)
            self._selector.close()
            for inherited in (self._control, self._ended, self._wakes, *self._channels.values()):
                inherited.close()
            os.environ.clear()
            os.environ.update(request["environment"])
            _seed()
            _set_title(request["command"])
            channel.sendall(b"pid %d\n" % os.getpid())
            channel.close()
            gc.enable()
            sys.argv = request["command"][2:]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as end:
            code = _code_of(end)
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        except BaseException:
            sys.excepthook(*sys.exc_info())
        leave(code)

    def _reap(self) -> None:
        while self._channels:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            channel = self._channels.pop(pid)
            with contextlib.suppress(OSError):  # nobody may wait for it any more
                channel.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
            channel.close()


def _read(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = source.recv(size - len(data))
        if not piece:
            raise ConnectionError("its end was closed")
        data += piece
    return data


def _seed() -> None:
    """Seed what a new process seeds anew, and a fork has from its parent. Python's own random does so by itself."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(random.SystemRandom().getrandbits(32))


def _code_of(end: SystemExit) -> int:
    """The exit code that the interpreter makes of it."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _set_title(command: Sequence[str]) -> None:
    """Show `command` instead of the fork server's in `ps` (Linux; elsewhere it keeps that of the fork server)."""
    import ctypes

    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        begin, end = int(fields[45]), int(fields[46])
    except (OSError, ValueError, IndexError):
        return
    title = os.fsencode(" ".join(command))
    if not begin or end - begin < 2:
        return
    # A last byte that is not zero tells the system that the text ends at the first zero.
    shown = title[: end - begin - 2]
    ctypes.memmove(begin, shown.ljust(end - begin - 1, b"\0") + b".", end - begin)


def main(descriptor: int) -> int:
    """Load what the parent names, and fork children until it has gone; returns the exit code."""
    # A child's session is its own, and so is what a terminal sends.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.set_inheritable(descriptor, False)
    _set_title([sys.executable, "-m", __spec__.name, str(descriptor)])
    sleep_between_regions()
    control = socket.socket(fileno=descriptor)
    modules = json.loads(_read(control, *LENGTH.unpack(_read(control, LENGTH.size))))
    with without_collector():
        for module in modules:
            importlib.import_module(module)
    threads = threading.active_count()
    if Path("/proc/self/task").is_dir():
        threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        problem = f"fork server: {', '.join(modules)} started {threads - 1} threads when loaded, so it must not fork"
        print(problem, file=sys.stderr, flush=True)
        return 1
    # What is there now is never collected: looking at it would copy its pages into each child.
    gc.collect()
    gc.disable()
    gc.freeze()
    _Server(control).run()
    return 0


if __name__ == "__main__":
    leave(main(int(sys.argv[1])))
