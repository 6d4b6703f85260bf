"""One inference actor that we start ourselves: a process, its port and its log file."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import time
from asyncio.subprocess import DEVNULL, Process
from pathlib import Path

from torchtitan.config.job_config import JobConfig
from torchtitan.inference.client import TOKEN_VARIABLE, ActorError, base_url
from torchtitan.inference.cores import threads_per_actor
from torchtitan.inference.devices import engine_devices
from torchtitan.inference.engines import find_engine
from torchtitan.utils.subprocesses import helper_environment
from torchtitan.utils.timeline_files import actor_file

logger = logging.getLogger(__name__)

POLL_S = 0.05
TERMINATE_GRACE_S = 5.0
KILL_GRACE_S = 10.0
LOG_TAIL_BYTES = 1500


def actor_command(config: JobConfig, port_file: Path, number: int = 0) -> list[str]:
    """The command line of actor `number`, which reports its port in `port_file` and serves nothing before it got its
    first weights version. Raises UserError where it cannot be started here."""
    return find_engine(config.inference.backend).command(config, port_file, number)


class ActorProcess:
    """Starts and stops one actor. Belongs to one asyncio loop."""

    def __init__(self, name: str, config: JobConfig, token: str, run_dir: Path, number: int = 0):
        """`number` tells the started actors of a run apart, from 0."""
        self.name = name
        self._number = number
        self.log_file = run_dir / "logs" / f"{name}.log"
        self._activity_file = actor_file(run_dir, name)
        self._config = config
        self._token = token
        self._process: Process | None = None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> str:
        """Start the process; returns its URL once it listens.

        Raises:
            ActorError: it ended or did not listen within inference.startup_timeout_s.
        """
        await self.stop()
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        # Another name every time: an actor that outlived its trainer may still be about to write its port.
        port_file = self.log_file.with_name(f"{self.name}.{secrets.token_hex(4)}.port")
        extra = {TOKEN_VARIABLE: self._token, **engine_devices(self._config, self._number)}
        environment = helper_environment(threads_per_actor(self._config.inference), **extra)
        with self.log_file.open("ab") as log:
            # In a session of its own, so that Ctrl-C reaches the trainer alone, which then stops its actors in order.
            self._process = await asyncio.create_subprocess_exec(
                *actor_command(self._config, port_file, self._number), "--activity-file", str(self._activity_file),
                stdin=DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + self._config.inference.startup_timeout_s
        while time.monotonic() < deadline:
            if not self.alive:
                raise ActorError("startup", f"{self.describe_end()}; {self.log_file} ends with: {self._log_tail()}")
            if (port := _read_port(port_file)) is not None:
                port_file.unlink()
                return base_url(self._config.inference.host, port)
            await asyncio.sleep(POLL_S)
        await self.stop()
        limit = self._config.inference.startup_timeout_s
        raise ActorError("startup", f"not listening after inference.startup_timeout_s = {limit:g} s ({self.log_file})")

    async def wait(self) -> None:
        """Return when the process has ended (at once where there is none)."""
        if self._process is not None:
            await self._process.wait()

    def describe_end(self) -> str:
        code = self._process.returncode if self._process else None
        if code is not None and code < 0:
            return f"the process was killed by {signal.Signals(-code).name}"
        return f"the process ended with exit code {code}"

    async def stop(self, grace_s: float = TERMINATE_GRACE_S) -> None:
        """Terminate the process, and kill it where it has not gone after `grace_s` (a frozen one never does)."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        try:
            process.terminate()
            await asyncio.wait_for(process.wait(), grace_s)
        except ProcessLookupError:
            await process.wait()  # it went by itself just now
        except asyncio.TimeoutError:
            logger.warning("%s did not end within %g s after SIGTERM, killing it", self.name, grace_s)
            process.kill()
            await asyncio.wait_for(process.wait(), KILL_GRACE_S)

    def _log_tail(self) -> str:
        data = self.log_file.read_bytes()[-LOG_TAIL_BYTES:]
        return data.decode(errors="replace").strip() or "(nothing)"


def _read_port(port_file: Path) -> int | None:
    try:
        text = port_file.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None
    return int(text) if text.isdigit() else None
