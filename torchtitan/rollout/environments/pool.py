"""Environments and agents in worker processes: a hang, a crash or a memory bomb costs its episode, never the run."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.config.job_config import JobConfig
from torchtitan.inference.agent.client import find_python
from torchtitan.rollout.gateway.process import Door
from torchtitan.rollout.worker_process import CallFailed, WorkerProcess, start_all
from torchtitan.utils.json_lines import EventLog

# Characters of an observation beyond which it cannot fit into a completion: no token is longer.
LONGEST_TOKEN = 128
# Only so many failures are written as events; all are counted.
FAILURE_EVENTS = 20


@dataclass
class Reply:
    """What a turn brought about."""

    messages: list[dict[str, Any]]
    """For the policy: an observation, or the results of its tool calls"""
    reward: float
    done: bool
    calls: list[dict[str, Any]]
    errors: int
    """Tool calls among them that failed"""


@dataclass
class Outcome:
    """What an environment says when its episode is over."""

    reward: float | None
    attributes: dict[str, Any]
    """Its public attributes, where JSON can hold them"""


class _Host:
    """A worker process and how many episodes it has."""

    def __init__(self, process: WorkerProcess):
        self.process = process
        self.episodes = 0
        self.broken = False
        """Whether something hangs in it, or it has ended: it gets no new episode, and ends with its last one"""
        self.end_told = False
        """Whether an event has said that it ended; other episodes that end with it need no events of their own"""


class EnvironmentPool:
    """Runs what [environment] names. All methods belong to one asyncio loop.

    `statistics` counts failures (by kind too), tool calls, and the errors that tools gave the policy.
    """

    def __init__(self, config: JobConfig, events: EventLog, log_file: Path | None = None):
        self._config, self._events, self._log_file = config.environment, events, log_file
        self._setup = {
            "factory": self._config.factory,
            "tools": self._config.tools,
            "parser": self._config.tool_parser,
            "longest": LONGEST_TOKEN * config.rollout.max_completion_tokens + 1,
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
        """Start all workers. Raises UserError where one cannot start, or what it is to run is no environment."""
        self._hosts = [self._new_host() for _ in range(self._config.num_workers)]
        await start_all(host.process for host in self._hosts)
        self.tools = self._hosts[0].process.about.get("tools", [])

    async def close(self) -> None:
        await asyncio.gather(*(host.process.stop() for host in [*self._hosts, *self._retired]))

    async def episode(self) -> Episode:
        """An environment for one episode, on the worker with the fewest. Raises UserError where no worker starts."""
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
        return _Host(self._new_process())

    def _new_process(self) -> WorkerProcess:
        module = "torchtitan.rollout.environments.worker"
        return WorkerProcess("the environment worker", module, self._setup, self._log_file, self._flooded)

    async def call(self, host: _Host, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """A call for an episode. Raises CallFailed, which is counted and said."""
        try:
            return await host.process.call(message, timeout_s)
        except CallFailed as failure:
            self.statistics["failures"] += 1
            self.statistics[{"timeout": "timeouts", "crash": "crashes"}.get(failure.kind, "exceptions")] += 1
            # A thread that hangs cannot be ended, so its process gets nothing new.
            host.broken = host.broken or failure.kind != "exception"
            if not host.end_told and self._told < FAILURE_EVENTS:
                what = {"what": failure.kind, "in": message["do"], "reason": str(failure)}
                self._events.write("environment_failed", level=logging.WARNING, **what)
                self._told += 1
            host.end_told = host.end_told or failure.kind == "crash"
            raise

    async def release(self, host: _Host, episode: int, finished: bool) -> None:
        """An episode is over; its environment is used again where it has finished."""
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
    """One episode's environment; a context manager, which gives it back."""

    def __init__(self, pool: EnvironmentPool, host: _Host, number: int):
        self._pool, self._host, self._number = pool, host, number
        self._finished = False

    async def __aenter__(self) -> Episode:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._pool.release(self._host, self._number, self._finished)

    async def reset(self, row: dict[str, Any]) -> str:
        """Begin; returns what the environment adds to the prompt. Raises CallFailed, as all methods do."""
        reply = await self._call(self._pool.start_timeout_s, do="reset", row=row)
        return str(reply["text"])

    async def act(self, text: str) -> Reply:
        """What a turn of this text brings about."""
        reply = Reply(**await self._call(self._pool.step_timeout_s, do="act", text=text))
        self._pool.statistics["tool_calls"] += len(reply.calls)
        self._pool.statistics["tool_errors"] += reply.errors
        return reply

    async def finish(self) -> Outcome:
        """End the episode."""
        outcome = Outcome(**await self._call(self._pool.step_timeout_s, do="finish"))
        self._finished = True
        return outcome

    async def run(self, row: dict[str, Any], index: int, door: Door, timeout_s: float) -> float | None:
        """Have an agent play the whole episode; returns its reward."""
        reply = await self._call(timeout_s, do="run", row=row, index=index, base_url=door.base_url, key=door.key)
        self._finished = True
        return reply["reward"]

    async def _call(self, timeout_s: float, **message: Any) -> dict[str, Any]:
        return await self._pool.call(self._host, {"episode": self._number, **message}, timeout_s)


class AgentPool(EnvironmentPool):
    """Runs environment.agent, or the taskset of environment.verifiers with its own Python."""

    def __init__(self, config: JobConfig, events: EventLog, log_file: Path | None = None):
        """Raises UserError where verifiers cannot be had."""
        super().__init__(config, events, log_file)
        environment = config.environment
        self._setup = {"agent": environment.agent, "memory_limit_mb": environment.memory_limit_mb}
        self._python: str | None = None
        if environment.verifiers:
            self._python = find_python("verifiers", environment.verifiers_python, "environment.verifiers_python")
            self._setup |= {
                "taskset": environment.verifiers,
                "model": config.model.hf_assets_path,
                "harness": environment.verifiers_harness,
                "renderer": environment.verifiers_renderer,
                "max_turns": environment.max_turns,
                # Nothing of our environment, which has other versions of the same packages.
                "path": [str(Path.cwd())],
            }

    def _new_process(self) -> WorkerProcess:
        module = "torchtitan.rollout.environments.agent_worker"
        return WorkerProcess(
            "the agent worker", module, self._setup, self._log_file, self._flooded, python=self._python
        )
