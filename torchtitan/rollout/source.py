"""Where batches come from: actors, or the record of an earlier run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torchtitan.config.derived import world_size
from torchtitan.config.job_config import JobConfig
from torchtitan.inference.colocated.pool import ColocatedPool
from torchtitan.inference.pool import InferencePool
from torchtitan.inference.types import Completion, GenerateRequest, Tag
from torchtitan.rollout.journal import Journal, ReplaySource
from torchtitan.rollout.producer import RolloutProducer
from torchtitan.rollout.prompts import TextTokenizer
from torchtitan.rollout.rewards.pool import RewardPool
from torchtitan.rollout.types import Batch, Prompt
from torchtitan.utils.events import EventLog


class RolloutSource(Protocol):
    """What the trainer needs. RolloutProducer and ReplaySource describe their methods."""

    @property
    def has_actors(self) -> bool: ...

    @property
    def rounds(self) -> ColocatedPool | None:
        """What the trainer's own devices are to generate; None where actors do it by themselves."""

    def launch(self) -> None: ...

    def connect_weights(self, coordinator: str) -> None: ...

    def expect(self, version: int, token_ids: list[int], log_probs: list[float]) -> None: ...

    def redo_elsewhere(self, actor: str, reason: str) -> None: ...

    def sleep(self) -> None: ...

    def wake(self, tag: Tag) -> None: ...

    def start(self, version: int) -> None: ...

    def set_version(self, version: int) -> None: ...

    def next_batch(self, version: int, timeout: float) -> Batch | None: ...

    def export_state(self) -> bytes: ...

    def restore_state(self, state: bytes) -> None: ...

    def generate(
        self, requests: Sequence[GenerateRequest], timeout_s: float, min_version: int = 0
    ) -> list[list[Completion]]: ...

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], timeout_s: float
    ) -> list[list[float | None]]: ...

    def held_out_prompts(self) -> list[Prompt]: ...

    def close(self) -> None: ...


def open_rollouts(
    config: JobConfig,
    tokenizer: TextTokenizer,
    journal: Journal,
    events: EventLog,
    run_dir: Path,
    epoch: str,
    token: str,
) -> RolloutSource:
    """The source of batches that the configuration asks for; launch() starts its processes.

    Raises:
        UserError: dataset, tokenizer, reward function or record do not fit the configuration.
    """
    if config.rollout.replay:
        return ReplaySource(config.rollout.replay, journal)
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    extra = [config.eval.reward_function] if config.eval.reward_function else []
    rewards = RewardPool(config, extra_functions=extra, log_file=logs / "rewards.log")
    if config.inference.mode == "colocate":
        rounds = ColocatedPool(config, epoch, world_size() // config.inference.tensor_parallel_size)
        return RolloutProducer(config, rounds, rewards, tokenizer, journal, epoch, rounds)
    pool = InferencePool(config, epoch, token, run_dir, events)
    return RolloutProducer(config, pool, rewards, tokenizer, journal, epoch)
