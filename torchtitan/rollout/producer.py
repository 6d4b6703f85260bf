"""Rollouts in the background of the trainer's process: a thread with its own asyncio loop drives actors and rewards."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import random
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.colocated.pool import ColocatedPool
from torchtitan.inference.types import Completion, GenerateRequest, Tag
from torchtitan.rollout.datasets import load_datasets
from torchtitan.rollout.flow import RolloutFlow
from torchtitan.rollout.group_maker import Generator, GroupMaker, Scorer
from torchtitan.rollout.journal import Journal
from torchtitan.rollout.prompts import PromptMaker, PromptStream, TextTokenizer
from torchtitan.rollout.types import Batch, Prompt
from torchtitan.utils.background_loop import BackgroundLoop

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# The loop answers at once; this is for a machine that is very busy.
CALL_TIMEOUT_S = 60.0
LAUNCH_TIMEOUT_S = 240.0
CLOSE_TIMEOUT_S = 30.0


class RolloutProducer:
    """Produces batches of scored groups. Its methods may be called from any thread.

    Order of calls: launch, connect_weights, restore_state (on a resume), start, then in turn next_batch, sleep, wake
    (twice) and set_version; close at the end.
    """

    has_actors = True

    def __init__(
        self,
        config: JobConfig,
        pool: Generator,
        rewards: Scorer,
        tokenizer: TextTokenizer,
        journal: Journal | None,
        epoch: str,
        rounds: ColocatedPool | None = None,
    ):
        """rounds: the pool again, where the trainer's own devices generate.

        Raises UserError for a dataset or tokenizer that does not fit the configuration.
        """
        self.rounds = rounds
        train, self._held_out = load_datasets(config)
        self._config = config
        self._pool = pool
        self._rewards = rewards
        self._maker = PromptMaker(config, tokenizer)
        self._groups = GroupMaker(config, pool, rewards, tokenizer, epoch)
        stream = PromptStream(train, self._maker, config.training.seed, config.rollout.shuffle)
        self._flow = RolloutFlow(config, self._groups, stream, journal)
        self._loop: BackgroundLoop | None = None

    def launch(self, timeout: float = LAUNCH_TIMEOUT_S) -> None:
        """Start the reward workers, and begin to start the actors (their readiness is not waited for)."""
        self._loop = BackgroundLoop("rollouts")
        self._call(self._launch(), timeout)

    def connect_weights(self, coordinator: str) -> None:
        """Tell all actors, present and future ones, where their weights come from (host:port)."""
        self._call(self._pool.connect_weights(coordinator))

    def expect(self, version: int, token_ids: list[int], log_probs: list[float]) -> None:
        """Tell what the trainer computes of the probe with the weights of `version`: actors have to agree."""
        self._call(_later(self._pool.expect, version, token_ids, log_probs))

    def redo_elsewhere(self, actor: str, reason: str) -> None:
        """Weight synchronisation has evicted an actor: its unfinished groups are redone on others."""
        self._call(self._pool.redo_elsewhere(actor, reason))

    def sleep(self) -> None:
        """The trainer is about to train: actors that share its devices give their memory back. Returns when they have,
        or their deadlines are over."""
        inference = self._config.inference
        self._call(self._pool.sleep(), inference.drain_timeout_s + inference.sleep_timeout_s + CALL_TIMEOUT_S)

    def wake(self, tag: Tag) -> None:
        """Actors that sleep take a part of their memory again: the weights before they get a version, the KV cache when
        they have it. Returns when they have, or their deadline is over."""
        self._call(self._pool.wake(tag), self._config.inference.sleep_timeout_s + CALL_TIMEOUT_S)

    def start(self, version: int) -> None:
        """Begin to generate, for the batch of `version`."""
        self._call(_later(self._flow.start, version))

    def set_version(self, version: int) -> None:
        """Tell the staleness gate that the trainer has reached `version`."""
        self._call(_later(self._flow.set_version, version))

    def next_batch(self, version: int, timeout: float) -> Batch | None:
        """The batch to train on at `version`, None where it is not complete within `timeout` seconds.

        Raises:
            UserError: no usable data for rollout.data_timeout_s, all actors given up, or rewards that always fail.
        """
        return self._call(self._flow.next_batch(version, timeout), timeout + CALL_TIMEOUT_S)

    def export_state(self) -> bytes:
        """Finished but unused groups, and the position in the prompts, for a checkpoint between two steps."""
        return self._call(_later(self._flow.export_state))

    def restore_state(self, state: bytes) -> None:
        """Go on from a checkpoint's state, before start(). Raises UserError if the training prompts have changed."""
        self._call(_later(self._flow.restore_state, state))

    def generate(
        self, requests: Sequence[GenerateRequest], timeout_s: float, min_version: int = 0
    ) -> list[list[Completion]]:
        """Completions of all requests, in order, through the same actors (for evaluation).

        The requests get the stop tokens of training; actors that serve less than `min_version` are left out.

        Raises:
            TimeoutError: not all came within `timeout_s`.
            UserError: no actor can make them.
        """
        return self._call(self._generate(requests, timeout_s, min_version), timeout_s + CALL_TIMEOUT_S)

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], timeout_s: float
    ) -> list[list[float | None]]:
        """Rewards of completions by eval.reward_function (or else the first of rewards.functions), without weights.

        Raises:
            TimeoutError: not all came within `timeout_s`.
        """
        return self._call(self._score(prompts, completions, timeout_s), timeout_s + CALL_TIMEOUT_S)

    def held_out_prompts(self) -> list[Prompt]:
        """The first eval.num_prompts of the held-out prompts that fit, in an order that is the same in every run."""
        order = list(range(len(self._held_out)))
        random.Random("held out").shuffle(order)
        prompts: list[Prompt] = []
        for index in order:
            if len(prompts) == self._config.eval.num_prompts:
                break
            prompt = self._maker.make(self._held_out[index], index)
            if self._maker.fits(prompt):
                prompts.append(prompt)
        return prompts

    def close(self) -> None:
        """Stop generating, the reward workers and the actors that we started."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        try:
            loop.call(self._close(), CLOSE_TIMEOUT_S)
        except (UserError, concurrent.futures.TimeoutError):
            logger.warning("rollouts did not stop within %g s; what is left ends with this process", CLOSE_TIMEOUT_S)
        finally:
            loop.close()

    def _call(self, work: Coroutine[Any, Any, Result], timeout_s: float = CALL_TIMEOUT_S) -> Result:
        if self._loop is None:
            work.close()
            raise RuntimeError("RolloutProducer.launch() has not been called, or it is closed")
        return self._loop.call(work, timeout_s)

    async def _launch(self) -> None:
        await self._rewards.start()
        await self._pool.start()

    async def _close(self) -> None:
        await self._flow.close()
        await asyncio.gather(self._rewards.close(), self._pool.close())

    async def _generate(
        self, requests: Sequence[GenerateRequest], timeout_s: float, min_version: int
    ) -> list[list[Completion]]:
        work = [self._pool.generate(self._groups.with_stop_tokens(request), min_version) for request in requests]
        return await _gather(work, timeout_s)

    async def _score(
        self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], timeout_s: float
    ) -> list[list[float | None]]:
        name = self._config.eval.reward_function or self._config.rewards.functions[0]
        work = [self._groups.score(prompt, group, [name]) for prompt, group in zip(prompts, completions, strict=True)]
        scores = await _gather(work, timeout_s)
        return [[rewards[name] for _, rewards in group] for group in scores]


async def _later(function: Any, *arguments: Any) -> Any:
    """Run a plain function in the loop's thread, where all state lives."""
    return function(*arguments)


async def _gather(work: Sequence[Coroutine[Any, Any, Result]], timeout_s: float) -> list[Result]:
    """All results; where one fails or time runs out, the others are cancelled."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return list(await asyncio.wait_for(asyncio.gather(*tasks), timeout_s))
    except asyncio.TimeoutError:
        raise TimeoutError(f"not done within {timeout_s:g} s") from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
