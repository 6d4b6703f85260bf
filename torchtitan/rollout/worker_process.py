"""The parent's side of a process that runs the user's code (rewards, environments, agents): calls with deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torchtitan.errors import UserError
from torchtitan.rollout.inside_worker import HEADER
from torchtitan.utils.child_process import ChildProcess, child_environment

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
MAX_START_ATTEMPTS = 3
STOP_TIMEOUT_S = 2.0
# A longer message is a mistake or an attack on our memory.
MAX_MESSAGE_BYTES = 1 << 26
# The number of bytes of a process's output that are kept.
LOGGED_BYTES = 1 << 20


class CallFailed(Exception):
    """A call that failed. `kind` is timeout, crash or exception."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


class WorkerProcess:
    """Runs `python -m module`, set up with `setup`. Belongs to one asyncio loop.

    Any number of calls may be in flight. A call that misses its deadline does not stop the process, because its other
    calls may continue; the owner decides. If the process ends, all calls fail.

    Args:
        what: the process's name in messages, such as "the reward worker".
        setup: the first message, see inside_worker.py; the folders to import from are added.
        log_file: the process's output is appended to it, up to a limit.
        flooded: called once when the output exceeds that limit.
        python: the interpreter that runs it, by default ours.
        isolated_by: the command prefix that isolates it (rewards/isolation.py).
    """

    def __init__(
        self,
        what: str,
        module: str,
        setup: dict[str, Any],
        log_file: Path | None = None,
        flooded: Callable[[], None] = lambda: None,
        python: str | None = None,
        isolated_by: Sequence[str] = (),
    ):
        self._command = [*isolated_by, python or sys.executable, "-m", module]
        self._what, self._log_file, self._flooded = what, log_file, flooded
        self._setup = {"path": sys.path, **setup}
        self._process = ChildProcess(what, log_file)
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._readers: list[asyncio.Task[None]] = []
        self.about: dict[str, Any] = {}
        """Its reply to the set-up"""
        self.starts = 0
        """How often it was started"""

    @property
    def alive(self) -> bool:
        return self._process.alive

    async def start(self) -> None:
        """(Re)start the process. Raises UserError after MAX_START_ATTEMPTS, or if it cannot load its code."""
        reason = ""
        for _ in range(MAX_START_ATTEMPTS):
            await self.stop()
            self.starts += 1
            await self._process.launch(self._command, child_environment(threads=1), pipes=True)
            self._readers = [asyncio.create_task(self._read_output())]
            try:
                reply = await asyncio.wait_for(self._introduce(), START_TIMEOUT_S)
            except asyncio.TimeoutError:
                reason = f"not ready within {START_TIMEOUT_S:g} s"
            except (OSError, asyncio.IncompleteReadError):
                await self.stop()
                reason = self._process.describe_end()
            else:
                if "error" in reply:
                    await self.stop()
                    raise UserError(f"{self._what} could not load its code: {reply['error']}")
                self.about = reply
                self._readers.append(asyncio.create_task(self._read_replies()))
                return
        where = f", see {self._log_file}" if self._log_file else ""
        raise UserError(f"{self._what} does not start ({MAX_START_ATTEMPTS} attempts, last: {reason}){where}")

    async def call(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a message and return its reply. Raises CallFailed."""
        number = next(self._numbers)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({**message, "id": number})
            reply = await asyncio.wait_for(future, timeout_s)
        except asyncio.TimeoutError:
            raise CallFailed("timeout", f"no answer within {timeout_s:g} s") from None
        except OSError as error:
            reason = f"{self._what} has ended" if self.alive else self._process.describe_end()
            raise CallFailed("crash", reason) from error
        finally:
            self._calls.pop(number, None)
        if "error" in reply:
            raise CallFailed("exception", reply["error"])
        return reply

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message that has no reply; it is lost if the process has ended."""
        with contextlib.suppress(OSError):
            self._send(message)

    async def stop(self) -> None:
        """Kill the process and its children; none of them has state to save. Never takes long."""
        await self._process.stop(grace_s=0, kill_grace_s=STOP_TIMEOUT_S)
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        self._readers = []
        self._fail_calls(f"{self._what} was stopped")

    def _send(self, message: dict[str, Any]) -> None:
        to_worker, _ = self._process.streams
        if to_worker.is_closing() or not self.alive:
            raise ConnectionError(f"{self._what} has ended")
        data = json.dumps(message, default=str).encode()
        # No drain: the owner bounds the calls in flight, and a worker that does not read misses its deadline.
        to_worker.write(HEADER.pack(len(data)) + data)

    async def _introduce(self) -> dict[str, Any]:
        self._send(self._setup)
        return await self._receive()

    async def _receive(self) -> dict[str, Any]:
        _, from_worker = self._process.streams
        (length,) = HEADER.unpack(await from_worker.readexactly(HEADER.size))
        if length > MAX_MESSAGE_BYTES:
            raise ConnectionError(f"{self._what} sent {length} bytes at once")
        return json.loads(await from_worker.readexactly(length))

    async def _read_replies(self) -> None:
        try:
            while True:
                reply = await self._receive()
                future = self._calls.get(reply.pop("id"))
                if future is not None and not future.done():
                    future.set_result(reply)
        except (OSError, ValueError, KeyError, asyncio.IncompleteReadError) as error:
            # The process has ended, or its output is corrupt and cannot be resynchronised.
            await self._process.stop(grace_s=0, kill_grace_s=STOP_TIMEOUT_S)
            reason = self._process.describe_end()
            self._fail_calls(reason if isinstance(error, asyncio.IncompleteReadError | OSError) else repr(error))

    def _fail_calls(self, reason: str) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(CallFailed("crash", reason))

    async def _read_output(self) -> None:
        """Keep the beginning of the output; the rest must not fill the disk."""
        output = self._process.output
        left = LOGGED_BYTES
        while data := await output.read(1 << 16):
            if self._log_file is None:
                sys.stderr.buffer.write(data[:left])
            else:
                with self._log_file.open("ab") as log:
                    log.write(data[:left])
            if left > 0 >= left - len(data):
                self._flooded()
            left = max(0, left - len(data))


async def start_all(workers: Iterable[WorkerProcess]) -> None:
    """Start workers concurrently. Raises the first worker's error only once no start is in progress, so that the owner
    may then stop them."""
    for outcome in await asyncio.gather(*(worker.start() for worker in workers), return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
