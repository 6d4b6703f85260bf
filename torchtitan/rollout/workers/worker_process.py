"""The parent's side of a process that runs other people's code: calls with deadlines, and limits."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torchtitan
from torchtitan.errors import UserError
from torchtitan.rollout.workers import isolation, usage
from torchtitan.rollout.workers.control_group import ControlGroup, make_control_group
from torchtitan.rollout.workers.inside import HEADER, OUTSIDE_SIGNALS, QUOTES, SETUP_BYTES, written
from torchtitan.rollout.workers.isolation import Isolation
from torchtitan.rollout.workers.port_forward import PortForward
from torchtitan.rollout.workers.replies import ReplyHead, check_reply
from torchtitan.rollout.workers.seen_files import SCRATCH, is_withheld
from torchtitan.utils.child_process import ChildProcess, child_environment, is_secret
from torchtitan.utils.machine import host_memory
from torchtitan.utils.reader_process import ReaderUnavailable
from torchtitan.utils.typed_json import Kind, Object, WrongForm, decode

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
MAX_START_ATTEMPTS = 3
STOP_TIMEOUT_S = 2.0
# Of what the user's code says is wrong.
MAX_ERROR_CHARACTERS = 4000
# The number of bytes of a process's output that are kept.
LOGGED_BYTES = 1 << 20
# A process and what it starts are killed when there are more of them (RLIMIT_NPROC does not hold for root), where each
# further call allows more, or when all together have more than this share of the memory.
MAX_PROCESSES = 512
PROCESSES_PER_CALL = 64
MEMORY_SHARE = 0.5
WATCH_INTERVAL_S = 0.5
# What a worker of agents has before an agent runs.
START_MEMORY_MB = 1024
# The number of times, and the seconds between them, that the removal of a control group is tried.
REMOVAL_ATTEMPTS, REMOVAL_INTERVAL_S = 20, 0.05
# A module, and a path, in an error.
MISSING_MODULE = re.compile(r"No module named '([A-Za-z_]\w*)")
PATH_IN_TEXT = re.compile(r"/[^\s'\":;,]+")
# Signs in errors of memory, threads, processes, files or disk that neighbours in the same process may have used up.
SIGNS_OF_LACK = ("MemoryError", "Errno 11]", "Errno 12]", "Errno 24]", "Errno 28]", "start new thread")
# What errors say that come from the isolation, and the key that helps.
CAUSES = {
    "isolate = false": ("Read-only file system", "No space left on device", "docker.sock", "NVIDIA driver", "CUDA",
                "No such file or directory: '/run/", "No such file or directory: '/tmp/"),
    "network = true": ("Network is unreachable", "name resolution", "Name or service not known", "Connect call failed",
                "Connection refused", "Cannot connect", "Connection error", "couldn't connect", "local cache"),
}  # fmt: skip


class CallFailed(Exception):
    """A call that failed. `kind` is timeout, crash or exception."""

    def __init__(self, kind: str, reason: str, in_flight: int = 0, caused: bool = False):
        """in_flight: calls, this one among them, that a process had when it ended (0: it had ended before). caused:
        whether nothing but this call can have made the code fail, or the process end."""
        super().__init__(reason)
        self.kind, self.in_flight, self.caused = kind, in_flight, caused
        self.where = ""
        """What the process was told to do"""
        self.reported, self.counted = False, False
        """Whether an event has told of its cause already, and whether it has been counted"""


@dataclass
class WorkerSettings:
    """What the processes of a pool have in common."""

    what: str
    """Their name in messages, such as "the reward worker" """
    module: str
    """Each runs `python -m module`"""
    setup: dict[str, Any]
    """Their first message, see workers/inside.py; the folders to import from are added"""
    log_file: Path | None
    """Their output is appended to it, up to a limit"""
    flooded: Callable[[], None]
    """Called once when the output of one exceeds that limit"""
    run_dir: Path | None
    """The run's folder, which isolated ones must not see"""
    visible: list[str]
    """Files and folders that they must be able to read"""
    secrets: list[str]
    """Names of environment variables with keys that they get"""
    isolation: Isolation | None
    """What isolates them; None for nothing"""
    table: str
    """Their table of the configuration, for messages"""
    python: str = sys.executable
    needs_gateway: bool = False
    """Those without a network get a way to the gateway"""
    memory_per_user_mb: int | None = None
    """How much memory a process and what it starts may take for each call in flight, beyond what it starts with; None
    where the process limits what it reserves itself"""
    keeps_processes: bool = False
    """Programs that they have started may stay between their calls"""
    restricted: bool = True
    """They give up keyrings and some system calls (restrictions.py)"""


@dataclass
class _Call:
    """A call that has had no reply."""

    kind: Any
    most_bytes: int
    future: asyncio.Future[Any]
    """What every reply has, and the reply where that has no error"""


class WorkerProcess:
    """A process that answers calls. Belongs to one asyncio loop.

    Any number of calls may be in flight. A call that misses its deadline does not stop the process, because its other
    calls may continue; the owner decides. If the process ends, all calls fail.
    """

    def __init__(self, settings: WorkerSettings):
        self._settings, isolation = settings, settings.isolation
        self._what = settings.what
        self._command = [settings.python, "-m", settings.module]
        if isolation is not None:
            needed: list[str | Path] = [
                *settings.visible,
                *_code_of(settings.setup),
                # An editable installation is in no folder of sys.path, this package's own neither.
                Path(torchtitan.__file__).parent.parent,
                *sys.path,
                *os.environ.get("PYTHONPATH", "").split(os.pathsep),
                Path.cwd(),
                sys.prefix,
                sys.base_prefix,
                Path(settings.python).parent.parent,
            ]
            hidden = [] if settings.run_dir is None else [settings.run_dir]
            self._command = [*isolation.command(needed, hidden), *self._command]
        shut_in = isolation is not None and not isolation.network
        self.forward = PortForward() if settings.needs_gateway and shut_in else None
        """Its way to the gateway, if it has no network"""
        self._process = ChildProcess(settings.what, settings.log_file)
        self._numbers = itertools.count()
        self._calls: dict[int, _Call] = {}
        """By their numbers, those that await a reply, and those that no longer do and have had none"""
        self._tasks: list[asyncio.Task[None]] = []
        self._reason = ""
        self.users = 0
        self.broken = False
        """Whether a call hangs in it, or it has ended"""
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._memory_limit = int(MEMORY_SHARE * host_memory().limit)
        self._group: ControlGroup | None = None
        self._started_with: set[int] = set()
        """Its processes when it was ready: they may stay between its calls"""
        self._withheld: list[str] = []
        self.about: dict[str, Any] = {}
        """Its reply to the set-up"""

    @property
    def alive(self) -> bool:
        return self._process.alive

    @property
    def bounds(self) -> str:
        """What bounds its memory and its processes, for messages."""
        if self._group is not None:
            return "bounded by a control group"
        return f"watched every {WATCH_INTERVAL_S:g} s, as no control group can be had here"

    async def start(self) -> None:
        """(Re)start the process. Raises UserError after MAX_START_ATTEMPTS, or if it cannot load its code."""
        environment = child_environment(threads=1, secrets=self._settings.secrets)
        variables = os.environ.items()
        self._withheld = [name for name, value in variables if is_secret(name, value) and name not in environment]
        reason = ""
        for _ in range(MAX_START_ATTEMPTS):
            await self.stop()
            self._reason = ""
            environment["TMPDIR"] = self._new_scratch()
            with contextlib.ExitStack() as files:
                setup, inherited = {"path": sys.path, **self._settings.setup}, []
                if self._settings.restricted:
                    setup["shared_memory_bytes"] = isolation.SCRATCH_BYTES
                if self.forward is not None:
                    program_end = files.enter_context(self.forward.new())
                    setup["forward"] = program_end.fileno()
                    inherited.append(program_end.fileno())
                self._group = make_control_group(self._memory_limit)
                command = self._command if self._group is None else [*self._group.command(), *self._command]
                await self._process.launch(command, environment, pipes=True, files=inherited)
            self._tasks = [asyncio.create_task(self._read_output())]
            try:
                reply = await asyncio.wait_for(self._introduce(setup), START_TIMEOUT_S)
                if self.forward is not None and "error" not in reply:
                    await self.forward.open()
            except TimeoutError:
                reason = f"not ready within {START_TIMEOUT_S:g} s"
            except (OSError, WrongForm, asyncio.IncompleteReadError) as error:
                await self._process.stop(grace_s=0, kill_grace_s=STOP_TIMEOUT_S)
                reason = str(error) if isinstance(error, WrongForm) else self._describe_end()
                await self.stop()
            except asyncio.CancelledError:
                await self.stop()  # nobody would read its replies
                raise
            else:
                if "error" in reply:
                    await self.stop()
                    raise UserError(f"{self._what} could not load its code: {self.explained(reply['error'])}")
                self.about = reply
                self._started_with = set(self._processes())
                self._tasks += [asyncio.create_task(self._read_replies()), asyncio.create_task(self._watch())]
                return
        where = f", see {self._settings.log_file}" if self._settings.log_file else ""
        raise UserError(f"{self._what} does not start ({MAX_START_ATTEMPTS} attempts, last: {reason}){where}")

    async def call(self, message: dict[str, Any], kind: type[Kind], timeout_s: float, most_bytes: int) -> Kind:
        """Send a message and return its reply, which is of this type and no longer than `most_bytes`.

        Raises CallFailed.
        """
        number = next(self._numbers)
        call = self._calls[number] = _Call(kind, most_bytes, asyncio.get_running_loop().create_future())
        try:
            self._send({**message, "id": number, "most_bytes": most_bytes})
            head, reply = await asyncio.wait_for(call.future, timeout_s)
        except TimeoutError:
            self.broken = True  # a hanging thread cannot be stopped
            raise CallFailed("timeout", f"{self._what} gave no answer within {timeout_s:g} s") from None
        except OSError as failure:
            self.broken = True
            reason = f"{self._what} has ended" if self.alive else self._describe_end()
            raise CallFailed("crash", reason) from failure
        if head.error is not None:
            reason = self.explained(head.error[:MAX_ERROR_CHARACTERS])
            others = head.killed or (self.users > 1 and _lacks_what_is_shared(reason))
            raise CallFailed("exception", reason, caused=not others)
        value: Kind = reply  # _take() has made it of this type
        return value

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message that has no reply; it is lost if the process has ended."""
        with contextlib.suppress(OSError):
            self._send(message)

    async def stop(self) -> None:
        """Kill the process and its children; none of them has state to save. Never takes long."""
        await self._process.stop(grace_s=0, kill_grace_s=STOP_TIMEOUT_S)
        if self._scratch is not None:
            await asyncio.to_thread(self._scratch.cleanup)
            self._scratch = None
        if self._group is not None:
            self._group.kill()
            await self._remove_group(self._group)
            self._group = None
        if self.forward is not None:
            await self.forward.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._fail_calls(f"{self._what} was stopped")

    def _send(self, message: dict[str, Any]) -> None:
        to_worker, _ = self._process.streams
        if to_worker.is_closing() or not self.alive:
            raise ConnectionError(f"{self._what} has ended")
        data = written(message)
        # No drain: the owner bounds the calls in flight, and a worker that does not read misses its deadline.
        to_worker.write(HEADER.pack(len(data)) + data)

    async def _introduce(self, setup: dict[str, Any]) -> dict[str, Any]:
        self._send(setup)
        return decode(Object, await self._receive(lambda: SETUP_BYTES), SETUP_BYTES)

    def _longest(self) -> int:
        """The longest reply that may come now. Where nothing is awaited, a message is one that nobody has asked for."""
        return max((call.most_bytes for call in self._calls.values()), default=0)

    async def _receive(self, longest: Callable[[], int]) -> bytes:
        _, from_worker = self._process.streams
        (length,) = HEADER.unpack(await from_worker.readexactly(HEADER.size))
        if length > (most := longest()):
            self._reason = f"{self._what} was stopped: it sent {length} bytes at once, {most} are allowed"
            raise ConnectionError(self._reason)
        return await from_worker.readexactly(length)

    async def _read_replies(self) -> None:
        try:
            while True:
                await self._take(await self._receive(self._longest))
        except (OSError, ValueError, ReaderUnavailable, asyncio.IncompleteReadError) as error:
            # The process has ended, or its output is corrupt, or cannot be read, and cannot be resynchronised.
            if isinstance(error, ReaderUnavailable):
                self._reason = f"{self._what} was stopped: nothing here reads its long reply ({error})"
            elif not isinstance(error, asyncio.IncompleteReadError | OSError):
                self._reason = f"{self._what} was stopped: it sent something that is not a reply ({error})"
            self.broken = True
            await self._process.stop(grace_s=0, kill_grace_s=STOP_TIMEOUT_S)
            self._fail_calls(self._describe_end())

    async def _take(self, data: bytes) -> None:
        """Hand a reply to its call. Raises WrongForm: it is none, or nobody has asked for it."""
        await check_reply(data)
        head = decode(ReplyHead, data, len(data))
        call = self._calls.get(head.id)
        if call is None or len(data) > call.most_bytes:
            what = "which nobody has asked for" if call is None else f"where {call.most_bytes} bytes are allowed"
            raise WrongForm(f"a reply of {len(data)} bytes to call {head.id}, {what}")
        reply = None if head.error is not None else decode(call.kind, data, len(data))
        del self._calls[head.id]
        if not call.future.done():
            call.future.set_result((head, reply))

    async def _watch(self) -> None:
        """Kill the process once it and what it has started take too much of the machine, and keep them from taking the
        processors from the trainer."""
        own_limit = self._memory_limit
        while self.alive and self._process.pid is not None:
            calls = max(1, self.users)
            allowed = MAX_PROCESSES + PROCESSES_PER_CALL * (calls - 1)
            limit = own_limit
            if self._settings.memory_per_user_mb is not None:
                limit = min(own_limit, (START_MEMORY_MB + calls * self._settings.memory_per_user_mb) << 20)
            # Hundreds of processes take a while to look at, which is none of the loop's.
            if excess := await asyncio.to_thread(self._excess, allowed, limit, 1 + calls):
                more = f"; {self._settings.table}.num_workers spreads calls over more workers" if self.users > 1 else ""
                self._reason = f"{self._what} was stopped: its processes were, or had, {excess}{more}"
                await self._process.stop(grace_s=0, kill_grace_s=STOP_TIMEOUT_S)
                return
            await asyncio.sleep(WATCH_INTERVAL_S)

    def _excess(self, allowed: int, memory_limit: int, running: int) -> str:
        """Return what its processes have too much of; empty if nothing. Then they are kept behind the trainer."""
        processes, group = self._processes(), self._group
        if len(processes) > allowed:
            return f"more than {allowed} processes"
        if usage.exceeds(processes, memory_limit):
            return f"more than {memory_limit >> 20} MiB of memory"
        usage.end_before_us(processes)
        if group is None or not group.shares_processors:
            usage.put_behind(processes, running)
        return ""

    def _processes(self) -> list[int]:
        return [] if self._process.pid is None else usage.descendants(self._process.pid, MAX_PROCESSES)

    def end_leftovers(self) -> None:
        """Kill what calls that are over have left behind in sessions of its own, as daemons are; what was there when
        the process was ready stays, and all that environments keep for their next episode."""
        if not self._settings.keeps_processes and self.alive and self._process.pid is not None:
            session = usage.session_of(self._process.pid)
            left = [pid for pid in self._processes() if pid not in self._started_with]
            usage.kill(pid for pid in left if usage.session_of(pid) not in (session, None))

    async def _remove_group(self, group: ControlGroup) -> None:
        for _ in range(REMOVAL_ATTEMPTS):
            if group.remove():
                return
            await asyncio.sleep(REMOVAL_INTERVAL_S)
        logger.warning("the control group of %s still has processes and stays", self._what)

    def _fail_calls(self, reason: str) -> None:
        waiting = [call.future for call in self._calls.values() if not call.future.done()]
        code = self._process.end_code(wrapped=self._settings.isolation is not None)
        # Where it was stopped for a limit, episodes without a call have had their share in that.
        by_others = self.users > 1
        if not self._reason:
            by_others = code is None or -code in OUTSIDE_SIGNALS
        for future in waiting:
            self.broken = True
            failure = CallFailed("crash", reason, in_flight=len(waiting), caused=len(waiting) == 1 and not by_others)
            future.set_exception(failure)
        self._calls.clear()

    def _describe_end(self) -> str:
        # An exit code does not tell: what isolates it has one of its own where the kernel kills it for its memory.
        if not self._reason and self._group is not None and self._group.killed_for_memory:
            self._reason = (
                f"{self._what} was stopped: its processes had more than {self._memory_limit >> 20} MiB of memory"
            )
        return self._reason or self._process.describe_end(wrapped=self._settings.isolation is not None)

    def _new_scratch(self) -> str:
        """Return the folder for its temporary files, which ends with it."""
        if self._settings.isolation is not None:
            return SCRATCH[0]
        self._scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        return self._scratch.name

    def explained(self, error: str) -> str:
        """Return an error of the user's code, with the key that helps if what the process lacks may have caused it."""
        sandbox, isolation = f"{self._settings.table}.sandbox", self._settings.isolation
        missing = [name for name in self._withheld if name in error]
        if missing:
            return f"{error} (keys are withheld: {sandbox}.variables = {json.dumps(missing)} would change that)"
        if isolation is None:
            return error
        # What a program printed may say anything.
        message = error.partition(QUOTES)[0]
        if str(Path.cwd()) in SCRATCH and any(cause in message for cause in ("No module named", "No such file")):
            return f"{error} (it is isolated and cannot see the working folder {Path.cwd()}: start in another one)"
        if (module := MISSING_MODULE.search(message)) and _find(module[1]) is not None:
            return f"{error} (it is isolated: {sandbox}.readable would show it the folder in which that module lies)"
        withheld = list(filter(is_withheld, PATH_IN_TEXT.findall(message)))
        if withheld:
            key = f"{sandbox}.readable = {json.dumps(withheld[:1])}"
            return f"{error} (it is isolated and sees little of the home folder: {key} would show it that)"
        for setting, causes in CAUSES.items():
            already_set = isolation.network and "network" in setting
            if not already_set and any(cause in message for cause in causes):
                return f"{error} (it is isolated: {sandbox}.{setting} would change that)"
        return error

    async def _read_output(self) -> None:
        """Keep the beginning of the output; the rest must not fill the disk."""
        output = self._process.output
        left, log_file = LOGGED_BYTES, self._settings.log_file
        while data := await output.read(1 << 16):
            if log_file is None:
                sys.stderr.buffer.write(data[:left])
            else:
                with log_file.open("ab") as log:
                    log.write(data[:left])
            if left > 0 >= left - len(data):
                self._settings.flooded()
            left = max(0, left - len(data))


def _lacks_what_is_shared(error: str) -> bool:
    """Whether an error says that the process had no more of what all its episodes share."""
    return any(sign in error for sign in SIGNS_OF_LACK)


def _code_of(setup: Mapping[str, Any]) -> Iterator[Path]:
    """Yield where the user's code lies that a set-up names: an editable installation is in no folder of sys.path."""
    names = [*setup.get("functions", ()), *setup.get("tools", ()), setup.get("factory"), setup.get("agent")]
    for name in names:
        package = str(name or "").partition(":")[0].partition(".")[0]
        spec = _find(package) if package.isidentifier() else None
        if spec is not None and spec.submodule_search_locations:
            yield from map(Path, spec.submodule_search_locations)
        elif spec is not None and spec.has_location and spec.origin:
            yield Path(spec.origin)


def _find(package: str) -> ModuleSpec | None:
    """Return where Python finds a package here; None where it does not."""
    try:
        return importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
