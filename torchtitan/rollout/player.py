"""Groups of episodes, side by side; one whose environment or agent fails is begun again."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import replace

from torchtitan.config.job_config import JobConfig
from torchtitan.inference.types import GenerateRequest, stream_seed
from torchtitan.rollout.types import Prompt, Trajectory
from torchtitan.rollout.workers.process import CallFailed

logger = logging.getLogger(__name__)


class Player(ABC):
    """Plays episodes. `statistics` counts turns, and episodes by how they ended."""

    failures: tuple[type[Exception], ...] = (CallFailed,)
    """Of an episode, which begins again then; anything else ends the run"""

    def __init__(self, config: JobConfig):
        self._config = config
        self.statistics: Counter[str] = Counter({"turns": 0, "episodes_redone": 0, "episodes_lost": 0})

    @abstractmethod
    def counts(self) -> Counter[str]:
        """Turns, episodes and failures since the start."""

    @abstractmethod
    async def play_one(
        self, prompt: Prompt, request: GenerateRequest, group: str, min_version: int
    ) -> Trajectory | None:
        """One episode; None where the prompt left no room for a turn. `group` names those that begin alike.

        Raises one of `failures`, or UserError where nothing can be played.
        """

    async def play(self, prompt: Prompt, request: GenerateRequest, min_version: int) -> list[Trajectory]:
        """request.sampling.n episodes of one prompt; fewer where they fail again and again.

        Raises UserError where no actor can sample, or no worker or gateway starts.
        """
        numbers = range(request.sampling.n)
        tasks = [asyncio.ensure_future(self._persist(prompt, request, number, min_version)) for number in numbers]
        try:
            played = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [trajectory for trajectory in played if trajectory is not None]

    async def _persist(
        self, prompt: Prompt, request: GenerateRequest, number: int, min_version: int
    ) -> Trajectory | None:
        """One episode. Where it fails it begins again, with other random numbers: what was sampled may be why."""
        retries = self._config.environment.max_retries
        for attempt in range(1 + retries):
            seed = stream_seed(request.sampling.seed, number, attempt)
            name = f"{request.request_id}-{number}-{attempt}"
            own = GenerateRequest(name, [], replace(request.sampling, n=1, seed=seed))
            try:
                trajectory = await self.play_one(prompt, own, request.request_id, min_version)
            except self.failures as error:
                logger.debug("episode %s: %s", name, error)
                self.statistics["episodes_redone"] += attempt < retries
                continue
            if trajectory is not None:
                return trajectory
            break
        self.statistics["episodes_lost"] += 1
        return None
