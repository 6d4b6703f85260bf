"""The engine's server as the agent's child: a process group of its own that ends with the agent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping
from pathlib import Path

import psutil

from torchtitan.errors import UserError
from torchtitan.inference.agent.control import EngineControl, EngineError
from torchtitan.inference.client import base_url
from torchtitan.utils.child_process import child_environment

logger = logging.getLogger(__name__)

POLL_S = 0.1
PROBE_S = 5.0
LOG_TAIL_BYTES = 1500
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class EngineProcess:
    """Starts and stops one engine. Belongs to one asyncio loop.

    Args:
        command: line that starts it; it writes its port to `port_file`.
        environment: what it has beside ours.
        log_file: gets what it says.
    """

    def __init__(
        self, command: list[str], environment: Mapping[str, str], threads: int, port_file: Path, log_file: Path
    ):
        self._command, self._port_file, self.log_file = command, port_file, log_file
        self._environment = child_environment(threads, **environment)
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self, host: str, deadline: float) -> str:
        """Start it; returns its URL once it listens. `deadline` is on time.monotonic(). Raises UserError."""
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        print(f"engine: {shlex.join(self._command)}", flush=True)
        with self.log_file.open("ab") as log:
            # A group of its own: the engine's processes end together, and Ctrl-C reaches the agent alone.
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=DEVNULL, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )
        while time.monotonic() < deadline:
            if self._process.returncode is not None:
                raise UserError(f"{self.describe_end()}; {self.log_file} ends with: {self.log_tail()}")
            with contextlib.suppress(FileNotFoundError):
                text = self._port_file.read_text(encoding="ascii").strip()
                if text.isdigit():
                    self._port_file.unlink()
                    return base_url(WILDCARDS.get(host, host), int(text))
            await asyncio.sleep(POLL_S)
        raise UserError(f"the engine was not listening in time; {self.log_file} ends with: {self.log_tail()}")

    async def wait(self) -> str:
        """Return when it has ended, with how."""
        assert self._process is not None
        await self._process.wait()
        return f"{self.describe_end()}; {self.log_file} ends with: {self.log_tail()}"

    def describe_end(self) -> str:
        code = None if self._process is None else self._process.returncode
        if code is not None and code < 0:
            return f"the engine was killed by {signal.Signals(-code).name}"
        return f"the engine ended with exit code {code}"

    async def stop(self, grace_s: float) -> None:
        """Terminate it, and kill all of its processes that are left after `grace_s`."""
        process = self._process
        if process is None:
            return
        children = _children(process.pid)
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for child in children:
            # Those that have left the group.
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        await asyncio.wait_for(process.wait(), grace_s)

    def log_tail(self) -> str:
        """What it said last."""
        data = self.log_file.read_bytes()[-LOG_TAIL_BYTES:]
        return data.decode(errors="replace").strip() or "(nothing)"


async def wait_until_healthy(control: EngineControl, deadline: float) -> None:
    """Return when the engine answers. Raises UserError where it has not by `deadline` (time.monotonic())."""
    while True:
        try:
            await asyncio.to_thread(control.check_health, PROBE_S)
            return
        except EngineError as error:
            if time.monotonic() > deadline:
                raise UserError(f"the engine does not answer: {error}") from error
        await asyncio.sleep(POLL_S)


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
