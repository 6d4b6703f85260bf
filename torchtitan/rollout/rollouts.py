"""Rollouts in a thread of rank 0: the engines, the reward workers and the flow of groups between them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, overload

from torchtitan.config.derived import has_environment, is_colocated, plays_through_gateway
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import ConfigError, UserError
from torchtitan.inference.colocated.pool import ColocatedPool
from torchtitan.inference.pool import InferencePool
from torchtitan.rollout.curriculum import CurriculumStream
from torchtitan.rollout.demonstrations import DemonstrationMaker
from torchtitan.rollout.environments.pool import AgentPool, EnvironmentPool
from torchtitan.rollout.episodes import AgentPlayer, Engines, EpisodePlayer, Player
from torchtitan.rollout.flow import RolloutFlow
from torchtitan.rollout.gateway.process import Gateway
from torchtitan.rollout.group_maker import GroupMaker
from torchtitan.rollout.journal import Journal
from torchtitan.rollout.prompts import PromptMaker, PromptStream, first_held_out, is_chat, load_datasets
from torchtitan.rollout.rewards.pool import RewardPool
from torchtitan.rollout.tokenizer import Tokenizer
from torchtitan.rollout.types import Prompt
from torchtitan.rollout.unknown_text import check_unknown_text
from torchtitan.utils.json_lines import EventLog

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 240.0
CLOSE_TIMEOUT_S = 30.0
# The loop answers immediately; this allows for a very busy machine.
CALL_TIMEOUT_S = 60.0

Result = TypeVar("Result")


class Rollouts:
    """Context manager. Entering it starts the reward workers and begins to start the engines, without waiting for them.

    `pool`, `rewards`, `groups` and `flow` belong to one thread with an asyncio loop; other threads call their
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
        environments: EnvironmentPool | None = None,
        gateway: Gateway | None = None,
        events: EventLog | None = None,
    ):
        """ranks: number of trainer ranks; gateway: given if the programs of `environments` reach the policy through it.

        Raises UserError for a dataset or tokenizer that does not fit the configuration.
        """
        self._config = config
        self._maker = (DemonstrationMaker if config.job.stage == "sft" else PromptMaker)(config, tokenizer)
        checked = config.job.stage == "sft"  # by Demonstrations
        train, self._held_out = load_datasets(config, None if checked else self._maker.renderer)
        if not checked:
            check_unknown_text(train, config, tokenizer)
        self._chats = any(is_chat(row, config) for row in train)
        self.pool, self.rewards = pool, rewards
        self._environments, self._gateway = environments, gateway
        episodes: Player | None = None
        if isinstance(environments, AgentPool) and gateway is not None:
            episodes = AgentPlayer(config, gateway, environments, tokenizer)
        elif environments is not None:
            episodes = EpisodePlayer(config, pool, environments, self._maker, tokenizer)
        self.groups = GroupMaker(config, pool, rewards, tokenizer, epoch, episodes)
        drawn_from = train, self._maker, config.training.seed, config.rollout.shuffle
        stream = PromptStream(*drawn_from)
        if config.curriculum.enable:
            stream = CurriculumStream(*drawn_from, config.curriculum, config.rollout.max_staleness == 0)
        self.flow = RolloutFlow(config, self.groups, stream, journal, ranks, events)

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

    def held_out_prompts(self) -> list[Prompt]:
        """Return the first eval.num_prompts held-out prompts that fit, in an order that is the same in every run."""
        return first_held_out(self._held_out, self._maker, self._config.eval.num_prompts)

    async def _start(self) -> None:
        await self.rewards.start()
        if self._environments is not None:
            await self._environments.start()
            self._maker.tools = self._environments.tools
            if self._chats and self._gateway is None:
                try:
                    self._maker.renderer.refuse_environment(self._maker.tools)
                except UserError as error:
                    environment = self._config.environment
                    what = ", ".join(filter(None, [environment.factory, *environment.tools]))
                    raise ConfigError([f"[environment] {what} cannot be used: {error}"]) from None
        if self.groups.teacher is not None:
            # Fail now, rather than after the first samples, if the teacher is not reachable.
            await self.groups.teacher.score([0, 0])
        await self.pool.start()

    def _end(self) -> None:
        try:
            self.loop.call(self._close, timeout_s=CLOSE_TIMEOUT_S)
        except (UserError, concurrent.futures.TimeoutError):
            logger.warning("rollouts did not stop within %g s; what is left ends with this process", CLOSE_TIMEOUT_S)
        finally:
            self.loop.close()

    async def _close(self) -> None:
        await self.flow.close()
        if self._gateway is not None:
            await self._gateway.close()
        if self.groups.teacher is not None:
            await self.groups.teacher.close()
        closing = [self.rewards.close(), self.pool.close()]
        await asyncio.gather(*closing, *([] if self._environments is None else [self._environments.close()]))


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
    rewards = RewardPool(config, logs / "rewards.log")
    pool: Engines
    if is_colocated(config):
        pool = ColocatedPool(config, epoch, ranks // config.inference.tensor_parallel_size)
    else:
        pool = InferencePool(config, epoch, token, run_dir, events)
    environments: EnvironmentPool | None = None
    gateway: Gateway | None = None
    if plays_through_gateway(config):
        environments = AgentPool(config, events, log_file=logs / "environments.log")
        gateway = Gateway(config, pool, events, run_dir)
    elif has_environment(config):
        environments = EnvironmentPool(config, events, log_file=logs / "environments.log")
    return Rollouts(config, pool, rewards, tokenizer, journal, epoch, ranks, environments, gateway, events)


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
        except concurrent.futures.TimeoutError:
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
