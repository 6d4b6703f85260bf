"""Environments and agents in worker processes: a hang, a crash or a memory bomb costs an episode, never the run."""

from __future__ import annotations

import asyncio
import itertools
import logging
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.config.job_config import JobConfig
from torchtitan.inference.agent.client import find_python
from torchtitan.rollout.gateway.process import SessionAccess
from torchtitan.rollout.tool_calls import find_format
from torchtitan.rollout.workers.door import Door
from torchtitan.rollout.workers.isolation import find_isolation
from torchtitan.rollout.workers.process import CallFailed, WorkerProcess, start_all
from torchtitan.utils.json_lines import EventLog

logger = logging.getLogger(__name__)

# No token has more characters than this; it bounds the length of observations that can fit into a completion.
MAX_TOKEN_CHARACTERS = 128
# The deadline for close() of all instances of a worker, at the end of the run.
CLOSE_TIMEOUT_S = 5.0
# Only this many failures are written as events; all are counted.
FAILURE_EVENTS = 20


@dataclass
class Reply:
    """An environment's reply to a turn."""

    messages: list[dict[str, Any]]
    """Messages for the policy: an observation, or the results of its tool calls"""
    reward: float
    done: bool
    calls: list[dict[str, Any]]
    errors: int
    """Number of tool calls that failed"""


@dataclass
class Outcome:
    """The outcome of an episode, as its environment reports it."""

    reward: float | None
    attributes: dict[str, Any]
    """The environment's public attributes that JSON can represent"""


class _Host:
    """A worker process with the number of its episodes."""

    def __init__(self, process: WorkerProcess):
        self.process = process
        self.episodes = 0
        self.broken = False
        """Whether something hangs in it, or it has ended; it then gets no new episode and stops after its last one"""
        self.end_told = False
        """Whether an event has reported its end; its other episodes then need no events of their own"""


class EnvironmentPool:
    """Runs the environment or tools from [environment]. All methods belong to one asyncio loop.

    `statistics` counts failures (also by kind), tool calls, and errors that tools returned to the policy.
    """

    module, what = "worker", "the environment worker"
    _python: str | None = None
    """The interpreter that runs the workers, if not ours"""

    def __init__(
        self,
        config: JobConfig,
        events: EventLog,
        log_file: Path | None = None,
        template: str = "",
        run_dir: Path | None = None,
    ):
        """template: the chat template, which shows how tool calls are written; run_dir: the run's folder, which
        isolated programs do not see.

        Raises UserError if environment.isolate = true is not possible here.
        """
        self._config, self._events, self._log_file, self._run_dir = config.environment, events, log_file, run_dir
        self._isolation, self._shut_in = find_isolation(self._config.isolate, self._config.network)
        self._visible: list[str] = []
        self.tool_format = find_format(self._config.tool_parser, template)
        self._setup = {
            "factory": self._config.factory,
            "tools": self._config.tools,
            "parser": self.tool_format,
            "longest": MAX_TOKEN_CHARACTERS * config.rollout.max_completion_tokens + 1,
            "memory_limit_mb": self._config.memory_limit_mb,
        }
        self._hosts: list[_Host] = []
        self._retired: set[_Host] = set()
        self._placing = asyncio.Lock()
        self._numbers, self._told = itertools.count(), 0
        self.statistics: Counter[str] = Counter(
            dict.fromkeys(("failures", "timeouts", "crashes", "exceptions", "tool_calls", "tool_errors"), 0)
        )
        self.tools: list[dict[str, Any]] = []
        """JSON schemas of the tools, for the chat template"""
        self.start_timeout_s, self.step_timeout_s = self._config.start_timeout_s, self._config.step_timeout_s

    async def start(self) -> None:
        """Start all workers. Raises UserError if one cannot start, or if its program is not an environment."""
        self._hosts = [self._new_host() for _ in range(self._config.num_workers)]
        await start_all(host.process for host in self._hosts)
        self.tools = self._hosts[0].process.about.get("tools", [])
        logger.info("%ss are %s", self.what, self._shut_in)

    async def close(self) -> None:
        """Stop all workers, after closing their instances within a deadline."""
        await asyncio.gather(*(self._stop(host) for host in [*self._hosts, *self._retired]))

    async def _stop(self, host: _Host) -> None:
        try:
            if self._config.factory and host.process.alive and not host.broken:
                await host.process.call({"do": "close", "episode": -1}, CLOSE_TIMEOUT_S)
        except CallFailed as failure:
            logger.warning("environments were not closed before their worker ended: %s", failure)
        finally:
            await host.process.stop()

    async def episode(self) -> Episode:
        """Return an environment for one episode, on the least loaded worker. Raises UserError if no worker starts."""
        async with self._placing:
            for place, host in enumerate(self._hosts):
                if host.broken or not host.process.alive:
                    self._retired.add(host)
                    self._hosts[place] = self._new_host()
                    await self._let_go(host)
                    await self._hosts[place].process.start()
            host = min(self._hosts, key=lambda one: one.episodes)
            host.episodes += 1
        return Episode(self, host, next(self._numbers))

    def _new_host(self) -> _Host:
        module = f"torchtitan.rollout.environments.{self.module}"
        process = WorkerProcess(
            self.what, module, self._setup, self._log_file, self._flooded, self._python, self._isolation,
            self._visible, self._run_dir, self._config.variables, door=self._new_door(),
        )  # fmt: skip
        return _Host(process)

    def _new_door(self) -> Door | None:
        return None

    async def call(self, host: _Host, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Call a worker for an episode. Raises CallFailed, after counting and reporting it."""
        try:
            return await host.process.call(message, timeout_s)
        except CallFailed as failure:
            self.statistics["failures"] += 1
            self.statistics[{"timeout": "timeouts", "crash": "crashes"}.get(failure.kind, "exceptions")] += 1
            # A hanging thread cannot be stopped, so its process gets no new episode.
            host.broken = host.broken or failure.kind != "exception"
            if not host.end_told and self._told < FAILURE_EVENTS:
                what = {"what": failure.kind, "in": message["do"], "reason": str(failure)}
                self._events.write("environment_failed", level=logging.WARNING, **what)
                self._told += 1
            host.end_told = host.end_told or failure.kind == "crash"
            raise

    async def release(self, host: _Host, episode: int, finished: bool) -> None:
        """End an episode; the environment is reused if the episode finished properly."""
        if not finished:
            host.process.tell({"do": "drop", "episode": episode})
        host.episodes -= 1
        await self._let_go(host)

    async def _let_go(self, host: _Host) -> None:
        if host in self._retired and not host.episodes:
            self._retired.discard(host)
            await host.process.stop()

    def _flooded(self) -> None:
        self._events.write("environment_output_cut", level=logging.WARNING, log=str(self._log_file))


class Episode:
    """The environment of one episode; a context manager that returns it to the pool."""

    def __init__(self, pool: EnvironmentPool, host: _Host, number: int):
        self._pool, self._host, self._number = pool, host, number
        self._finished = False

    async def __aenter__(self) -> Episode:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._pool.release(self._host, self._number, self._finished)

    async def reset(self, row: dict[str, Any]) -> str:
        """Begin; return the text that the environment adds to the prompt. Raises CallFailed, as all methods do."""
        reply = await self._call(self._pool.start_timeout_s, do="reset", row=row)
        return str(reply["text"])

    async def act(self, text: str) -> Reply:
        """Give the environment a turn of the policy, and return its reply."""
        reply = Reply(**await self._call(self._pool.step_timeout_s, do="act", text=text))
        self._pool.statistics["tool_calls"] += len(reply.calls)
        self._pool.statistics["tool_errors"] += reply.errors
        return reply

    async def finish(self) -> Outcome:
        """End the episode."""
        outcome = Outcome(**await self._call(self._pool.step_timeout_s, do="finish"))
        self._finished = True
        return outcome

    async def run(self, row: dict[str, Any], index: int, access: SessionAccess, timeout_s: float) -> float | None:
        """Let an agent play the whole episode, and return its reward."""
        url, process = access.base_url, self._host.process
        if process.door is not None and access.address is not None:
            process.door.target = access.address
            url = f"http://127.0.0.1:{process.about['port']}/v1"
        reply = await self._call(timeout_s, do="run", row=row, index=index, base_url=url, key=access.key)
        self._finished = True
        return reply["reward"]

    async def _call(self, timeout_s: float, **message: Any) -> dict[str, Any]:
        return await self._pool.call(self._host, {"episode": self._number, **message}, timeout_s)


class AgentPool(EnvironmentPool):
    """Runs environment.agent, or the taskset of environment.verifiers with its own Python."""

    module, what = "agent_worker", "the agent worker"

    def __init__(self, config: JobConfig, events: EventLog, log_file: Path | None = None, run_dir: Path | None = None):
        """Raises UserError if verifiers is needed but not installed, or if isolation is not possible but required."""
        super().__init__(config, events, log_file, run_dir=run_dir)
        environment = config.environment
        self._setup = {"agent": environment.agent, "memory_limit_mb": environment.memory_limit_mb}
        # The files of a command line, and verifiers' tokenizer.
        self._visible = [*shlex.split(environment.agent), config.model.hf_assets_path]
        if environment.verifiers:
            self._python = find_python("verifiers", environment.verifiers_python, "environment.verifiers_python")
            self._setup |= {
                "taskset": environment.verifiers,
                "model": config.model.hf_assets_path,
                "harness": environment.verifiers_harness,
                "renderer": environment.verifiers_renderer,
                "max_turns": environment.max_turns,
                "runtime": {"type": environment.verifiers_runtime, **environment.verifiers_runtime_args},
                # Do not add our import paths, which have other versions of the same packages.
                "path": [str(Path.cwd())],
            }

    def _new_door(self) -> Door | None:
        return Door() if self._isolation is not None and not self._isolation.network else None
