"""The evaluations of a run: which are due at a version, the one that goes on, and what came out. On rank 0 alone."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan.config.evaluations import eval_configs
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.report.metrics import Figure, MetricsLogger
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.data.demonstrations import Demonstrations
from torchtitan.rollout.flow.rollouts import CALL_TIMEOUT_S, Rollouts
from torchtitan.rollout.types import Batch
from torchtitan.trainer.evaluation import Evaluator, evaluate_all
from torchtitan.utils.json_lines import EventLog
from torchtitan.weight_sync.facade import WeightSync

logger = logging.getLogger(__name__)


class EvaluationSchedule:
    """Evaluates what the policy samples, in the rollouts' thread, and takes the loss of held-out demonstrations, which
    the ranks compute. The weights must not change while it is running."""

    is_due = False
    """Whether to evaluate the current version before anything is trained"""
    has_reached_goal = False
    """Whether an evaluation has reached eval.stop_at"""
    _running: concurrent.futures.Future[dict[str, Figure] | None] | None = None

    def __init__(
        self,
        config: JobConfig,
        epoch: str,
        rollouts: Rollouts | None,
        demonstrations: Demonstrations | None,
        sync: WeightSync | None,
        events: EventLog,
    ):
        """rollouts: what samples, if anything does. sync: pins the version at actors that pull."""
        self.config, self._rollouts, self._sync = config, rollouts, sync
        self._times: list[tuple[float, float]] = []
        self._evaluators: dict[str, Evaluator] = {}
        self._due: dict[str, Evaluator] = {}
        """The sets of the current evaluation"""
        self._held_out = demonstrations.held_out() if demonstrations and config.eval.is_used else None
        """Demonstrations whose loss evaluations compute"""
        self._loss: dict[str, Figure] = {}
        """The loss of the current evaluation"""
        if rollouts is not None and config.eval.is_used:
            self._evaluators = {
                name: Evaluator(task.config, epoch, task.held_out_prompts(), task.groups, events)
                for (name, _), task in zip(eval_configs(config), rollouts.sets, strict=True)
            }

    def begin(self, metrics: MetricsLogger, tokenizer: Tokenizer, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log to `metrics` from here on. rows: those of metrics.jsonl, which show what was evaluated before a
        resume."""
        self._metrics = metrics
        self._evaluated = {row["step"] for row in rows if "eval/version" in row}
        if self.config.training.steps == 0:
            # Nothing is trained, so completions.jsonl is that of the evaluations.
            for name, evaluator in self._evaluators.items():
                evaluator.record = functools.partial(metrics.log_evaluated, name, tokenizer)

    @property
    def is_running(self) -> bool:
        """Whether samples of the current version are being evaluated."""
        return self._running is not None

    @property
    def batch_without_loss(self) -> Batch | None:
        """The held-out demonstrations, where there are any and their loss under the current version is not known."""
        return None if self._loss else self._held_out

    def reach(self, version: int) -> None:
        """Find out what is due at `version`, which is now the current one."""
        self._due = {
            name: evaluator
            for name, evaluator in self._evaluators.items()
            if self._is_regular(version, evaluator.config.eval.interval)
        }
        regular = bool(self._due) if self._evaluators else self._is_regular(version, self.config.eval.interval)
        self.is_due = self.config.eval.is_used and regular and version not in self._evaluated

    def _is_regular(self, version: int, interval: int) -> bool:
        regular = interval > 0 and version % interval == 0
        return regular or version == 0 or version >= self.config.training.steps

    def take_loss(self, version: int, figures: Mapping[str, Figure], started_at: float, seconds: float) -> None:
        """Take the loss of held-out demonstrations, whose computation began at `started_at` (Unix seconds) and took so
        many seconds; figures from sampling are added to it if there are any."""
        self._times.append((started_at, started_at + seconds))
        self._loss = {"eval/version": version, "policy_version": version, **figures}
        if self._rollouts is None:
            self.is_due = False
            self._log(version, {})

    def start(self, version: int, newest: int) -> None:
        """Evaluate in the background what the actors sample with version `newest`, as the figures of `version`."""
        assert self._rollouts is not None
        self.is_due = False
        self._started, self._began = time.monotonic(), time.time()
        self._running = self._rollouts.loop.submit(self._evaluate, version, newest)

    def look(self, version: int, timeout: float) -> None:
        """Log the figures if the evaluation ends within `timeout` seconds.

        Raises UserError if it goes on long after its deadline.
        """
        assert self._running is not None
        done, _ = concurrent.futures.wait([self._running], timeout)
        if not done:
            seconds = time.monotonic() - self._started
            if seconds > self.config.eval.timeout_s + CALL_TIMEOUT_S:
                self._running.cancel()
                raise UserError(f"an evaluation has not ended after {seconds:.0f} s: the rollout thread hangs")
            return
        ended, self._running = self._running, None
        seconds = time.monotonic() - self._started
        self._times.append((self._began, self._began + seconds))
        self._log(version, ended.result() or {})

    def take_times(self) -> list[tuple[float, float]]:
        """Return begin and end (Unix seconds) of evaluations since the last call; no step includes their time."""
        times, self._times = self._times, []
        return times

    async def _evaluate(self, version: int, newest: int) -> dict[str, Figure] | None:
        limit = self.config.eval.timeout_s
        if self._sync is None:
            return await evaluate_all(self._due, len(self._evaluators), version, newest, limit)
        started = time.monotonic()
        wait = functools.partial(self._sync.wait_until_applied, at_least=1, counts_as_stall=False)
        await asyncio.to_thread(wait, newest, limit / 2)
        await asyncio.to_thread(self._sync.pin, newest)
        try:
            left = max(limit - (time.monotonic() - started), 1.0)
            return await evaluate_all(self._due, len(self._evaluators), version, newest, left)
        finally:
            self._sync.unpin()

    def _log(self, version: int, figures: Mapping[str, Figure]) -> None:
        figures, self._loss = {**self._loss, **figures}, {}
        if figures:
            self._metrics.log_evaluation(version, figures)
        goal, reached = self.config.eval.stop_at, figures.get("eval/pass@1")
        if goal and reached is not None and reached >= goal:
            logger.info("eval.stop_at = %g is reached after step %d: the run ends", goal, version)
            self.has_reached_goal = True
