"""Environments and agents in worker processes: a hang, a crash or a memory bomb costs an episode, never the run."""

from __future__ import annotations

import contextlib
import itertools
import logging
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from torchtitan.config.job_config import JobConfig
from torchtitan.inference.engines.sidecar.sidecar_process import find_python
from torchtitan.rollout.conversation.tool_formats.registry import find_format
from torchtitan.rollout.environments.failure_log import FailureLog
from torchtitan.rollout.gateway.gateway_process import SessionAccess
from torchtitan.rollout.workers.worker_pool import WorkerPool
from torchtitan.rollout.workers.worker_process import CallFailed, WorkerProcess
from torchtitan.utils.json_lines import EventLog
from torchtitan.utils.typed_json import Kind

logger = logging.getLogger(__name__)

# No token has more characters than this; it bounds the length of observations that can fit into a completion.
MAX_TOKEN_CHARACTERS = 128
# The deadline for close() of all instances of a worker, at the end of the run.
CLOSE_TIMEOUT_S = 5.0
# What a reply has beside its texts; of a character, in JSON. All attributes of an environment together.
REPLY_BYTES, CHARACTER_BYTES, ATTRIBUTE_BYTES = 1 << 18, 6, 1 << 22
# The deadline for the end of a hanging agent's standard error.
QUOTE_TIMEOUT_S = 5.0


@dataclass
class Reply:
    """An environment's reply to a turn."""

    messages: list[dict[str, str]]
    """Messages for the policy: an observation, or the results of its tool calls"""
    reward: float
    done: bool
    calls: list[dict[str, Any]]
    errors: int
    """Number of tool calls that failed"""


@dataclass
class EpisodeOutcome:
    """The outcome of an episode, as its environment reports it."""

    reward: float | None
    attributes: dict[str, Any]
    """The environment's public attributes that JSON can represent"""


class _Text(msgspec.Struct):
    text: str


class _Reward(msgspec.Struct):
    reward: float | None
    stderr: str = ""
    """The end of a command's standard error"""


class _Nothing(msgspec.Struct):
    """The reply to an order."""


class EnvironmentPool(WorkerPool):
    """Runs the environment or tools from [environment].

    `statistics` counts failures (also by kind), tool calls, and errors that tools returned to the policy.
    """

    module, what = "environment_worker", "the environment worker"
    counts_failures = True
    """Whether calls that fail are counted here; otherwise their player does that"""

    def __init__(
        self,
        config: JobConfig,
        events: EventLog,
        log_file: Path | None = None,
        tool_format: str = "",
        run_dir: Path | None = None,
    ):
        """tool_format: how tool calls are written (detect_format), by default as environment.tool_parser says or as
        without a chat template; for the others see WorkerPool."""
        table = config.environment
        self.tool_format = tool_format or find_format(table.tool_parser, "")
        longest = MAX_TOKEN_CHARACTERS * config.rollout.max_completion_tokens + 1
        self.text_bytes = REPLY_BYTES + CHARACTER_BYTES * longest
        """How long a reply with texts may be"""
        setup = {
            "factory": table.factory,
            "tools": table.tools,
            "parser": self.tool_format,
            "longest": longest,
        }
        module = f"torchtitan.rollout.environments.{self.module}"
        super().__init__(table, self.what, module, setup, log_file, run_dir, self._cut)
        # An instance is reused, with what it has started: a kernel, a browser, a shell.
        self._settings.keeps_processes = True
        self._config, self._events = table, events
        self.failures = FailureLog(events)
        self._numbers = itertools.count()
        self._ended: set[WorkerProcess] = set()
        """Workers whose end an event has reported; their other episodes then need no events of their own"""
        self.statistics = self.failures.statistics
        self.statistics.update(dict.fromkeys(("tool_calls", "tool_errors"), 0))
        self.tools: list[dict[str, Any]] = []
        """JSON schemas of the tools, for the chat template"""
        self.start_timeout_s, self.step_timeout_s = table.start_timeout_s, table.step_timeout_s

    async def start(self) -> None:
        """Start all workers. Raises UserError if one cannot start, or if its program is not an environment."""
        await super().start()
        self.tools = self.about.get("tools", [])

    async def _stop(self, worker: WorkerProcess) -> None:
        """Stop a worker, after closing its instances within a deadline."""
        try:
            if self._config.factory and worker.alive and not worker.broken:
                await worker.call({"do": "close", "episode": -1}, _Nothing, CLOSE_TIMEOUT_S, REPLY_BYTES)
        except CallFailed as failure:
            logger.warning("environments were not closed before their worker ended: %s", failure)
        finally:
            await worker.stop()

    async def episode(self, alone: bool = False) -> Episode:
        """Return an environment for one episode, on the least loaded worker, or `alone` on one of its own. Raises
        UserError if no worker starts."""
        return Episode(self, await (self.take_alone() if alone else self.take()), next(self._numbers))

    async def call(
        self, worker: WorkerProcess, message: dict[str, Any], kind: type[Kind], timeout_s: float, most_bytes: int
    ) -> Kind:
        """Call a worker for an episode. Raises CallFailed, after counting and reporting it."""
        try:
            return await worker.call(message, kind, timeout_s, most_bytes)
        except CallFailed as failure:
            failure.where, failure.reported = message["do"], worker in self._ended
            if self.counts_failures:
                failure.counted = True
                self.failures.attempt_failed(failure.kind, failure.where, str(failure), reported=failure.reported)
            if failure.kind == "crash":
                self._ended.add(worker)
            raise

    def look_at_errors(self, worker: WorkerProcess, texts: list[str]) -> None:
        """Report the first errors of tools that may come from what the worker lacks: the policy alone reads them."""
        for text in texts:
            if (explained := worker.explained(text)) != text:
                self.failures.write("tool", "environment_failed", what="tool", **{"in": "act"}, reason=explained)

    async def release(self, worker: WorkerProcess, episode: int, finished: bool) -> None:
        """End an episode; the environment is reused if the episode finished properly."""
        if not finished:
            worker.tell({"do": "drop", "episode": episode})
        await self.give_back(worker)
        if not worker.users and worker.broken:
            self._ended.discard(worker)

    def _cut(self) -> None:
        self._events.write("environment_output_cut", level=logging.WARNING, log=str(self._settings.log_file))


class Episode:
    """The environment of one episode; a context manager that returns it to the pool."""

    def __init__(self, pool: EnvironmentPool, worker: WorkerProcess, number: int):
        self._pool, self._worker, self._number = pool, worker, number
        self._finished = False

    async def __aenter__(self) -> Episode:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._pool.release(self._worker, self._number, self._finished)

    async def reset(self, row: dict[str, Any]) -> str:
        """Begin; return the text that the environment adds to the prompt. Raises CallFailed, as all methods do."""
        longest = self._pool.text_bytes
        return (await self._call(_Text, self._pool.start_timeout_s, longest, do="reset", row=row)).text

    async def act(self, text: str, marked: str | None = None) -> Reply:
        """Give the environment a turn of the policy, and return its reply.

        text: what a program sees of the turn (Turn.shown); marked: the whole turn as marked text, in which calls are
        looked for, with what its prompt had already; if it is left out, `text`.
        """
        turn = {"text": text, "marked": text if marked is None else marked}
        reply = await self._call(Reply, self._pool.step_timeout_s, self._pool.text_bytes, do="act", **turn)
        self._pool.statistics["tool_calls"] += len(reply.calls)
        self._pool.statistics["tool_errors"] += reply.errors
        if reply.errors:
            self._pool.look_at_errors(self._worker, [str(message["content"]) for message in reply.messages])
        return reply

    async def finish(self) -> EpisodeOutcome:
        """End the episode."""
        outcome = await self._call(EpisodeOutcome, self._pool.step_timeout_s, ATTRIBUTE_BYTES, do="finish")
        self._finished = True
        return outcome

    async def run(self, row: dict[str, Any], index: int, access: SessionAccess, timeout_s: float) -> float | None:
        """Let an agent play the whole episode, and return its reward. Sets what `access` says of its end."""
        url, process = access.base_url, self._worker
        if process.forward is not None and access.address is not None:
            process.forward.target = access.address
            url = f"http://127.0.0.1:{process.about['port']}/v1"
        episode = {"row": row, "index": index, "base_url": url, "key": access.key}
        try:
            reply = await self._call(_Reward, timeout_s, REPLY_BYTES, do="run", **episode)
        except CallFailed as failure:
            if failure.kind == "timeout":
                access.stderr = await self._quote()
            raise
        self._finished = True
        access.stderr = reply.stderr
        return reply.reward

    async def _quote(self) -> str:
        """Return the end of what an agent that hangs has written to its standard error; empty if it cannot be had."""
        with contextlib.suppress(CallFailed):
            asked = {"do": "quote", "episode": self._number}
            return (await self._worker.call(asked, _Text, QUOTE_TIMEOUT_S, REPLY_BYTES)).text
        return ""

    async def _call(self, kind: type[Kind], timeout_s: float, most_bytes: int, **message: Any) -> Kind:
        return await self._pool.call(self._worker, {"episode": self._number, **message}, kind, timeout_s, most_bytes)


class AgentPool(EnvironmentPool):
    """Runs environment.agent, or the taskset of environment.verifiers with its own Python."""

    module, what = "agent_worker", "the agent worker"
    # Why its episode failed is known once it is also known what became of its calls.
    counts_failures = False

    def __init__(self, config: JobConfig, events: EventLog, log_file: Path | None = None, run_dir: Path | None = None):
        """Raises UserError if verifiers is needed but not installed; for the arguments see WorkerPool."""
        super().__init__(config, events, log_file, run_dir=run_dir)
        environment, settings = config.environment, self._settings
        settings.needs_gateway = True
        # Agents' programs reserve far more memory than they use: not what they reserve is limited, but what they use.
        settings.setup = {"agent": environment.agent, "memory_limit_mb": environment.sandbox.memory_limit_mb}
        settings.memory_per_user_mb = environment.sandbox.memory_limit_mb
        settings.keeps_processes = False
        # The files of a command line, and verifiers' tokenizer.
        settings.visible += [*shlex.split(environment.agent), config.model.hf_assets_path]
        verifiers = environment.verifiers
        if verifiers.id:
            settings.python = find_python("verifiers", verifiers.python, "environment.verifiers.python")
            settings.setup |= {
                "taskset": verifiers.id,
                "model": config.model.hf_assets_path,
                "harness": verifiers.harness,
                "renderer": verifiers.renderer,
                "max_turns": environment.max_turns,
                "runtime": verifiers.runtime,
                # Do not add our import paths, which have other versions of the same packages.
                "path": [str(Path.cwd())],
            }
