"""Rollouts in the background of rank 0: the engines, the reward workers, and the flow of groups between them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from pathlib import Path
from types import TracebackType

from torchtitan.config.derived import has_environment, is_colocated, plays_through_gateway
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.colocated.pool import ColocatedPool
from torchtitan.inference.pool import InferencePool
from torchtitan.rollout.demonstrations import DemonstrationMaker
from torchtitan.rollout.environments.pool import AgentPool, EnvironmentPool
from torchtitan.rollout.episodes import AgentPlayer, EpisodePlayer, Player
from torchtitan.rollout.flow import RolloutFlow
from torchtitan.rollout.gateway.process import Gateway
from torchtitan.rollout.group_maker import Engines, GroupMaker
from torchtitan.rollout.journal import Journal
from torchtitan.rollout.prompts import PromptMaker, PromptStream, first_held_out, load_datasets
from torchtitan.rollout.rewards.pool import RewardPool
from torchtitan.rollout.tokenizer import Tokenizer
from torchtitan.rollout.types import Prompt
from torchtitan.utils.background_loop import BackgroundLoop
from torchtitan.utils.json_lines import EventLog

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 240.0
CLOSE_TIMEOUT_S = 30.0


class Rollouts:
    """Context manager. Entering it starts the reward workers, and begins to start the engines, without a wait.

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
        maker: PromptMaker | None = None,
    ):
        """ranks: of the trainer; gateway: where the programs of `environments` ask the policy through it; maker: of
        prompts, where not every row is one.

        Raises UserError for a dataset or tokenizer that does not fit the configuration.
        """
        train, self._held_out = load_datasets(config)
        self._config = config
        self._maker = maker or PromptMaker(config, tokenizer)
        self.pool, self.rewards = pool, rewards
        self._environments, self._gateway = environments, gateway
        episodes: Player | None = None
        if isinstance(environments, AgentPool) and gateway is not None:
            episodes = AgentPlayer(config, gateway, environments, tokenizer)
        elif environments is not None:
            episodes = EpisodePlayer(config, pool, environments, self._maker, tokenizer)
        self.groups = GroupMaker(config, pool, rewards, tokenizer, epoch, episodes)
        stream = PromptStream(train, self._maker, config.training.seed, config.rollout.shuffle)
        self.flow = RolloutFlow(config, self.groups, stream, journal, ranks)

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
        """The first eval.num_prompts of the held-out prompts that fit, in an order that is the same in every run."""
        return first_held_out(self._held_out, self._maker, self._config.eval.num_prompts)

    async def _start(self) -> None:
        await self.rewards.start()
        if self._environments is not None:
            await self._environments.start()
            self._maker.tools = self._environments.tools
        if self.groups.teacher is not None:
            # Now, and not after the first samples, if it is not there.
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
    """The rollouts of a trainer with so many ranks, with the engines that the configuration asks for.

    Raises:
        UserError: dataset, tokenizer or reward function do not fit the configuration.
    """
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    extra = [config.eval.reward_function] if config.eval.reward_function else []
    rewards = RewardPool(config, extra_functions=extra, log_file=logs / "rewards.log")
    pool: Engines
    if is_colocated(config):
        pool = ColocatedPool(config, epoch, ranks // config.inference.tensor_parallel_size)
    else:
        pool = InferencePool(config, epoch, token, run_dir, events)
    environments: EnvironmentPool | None = None
    gateway: Gateway | None = None
    if plays_through_gateway(config):
        environments = AgentPool(config, events, log_file=logs / "environments.log")
        gateway = Gateway(config, pool, events, run_dir, config.environment.max_turns)
    elif has_environment(config):
        environments = EnvironmentPool(config, events, log_file=logs / "environments.log")
    maker = DemonstrationMaker(config, tokenizer) if config.job.stage == "sft" else None
    return Rollouts(config, pool, rewards, tokenizer, journal, epoch, ranks, environments, gateway, maker)
