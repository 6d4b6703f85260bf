"""Rollouts in a thread of rank 0: the engines, the reward workers and the flow of groups between them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import inspect
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar, overload

from torchtitan.config.evaluations import eval_configs, task_configs
from torchtitan.config.job_config import JobConfig
from torchtitan.config.optimizer_step import groups_per_batch
from torchtitan.config.source_configs import source_configs, source_name, source_weights
from torchtitan.config.teachers import hints_after_scoring
from torchtitan.errors import ConfigError, UserError
from torchtitan.inference.engines.registry import engine_of
from torchtitan.inference.pool.actor_pool import InferencePool
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.conversation.tool_detection import detect_format, refuse_unread_calls
from torchtitan.rollout.data.curriculum import CurriculumStream
from torchtitan.rollout.data.demonstrations import DemonstrationMaker
from torchtitan.rollout.data.job_rows import is_chat, load_datasets
from torchtitan.rollout.data.prompt_stream import PromptStream
from torchtitan.rollout.data.prompts import PromptMaker, first_held_out
from torchtitan.rollout.data.source_scheduler import SourceScheduler
from torchtitan.rollout.data.unknown_text import check_unknown_text, refuse_surplus_tokens, vocabulary_of
from torchtitan.rollout.environments.environment_pool import AgentPool, EnvironmentPool
from torchtitan.rollout.flow.episodes import AgentPlayer, Engines, EpisodePlayer, Player
from torchtitan.rollout.flow.group_maker import GroupMaker
from torchtitan.rollout.flow.hints import Hints
from torchtitan.rollout.flow.journal import Journal
from torchtitan.rollout.flow.rollout_flow import RolloutFlow
from torchtitan.rollout.flow.source_flow import SourceFlow
from torchtitan.rollout.gateway.gateway_process import Gateway
from torchtitan.rollout.rewards.reward_pool import RewardPool
from torchtitan.rollout.types import Prompt
from torchtitan.utils.json_lines import EventLog

logger = logging.getLogger(__name__)

# What code that is not isolated can do, for the event that says so.
UNISOLATED = "this code can read the run's keys and change all files of this user; isolate = false accepts that"
START_TIMEOUT_S = 240.0
CLOSE_TIMEOUT_S = 30.0
# The loop answers immediately; this allows for a very busy machine.
CALL_TIMEOUT_S = 60.0

Result = TypeVar("Result")


@dataclass(frozen=True)
class EpisodeBackend:
    """What plays the episodes of an environment; the gateway is given if its programs reach the policy through it."""

    environments: EnvironmentPool | None = None
    gateway: Gateway | None = None


class SourceTask:
    """What a source asks, and how groups of its prompts are made."""

    def __init__(
        self,
        config: JobConfig,
        pool: Engines,
        rewards: RewardPool,
        tokenizer: Tokenizer,
        epoch: str,
        backend: EpisodeBackend,
    ):
        """config: the run's as it is for the source. Raises UserError for data that does not fit it."""
        self.config, self._backend = config, backend
        is_sft = config.job.stage == "sft"
        self.maker = (DemonstrationMaker if is_sft else PromptMaker)(config, tokenizer)
        # Demonstrations have been checked by the class of that name.
        self.rows, self._held_out = load_datasets(config, None if is_sft else self.maker.renderer)
        if not is_sft:
            check_unknown_text(self.rows, config, tokenizer)
            if not config.environment.uses_gateway:  # an agent writes the prompts itself
                refuse_surplus_tokens([*self.rows, *self._held_out], self.maker, vocabulary_of(config))
        episodes: Player | None = None
        if isinstance(backend.environments, AgentPool) and backend.gateway is not None:
            episodes = AgentPlayer(config, backend.gateway, backend.environments, tokenizer)
        elif backend.environments is not None:
            episodes = EpisodePlayer(config, pool, backend.environments, self.maker, tokenizer)
        hints = Hints(config, self.maker) if hints_after_scoring(config) else None
        self.groups = GroupMaker(config, pool, rewards, tokenizer, epoch, episodes, hints)

    def stream(self) -> PromptStream:
        """Return the prompts to train on."""
        config = self.config
        drawn_from = self.rows, self.maker, config.training.seed, config.rollout.shuffles
        if config.rollout.draws_by_results:
            return CurriculumStream(*drawn_from, config.rollout.sampler, config.rollout.max_staleness == 0)
        return PromptStream(*drawn_from)

    def held_out_prompts(self) -> list[Prompt]:
        """Return the first eval.num_prompts held-out prompts that fit, in an order that is the same in every run."""
        return first_held_out(self._held_out, self.maker, self.config.eval.num_prompts)

    async def start(self) -> None:
        """Check what can be checked once the environments have started. Raises UserError."""
        if self._backend.environments is not None:
            self.maker.tools = self._backend.environments.tools
            renders = self._backend.gateway is not None and not self.config.environment.verifiers.id
            if renders and self.maker.renderer.tokenizer.has_chat_template:
                self.maker.renderer.warn_of_branches()
            if self._backend.gateway is None and any(is_chat(row, self.config) for row in self.rows):
                try:
                    self.maker.renderer.refuse_environment(self.maker.tools)
                    if self.maker.tools:
                        refuse_unread_calls(self.config.environment.tool_parser, self.maker.renderer.tokenizer)
                except UserError as error:
                    environment = self.config.environment
                    what = ", ".join(filter(None, [environment.factory, *environment.tools]))
                    raise ConfigError([f"[environment] {what} cannot be used: {error}"]) from None
        if self.groups.teacher is not None:
            # Fail now, rather than after the first samples, if the teacher is not reachable.
            await self.groups.teacher.score([0, 0])


class Rollouts:
    """Context manager. Entering it starts the reward workers and begins to start the engines, without waiting for them.

    `pool`, `rewards`, `tasks` and `flow` belong to one thread with an asyncio loop; other threads call their
    methods through `loop.call`.
    """

    def __init__(
        self,
        config: JobConfig,
        pool: Engines,
        rewards: RewardPool,
        tokenizer: Tokenizer,
        journal: Journal | None,
        epoch: str,
        ranks: int,
        backends: Mapping[str, EpisodeBackend] = MappingProxyType({}),
        events: EventLog | None = None,
    ):
        """ranks: number of trainer ranks; backends: what plays the episodes of sources with an environment, by name.

        Raises UserError for a dataset or tokenizer that does not fit the configuration.
        """
        self.pool, self.rewards, self._backends = pool, rewards, backends
        self.tasks = [
            SourceTask(source_config, pool, rewards, tokenizer, epoch, backends.get(name, EpisodeBackend()))
            for name, source_config in source_configs(config)
        ]
        """One for each source, in their order"""
        self.sets = self.tasks
        """What is evaluated, in the order of eval_configs()"""
        if config.eval.is_used and config.eval.set:
            self.sets = [
                SourceTask(
                    set_config, pool, rewards, tokenizer, epoch, backends.get(source_name(set_config), EpisodeBackend())
                )
                for _, set_config in eval_configs(config)
            ]
        scheduler = SourceScheduler(
            source_weights(config, [len(task.rows) for task in self.tasks]), groups_per_batch(config)
        )
        sources = [
            SourceFlow(task.config, task.groups, task.stream(), scheduler, number, len(self.tasks), events)
            for number, task in enumerate(self.tasks)
        ]
        self.flow = RolloutFlow(config, sources, scheduler, journal, events)
        self._events = events

    def __enter__(self) -> Rollouts:
        self.loop = BackgroundLoop("rollouts")
        try:
            self.loop.call(self._start, timeout_s=START_TIMEOUT_S)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    async def _start(self) -> None:
        await self.rewards.start()
        for environments in self._shared("environments"):
            await environments.start()
        if self._events is not None:
            pools = [("rewards", self.rewards), *(("environment", pool) for pool in self._shared("environments"))]
            for what, pool in pools:
                if reason := pool.missing_isolation:
                    self._events.write(
                        "isolation_missing", level=logging.WARNING, table=what, reason=reason, meaning=UNISOLATED
                    )
        for task in dict.fromkeys([*self.tasks, *self.sets]):
            await task.start()
        await self.pool.start()

    def _shared(self, part: str) -> list[Any]:
        """All environments, or gateways; sources may share one."""
        parts = [getattr(backend, part) for backend in self._backends.values()]
        return list({id(part): part for part in parts if part is not None}.values())

    def _end(self) -> None:
        try:
            self.loop.call(self._close, timeout_s=CLOSE_TIMEOUT_S)
        except (UserError, TimeoutError):
            logger.warning("rollouts did not stop within %g s; what is left ends with this process", CLOSE_TIMEOUT_S)
        finally:
            self.loop.close()

    async def _close(self) -> None:
        await self.flow.close()
        for gateway in self._shared("gateway"):
            await gateway.close()
        for task in self.tasks:
            if task.groups.teacher is not None:
                await task.groups.teacher.close()
        closing = [self.rewards.close(), self.pool.close()]
        await asyncio.gather(*closing, *(environments.close() for environments in self._shared("environments")))


def make_rollouts(
    config: JobConfig,
    ranks: int,
    tokenizer: Tokenizer,
    journal: Journal,
    events: EventLog,
    run_dir: Path,
    epoch: str,
    token: str,
) -> Rollouts:
    """Make the rollouts of a trainer with `ranks` ranks, with the engines from the configuration.

    Raises:
        UserError: the dataset, tokenizer or reward functions do not fit the configuration.
    """
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    rewards = RewardPool(config, logs / "rewards.log", run_dir)
    pool: Engines | None = engine_of(config).open_pool(config, epoch, ranks)
    if pool is None:
        pool = InferencePool(config, epoch, token, run_dir, events)
    backends = make_backends(config, pool, events, run_dir, tokenizer)
    return Rollouts(config, pool, rewards, tokenizer, journal, epoch, ranks, backends, events)


def make_backends(
    config: JobConfig, pool: Engines, events: EventLog, run_dir: Path, tokenizer: Tokenizer | None = None
) -> dict[str, EpisodeBackend]:
    """Make the environments of all sources that have one, by the source's name. Sources with the same [environment]
    share its processes. tokenizer: its chat template shows how tool calls are written."""
    backends: dict[str, EpisodeBackend] = {}
    made: dict[str, EpisodeBackend] = {}
    sources = list(task_configs(config).items())
    for name, source_config in sources:
        key = source_config.environment.key(source_config.rollout.stop_token_ids)
        if not key:
            continue
        if key not in made:
            source_config = copy.copy(source_config)
            number = f"-{len(made)}" if made else ""
            # One process serves the longest of their completions.
            same_environment = [other for _, other in sources if other.environment == source_config.environment]
            longest = max(other.rollout.max_completion_tokens for other in same_environment)
            source_config.rollout = replace(source_config.rollout, max_completion_tokens=longest)
            log_file = run_dir / "logs" / f"environments{number}.log"
            if source_config.environment.uses_gateway:
                gateway = Gateway(source_config, pool, events, run_dir, f"gateway{number}")
                made[key] = EpisodeBackend(AgentPool(source_config, events, log_file, run_dir), gateway)
            else:
                tool_format = detect_format(source_config.environment.tool_parser, tokenizer) if tokenizer else ""
                made[key] = EpisodeBackend(EnvironmentPool(source_config, events, log_file, tool_format, run_dir))
        backends[name] = made[key]
    return backends


class BackgroundLoop:
    """An asyncio loop in a daemon thread, which runs functions and coroutines for other threads and never keeps the
    process alive."""

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @overload
    def call(
        self, function: Callable[..., Coroutine[Any, Any, Result]], *arguments: Any, timeout_s: float = ...
    ) -> Result: ...

    @overload
    def call(self, function: Callable[..., Result], *arguments: Any, timeout_s: float = ...) -> Result: ...

    def call(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Call a function in the loop's thread, or await a coroutine function there, and return what it returns.

        Raises:
            UserError: the call did not finish within `timeout_s` and was cancelled.
        """
        future = self.submit(function, *arguments)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():
                raise  # the function itself raised it
            raise UserError(
                f"the rollouts gave no answer within {timeout_s:g} s: the machine is too busy, or an actor's start "
                "hangs (see logs/ in the run folder)"
            ) from None
        finally:
            future.cancel()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> concurrent.futures.Future[Any]:
        """Like `call`, but return a future without waiting."""
        if self._loop.is_closed():
            raise RuntimeError(f"the thread {self._thread.name} has ended")

        async def work() -> Any:
            result = function(*arguments)
            return await result if inspect.isawaitable(result) else result

        return asyncio.run_coroutine_threadsafe(work(), self._loop)

    def close(self, timeout_s: float = 10.0) -> None:
        """Cancel all running tasks and end the thread."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("thread %s did not end within %g s", self._thread.name, timeout_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()
