"""A process that works for this one: its start, its log, the port that it reports, and its end.

A parent that is killed stops nothing: its children, and a launcher's ranks, end by themselves (end_with_parent).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import threading
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Literal, Protocol

import psutil

import torchtitan
from torchtitan.errors import UserError

logger = logging.getLogger(__name__)

POLL_S = 0.05
TERMINATE_GRACE_S = 5.0
KILL_GRACE_S = 10.0
LOG_TAIL_BYTES = 1500
# Of a log that is searched for the cause of a failure.
MAX_LOG_BYTES = 1 << 20
# What stands before the text of a line in the logs of vLLM's and SGLang's processes.
LOG_PREFIX = re.compile(r"^(\([^)]*\) )?((ERROR|CRITICAL) [\d-]+ [\d:]+ )?(\[[^\]]*\] )?")
# The last line of a traceback, or what a program says of its command line.
ERROR_LINE = re.compile(
    LOG_PREFIX.pattern + r"(?P<error>([\w.]*\.)?\w*(Error|Exception|Interrupt): .+|([\w./-]+: )?error: .+)$"
)
# An error that only says that there was another one.
CONSEQUENCE = re.compile(r"root cause|initialization failed", re.I)
VALIDATION = re.compile(r"validation errors? for \w+$")
# A child is not a rank: it must not find torchrun's rendezvous in its environment.
TORCHRUN_VARIABLES = (
    "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK",
    "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "WORLD_SIZE",
)  # fmt: skip
# Names one launch, over every restart of its ranks and every requeue of its job: what has started before goes on.
# A path is the link to its run folder itself.
LAUNCH_VARIABLE = "TORCHTITAN_LAUNCH"
# The process id of the launcher, for its ranks: they end with it.
LAUNCHER_VARIABLE = "TORCHTITAN_LAUNCHER"
# Which rank was lost, for those that are started again because of it.
LOSS_VARIABLE = "TORCHTITAN_LOST_RANK"
# The descriptor of the socket on which rank 0 of a run on one machine serves the ranks' store.
STORE_VARIABLE = "TORCHTITAN_STORE"
# The descriptor from which a process of ours reads its keys of the run (torchtitan/__init__.py).
KEYS_VARIABLE = "TORCHTITAN_KEYS"
# How the names of our programs begin.
OURS = "torchtitan."
# Environment variables that hold keys, by their names or as an address with a password.
SECRET_NAME = re.compile(
    r"(KEY|TOKEN|SECRET|PASSW(OR)?D|PASSPHRASE|CREDENTIAL)S?(_|$)"
    r"|(^|_)(PASS|AUTH|PAT|DSN)(_|$)|_PWD(_|$)|CONNECTION_STRING",
    re.I,
)
# Who checks the configuration downloads models of the Hub; the processes that it starts get folders.
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
SECRET_VALUE = re.compile(r"://[^/\s@]+@")
PARENT_CHECK_SECONDS = 1.0
# After SIGTERM the process ends by itself within this time, or is ended.
EXIT_SECONDS = 5.0
# The exit code of a process whose parent, which alone is told it, was another one and has ended before.
UNKNOWN_CODE = 1 << 16


class StarterLost(RuntimeError):
    """A process from which others are started has ended, or starts none."""


class Started(Protocol):
    """A process that was started, as asyncio's Process and fork_server.Fork are."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """None while it runs, -n if signal n has killed it"""

    async def wait(self) -> int:
        """Return its exit code when it has ended."""


class Starter(Protocol):
    """Starts processes from one that has loaded what they need (fork_server.ForkServer)."""

    async def start(self, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes] | None) -> Started:
        """Start what `command` (python -m MODULE …) says, in a session of its own. Raises StarterLost."""


def is_secret(name: str, value: str) -> bool:
    """Return whether an environment variable looks like a key."""
    return bool(SECRET_NAME.search(name) or SECRET_VALUE.search(value))


def is_run_key(name: str, value: str) -> bool:
    """Return whether an environment variable is a key of the run, and not one of the user."""
    return name.startswith("TORCHTITAN_") and is_secret(name, value)


@contextlib.contextmanager
def handed_over(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[tuple[dict[str, str], list[int]]]:
    """Yield the environment of a process without the run's keys, and the descriptors that it inherits: one of our
    programs (python -m torchtitan…) reads its keys from there, when it imports this package. Others get all keys in
    their environment.

    What a process began with is shown in /proc as long as it runs, to whatever else runs as this user.
    """
    keys = {name: value for name, value in environment.items() if is_run_key(name, value)}
    is_ours = len(command) > 2 and command[1] == "-m" and command[2].startswith(OURS)
    if not keys or not is_ours:
        yield dict(environment), []
        return
    reading, writing = os.pipe()
    try:
        with open(writing, "w", encoding="utf-8") as file:  # far less than a pipe holds
            json.dump(keys, file)
        plain = {name: value for name, value in environment.items() if name not in keys}
        yield {**plain, KEYS_VARIABLE: str(reading)}, [reading]
    finally:
        os.close(reading)


def child_environment(threads: int, *, secrets: Collection[str] | Literal[True] = (), **extra: str) -> dict[str, str]:
    """Return the environment of a process that works for this one: ours with our package importable and `threads`
    compute threads.

    secrets: names of variables with keys of the user that it needs, True for all of them but the Hub's. Keys of the
        run are in `extra`, or the process does not get them.
    """

    def needed(name: str, value: str) -> bool:
        if not is_secret(name, value):
            return True
        if secrets is True:
            return not name.startswith("TORCHTITAN_") and name not in HUB_TOKENS
        return name in secrets

    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in (*TORCHRUN_VARIABLES, LAUNCH_VARIABLE, LAUNCHER_VARIABLE, LOSS_VARIABLE, STORE_VARIABLE)
        and not name.startswith("TORCHELASTIC_")
        and needed(name, value)
    }
    packages = str(Path(torchtitan.__file__).parent.parent)
    existing = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{packages}{os.pathsep}{existing}" if existing else packages
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = str(threads)
    return {**environment, **extra}


class ChildProcess:
    """Starts and stops one process, again and again if need be. Belongs to one asyncio loop.

    Args:
        what: what messages call it, such as "the engine".
        log_file: what it prints is appended there; None: its errors go where ours go.
    """

    def __init__(self, what: str, log_file: Path | None = None):
        self._what, self.log_file = what, log_file
        self._process: Started | None = None
        self._group: int | None = None
        """Its process group, until that has been killed: later the number may be another's"""
        self._stopping = False
        self._log_begin = 0
        """Where what the last process has written begins in the log file"""

    @property
    def alive(self) -> bool:
        """Whether it runs, and has not been told to stop."""
        return self._process is not None and self._process.returncode is None and not self._stopping

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def launch(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        pipes: bool = False,
        files: Collection[int] = (),
        starter: Starter | None = None,
    ) -> None:
        """Start it, after its predecessor has been stopped.

        pipes: `streams` are its standard input and output, and `output`, not the log file, is what it prints.
        files: descriptors of open files that it inherits.
        starter: it comes from there; where that is lost, the log says so, and it is started like others.
        """
        await self.stop()
        with contextlib.ExitStack() as opened:
            log = None
            if self.log_file is not None and not pipes:
                self.log_file.parent.mkdir(parents=True, exist_ok=True)
                log = opened.enter_context(self.log_file.open("ab"))
                self._log_begin = log.tell()
            start = self._start(command, environment, log, pipes, files, starter)
            starting = asyncio.ensure_future(start)
            try:
                await asyncio.shield(starting)
            finally:
                # Also where we are cancelled: Python 3.12 waits for ever for a process whose start is broken off.
                self._process = await starting
                self._group, self._stopping = self._process.pid, False

    async def _start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: IO[bytes] | None,
        pipes: bool,
        files: Collection[int],
        starter: Starter | None,
    ) -> Started:
        if starter is not None:
            try:
                return await starter.start(command, environment, log)
            except StarterLost as error:
                logger.warning(
                    "%s does not come from the fork server (%s), and takes longer to start", self._what, error
                )
        # It leads a session of its own: Ctrl-C reaches us alone, and whatever it starts can be ended with it.
        output = PIPE if pipes else log
        with handed_over(command, environment) as (plain, keys):
            return await asyncio.create_subprocess_exec(
                *command, stdin=PIPE if pipes else DEVNULL, stdout=output, stderr=output,
                env=plain, start_new_session=True, pass_fds=(*files, *keys),
            )  # fmt: skip

    async def read_port(self, port_file: Path, deadline: float, limit: str = "in time") -> int:
        """The port that it writes to `port_file` once it listens; the file is removed.

        Args:
            deadline: on time.monotonic().
            limit: names the deadline in the message.

        Raises:
            UserError: it has ended, or did not listen in time. It is left to be stopped.
        """
        while self.alive:
            if (port := _read_number(port_file)) is not None:
                return port
            if time.monotonic() > deadline:
                raise UserError(f"{self._what} was not listening {limit}; {self.log_tail()}")
            await asyncio.sleep(POLL_S)
        raise UserError(self.describe_failure())

    @property
    def streams(self) -> tuple[asyncio.StreamWriter, asyncio.StreamReader]:
        """Its standard input and output. Raises ConnectionError where it has not been launched with pipes."""
        process = self._process
        if not isinstance(process, Process) or process.stdin is None or process.stdout is None:
            raise ConnectionError(f"{self._what} has no pipes")
        return process.stdin, process.stdout

    @property
    def output(self) -> asyncio.StreamReader:
        """Its standard error. Raises ConnectionError where it has not been launched with pipes."""
        process = self._process
        if not isinstance(process, Process) or process.stderr is None:
            raise ConnectionError(f"{self._what} has no pipes")
        return process.stderr

    async def wait(self) -> None:
        """Return when it has ended (at once where there is none); what it has left behind is killed."""
        if (process := self._process) is not None:
            await process.wait()
            self._kill_group(process)

    def end_code(self, wrapped: bool = False) -> int | None:
        """Return its exit code, or -n if signal n has killed it; None while it runs. wrapped: another process started
        it, whose exit code tells the signal that killed it."""
        code = None if self._process is None else self._process.returncode
        # What isolates a process ends with 128 + n where signal n has killed it, as shells do.
        if wrapped and code is not None and code - 128 in set(signal.Signals):
            return 128 - code
        return code

    def describe_end(self, wrapped: bool = False) -> str:
        """Return how it has ended; for `wrapped` see end_code."""
        code = self.end_code(wrapped)
        if code == UNKNOWN_CODE:
            return f"{self._what} ended; with which exit code is unknown, as the fork server had ended before it"
        if code is not None and code < 0:
            return f"{self._what} was killed by {signal.Signals(-code).name}"
        return f"{self._what} ended with exit code {code}"

    def log_tail(self) -> str:
        """What it said last, for messages."""
        if self.log_file is None:
            return "it has no log"
        tail = self._log()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return f"{self.log_file} ends with: {tail or '(nothing)'}"

    def describe_failure(self) -> str:
        """Return how it has ended, and the line in its log that says why, or else what it said last."""
        how, cause = self.describe_end(), self.find_cause()
        return f"{how}: {cause} (see {self.log_file})" if cause else f"{how}; {self.log_tail()}"

    def find_cause(self) -> str:
        """Return the line in its log that says why it has failed: the first error that it wrote since it was started,
        since later ones follow from that. Empty without such a line."""
        if self.log_file is None:
            return ""
        lines = self._log().decode(errors="replace").splitlines()
        for number, line in enumerate(lines):
            if (found := ERROR_LINE.match(line.strip())) is not None and not CONSEQUENCE.search(line):
                cause = found["error"]
                # The next line says which value is wrong.
                more = lines[number + 1 : number + 2] if VALIDATION.search(cause) else []
                cause_and_value = " ".join([cause, *(LOG_PREFIX.sub("", following.strip()) for following in more)])
                return cause_and_value.partition(" [type=")[0]
        return ""

    def _log(self) -> bytes:
        """The end of what the last process has written, at most MAX_LOG_BYTES."""
        assert self.log_file is not None
        with self.log_file.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(min(self._log_begin, end), end - MAX_LOG_BYTES))
            return file.read()

    async def stop(self, grace_s: float = TERMINATE_GRACE_S, kill_grace_s: float = KILL_GRACE_S) -> None:
        """Terminate it, and after `grace_s` (a frozen one never goes) kill it and every process that it has left.

        Waits another `kill_grace_s` at most; what is there still is said in the log.
        """
        process, self._stopping = self._process, True
        if process is None:
            return
        descendants = [] if process.returncode is not None else _descendants(process.pid)
        if process.returncode is None and grace_s > 0:
            with contextlib.suppress(ProcessLookupError):
                # Not process.terminate(): it takes the exit code of one that has just ended away from asyncio.
                os.kill(process.pid, signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), grace_s)
            except TimeoutError:
                logger.warning("%s did not end within %g s after SIGTERM, killing it", self._what, grace_s)
        self._kill_group(process)
        for descendant in descendants:  # some have left the group
            with contextlib.suppress(psutil.Error):
                descendant.kill()
        try:
            # This waits for the pipes too, and a process that has hidden from us may still hold them.
            await asyncio.wait_for(process.wait(), kill_grace_s)
        except TimeoutError:
            logger.warning("%s (%d), or a process that it has started, outlived SIGKILL", self._what, process.pid)
        finally:
            if isinstance(process, Process):
                # asyncio's Process has no public way to close its pipes while their loop still runs.
                process._transport.close()  # type: ignore[attr-defined]
            await asyncio.sleep(0)

    def _kill_group(self, process: Started) -> None:
        if self._group == process.pid:
            self._group = None
            # macOS says PermissionError of a group of zombies.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            for pid in psutil.pids():  # some have groups of their own in its session
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    if os.getsid(pid) == process.pid:
                        os.kill(pid, signal.SIGKILL)


def start_beside(
    command: Sequence[str], environment: Mapping[str, str], log_file: Path, files: Collection[int]
) -> subprocess.Popen[bytes]:
    """Start a process without an asyncio loop; end_process() ends it. It leads a session of its own, as signals to our
    process group are ours alone. What it prints is appended to `log_file`; it inherits the descriptors `files`."""
    with log_file.open("ab") as log, handed_over(command, environment) as (plain, keys):
        return subprocess.Popen(
            command, stdin=DEVNULL, stdout=log, stderr=log, env=plain, start_new_session=True, pass_fds=[*files, *keys]
        )


def end_process(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Terminate a process, and kill it after `grace_s`. May be called twice. One that outlives that, as in a call to a
    disk that hangs, is said in the log."""
    for end, seconds in ((process.terminate, grace_s), (process.kill, KILL_GRACE_S)):
        end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return
    logger.warning("process %d outlived SIGKILL", process.pid)


def _read_number(path: Path) -> int | None:
    """The number in a file, which is removed; None while it is not there."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None
    if not text.isdigit():
        return None
    path.unlink()
    return int(text)


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def end_with_parent(parent: int, whole_group: bool = False) -> None:
    """Watch a process from a thread; SIGTERM ourselves when it is gone, and end anyhow if that does not do.

    whole_group: this process leads a group of its own, all of which is killed then.
    """
    is_our_parent = os.getppid() == parent
    watched: psutil.Process | None = None
    with contextlib.suppress(psutil.NoSuchProcess):
        watched = psutil.Process(parent)

    def alive() -> bool:
        if is_our_parent:
            return os.getppid() == parent
        # A new process with its number has another time of creation.
        if watched is None or not watched.is_running():
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            return bool(watched.status() != psutil.STATUS_ZOMBIE)
        return False

    def watch() -> None:
        while alive():
            time.sleep(PARENT_CHECK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(EXIT_SECONDS)
        for descendant in _descendants(os.getpid()):  # they would wait for us to end before they do
            with contextlib.suppress(psutil.Error):
                descendant.kill()
        if whole_group and os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
