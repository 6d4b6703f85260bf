"""Rank 0's part of a run: it decides what all ranks do next, and records what happens."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from torchtitan.config.job_config import JobConfig
from torchtitan.inference.engines.replicas.replica_pool import ReplicaPool
from torchtitan.inference.pool.actor_pool import InferencePool
from torchtitan.inference.pool.weight_probe import sampling_tolerance
from torchtitan.inference.types import Tag
from torchtitan.report.boards import Boards
from torchtitan.report.live_server import LivePage
from torchtitan.report.metrics import METRICS_FILE, Figure, MetricsLogger, check_rows
from torchtitan.report.page import write_report
from torchtitan.report.sync_metrics import SyncMetrics
from torchtitan.report.timeline import write_trace
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.data.demonstrations import Demonstrations
from torchtitan.rollout.flow.journal import Journal, ReplaySource, read_records
from torchtitan.rollout.flow.rollouts import CALL_TIMEOUT_S, Rollouts
from torchtitan.rollout.types import Batch
from torchtitan.trainer import mismatch
from torchtitan.trainer.checkpoint import Restored
from torchtitan.trainer.commands import Command, Kind
from torchtitan.trainer.evaluation_schedule import EvaluationSchedule
from torchtitan.trainer.run_dir import go_back_to
from torchtitan.trainer.signals import SignalFlags
from torchtitan.trainer.weight_path import WeightPath
from torchtitan.utils.json_lines import EventLog, read_json_lines
from torchtitan.weight_sync.actor_state import OUT, ActorState
from torchtitan.weight_sync.facade import ActorStatus, WeightSync
from torchtitan.weight_sync.trainer.publisher import Snapshot

logger = logging.getLogger(__name__)

# How long rank 0 waits for a batch before it checks signals and a pending version again.
POLL_S = 0.05
# The same wait while a version is pending.
PENDING_POLL_S = 0.01
# How long a pending version waits before it is tried again if no slot is free.
SNAPSHOT_PAUSE_S = 0.25
# The interval of checks for actors that weight sync has lost, so that prompts stop going to them during long steps.
EVICTION_LOOK_S = 0.1
SLEEP_TIMES = ("time/sleep_s", "time/wake_s")


@dataclass
class DataPath:
    """Where the batches of rank 0 come from, and where it records them."""

    tokenizer: Tokenizer
    events: EventLog
    journal: Journal
    rollouts: Rollouts | None = None
    prepared: ReplaySource | Demonstrations | None = None
    """Batches that need no sampling; rollouts then serve only evaluations"""
    live_page: LivePage | None = None


class Controller:
    """Exists only on rank 0. It uses the engines' pool and the rollouts directly, in their own thread.

    A skipped version is pending until it, or a newer one, has been sent to the actors.
    """

    _batch: Batch | None = None
    """The batch for the ranks once the actors sleep"""
    _watch: concurrent.futures.Future[None] | None = None
    """It ends by itself only with an error"""

    def __init__(
        self,
        config: JobConfig,
        run_dir: Path,
        epoch: str,
        signals: SignalFlags,
        data: DataPath,
        weights: WeightPath,
        restored: Restored | None = None,
        lost: str = "",
    ):
        """weights: the path by which weights leave the trainer. restored: the checkpoint to continue from. lost: why
        the ranks were restarted; the batches that they had trained on since that checkpoint then come first.

        Raises UserError for rollouts of other training prompts, or without a package that [metrics] asks for.
        """
        self.config, self.run_dir, self.signals, self.weights = config, run_dir, signals, weights
        self.events, self.journal, self.tokenizer = data.events, data.journal, data.tokenizer
        self.rollouts, self.prepared = data.rollouts, data.prepared
        self.demonstrations = data.prepared if isinstance(data.prepared, Demonstrations) else None
        pool = self.rollouts and self.rollouts.pool
        self.colocated = pool if isinstance(pool, ReplicaPool) else None
        self.actors = pool if isinstance(pool, InferencePool) else None
        self.sync = weights if isinstance(weights, WeightSync) else None
        self._sleep_times = dict.fromkeys(SLEEP_TIMES, 0.0) if config.sleeps_between_batches else {}
        """Empty unless actors sleep while the trainer trains"""
        self._last_snapshot_try = 0.0
        self._newest = 0
        """The newest version that was sent to the actors"""
        self._evictions: dict[str, int] = {}
        self._late: set[str] = set()
        """Actors that an event has called late"""
        self._mismatched = False
        # Other ranks sit in a collective while rank 0 waits, so it must send a command well before the deadline.
        self._keep_alive_s = config.comm.train_timeout_seconds / 4
        if self.rollouts is not None:
            self._call = self.rollouts.loop.call
        if restored is not None and restored.rollout is not None:
            self._restore(restored.rollout)
        self.evaluations = EvaluationSchedule(config, epoch, self.rollouts, self.demonstrations, self.sync, self.events)
        if self.actors is not None and self.sync is not None:
            self._call(self.actors.connect_weights, self.sync.registry_address, self.sync.published)
        if restored is not None:
            check_rows(run_dir)
            deque(read_records(self.journal.path), maxlen=0)
            # All that can be refused has been. From here on files are cut back, and the console is taken until close().
            self._resume(restored.version, lost)
        resumed_step = None if restored is None else restored.version
        describe_page = None if data.live_page is None else data.live_page.describe_end
        boards = Boards(config, run_dir, self.events, resumed_step, describe_page)
        self.metrics = MetricsLogger(config, run_dir, resumed_step, boards)
        rows = read_json_lines(run_dir / METRICS_FILE)
        self.evaluations.begin(self.metrics, self.tokenizer, rows)
        self.sync_metrics = SyncMetrics(run_dir, rows)
        if self.rollouts is not None and self.actors is not None and self.sync is not None:
            self._watch = self.rollouts.loop.submit(self._watch_actors)

    def _restore(self, state: bytes) -> None:
        """Continue with the data where a checkpoint was; see rollout_state."""
        if self.demonstrations is not None:
            self.demonstrations.restore_state(state)
        elif self.rollouts is not None and self.prepared is None:
            self._call(self.rollouts.flow.restore_state, state)

    def _resume(self, version: int, lost: str) -> None:
        """Cut the run's files back to the checkpoint of `version`. After a restart of the ranks, train on the recorded
        batches again, and record what was lost."""
        go_back_to(self.run_dir, version)
        if not lost:
            self.journal.resume_at(version)
            logger.info("resuming at version %d", version)
            if version >= self.config.training.steps:
                logger.warning("training.steps = %d: nothing is left to train", self.config.training.steps)
            return
        decided, recorded = self.journal.set_aside(version)
        fields = {"reason": lost, "steps_again": decided - version, "batches_kept": len(recorded.versions)}
        if self.rollouts is not None:
            fields["groups_lost"] = self._call(self.rollouts.flow.train_again, recorded)
        self.journal.append_restart(version, fields)
        self.events.write("ranks_started_again", level=logging.WARNING, version=version, **fields)

    def close(self) -> None:
        """Stop watching the actors, and write the report. A file that cannot be written, or made from damaged rows, is
        only skipped, because the outcome of the run is already decided."""
        if self._watch is not None:
            self._watch.cancel()
        ends: list[Callable[[], None]] = [
            self.metrics.close,
            self.sync_metrics.close,
            lambda: logger.info("report: %s", write_report(self.run_dir)),
            lambda: logger.info("trace: %s", write_trace(self.run_dir)),
        ]
        for end in ends:
            try:
                end()
            except (OSError, LookupError, TypeError, ValueError) as error:
                logger.error("a file of %s could not be written: %r", self.run_dir, error)

    def start(self, version: int) -> None:
        """Start the rollouts of `version`, which has just been published, and an evaluation if one is due.

        After a resume, one may be due that the interrupted run did not reach.
        """
        self.journal.append_decision(version, published=True)
        self._newest = version
        self._reach(version)

    def decide(self, version: int) -> Command:
        """Return the next command, within a quarter of comm.train_timeout_seconds or when the actors sleep.

        Raises:
            UserError: no data came for too long, or the rollouts cannot go on.
        """
        if self._batch is not None:
            held, self._batch = self._batch, None
            self._sleep()
            return Command(Kind.BATCH, held)
        give_up = time.monotonic() + self._keep_alive_s
        while True:
            if self._watch is not None and self._watch.done():
                self._watch.result()
            command = self._signalled() or self._advance(version) or self._meanwhile()
            if command is None and time.monotonic() > give_up:
                command = Command(Kind.WAIT)
            if command is not None:
                return command

    def _signalled(self) -> Command | None:
        """What a signal has asked for."""
        if self.signals.stop_requested:
            return Command(Kind.STOP)
        return Command(Kind.EXPORT) if self.signals.take_export_request() else None

    def _advance(self, version: int) -> Command | None:
        """Evaluate `version`, end, or train on the next batch; waits a little for what is not there yet."""
        if self.evaluations.is_running:
            self.evaluations.look(version, timeout=0 if self._may_generate else POLL_S)
            return None
        if self.evaluations.is_due:
            return self._evaluate(version)
        if version >= self.config.training.steps or self.evaluations.has_reached_goal:
            return Command(Kind.DONE)
        return self._train(version)

    def _evaluate(self, version: int) -> Command | None:
        held_out = self.evaluations.batch_without_loss
        if held_out is not None:
            return Command(Kind.EVALUATE, held_out)
        if self._is_pending:
            # The version to evaluate must be sent to the actors first.
            time.sleep(PENDING_POLL_S)
        else:
            self.evaluations.start(version, self._newest)
        return None

    def _train(self, version: int) -> Command | None:
        timeout = PENDING_POLL_S if self._is_pending else POLL_S
        batch = self._next_batch(version, timeout=0 if self._may_generate else timeout)
        if batch is None:
            return None
        if not self._sleep_times:
            return Command(Kind.BATCH, batch)
        # Putting actors to sleep takes time, so send the other ranks a command first.
        self._batch = batch
        return Command(Kind.WAIT)

    def _meanwhile(self) -> Command | None:
        """What the ranks can do while there is nothing to train on: sample, or send a version that was skipped."""
        if self.colocated is not None and self._may_generate:
            return Command(Kind.GENERATE, generation=self.colocated.begin_round(self._newest))
        now = time.monotonic()
        if self._is_pending and not self.evaluations.is_running and now - self._last_snapshot_try > SNAPSHOT_PAUSE_S:
            self._last_snapshot_try = now
            return Command(Kind.SNAPSHOT)
        return None

    @property
    def _is_pending(self) -> bool:
        """Whether a version was skipped, and has to be sent to the actors yet."""
        return self.sync is not None and self.sync.pending_version is not None

    @property
    def _may_generate(self) -> bool:
        """Whether requests wait for an engine in the ranks' own processes."""
        return self.colocated is not None and self.colocated.wanted(self._newest)

    def published(self, version: int, published: bool) -> None:
        """Record the decision on a version; in blocking mode, wait until the live actors have it, and are awake."""
        self._decide(version, published)
        self._newest = version if published else self._newest
        if published and self.sync is not None and not self.config.grpo.async_weight_update:
            outcome = self.sync.wait_until_applied(version, self.config.blocking_timeout_s)
            for actor, reason in outcome.missing.items():
                self.events.write(
                    "version_not_applied", level=logging.WARNING, actor=actor, version=version, reason=reason
                )
        self.wake("kv_cache")
        self._reach(version)

    def published_late(self, version: int) -> None:
        """Record that a skipped version was sent after all."""
        self._decide(version, published=True)
        self._newest = version

    def _decide(self, version: int, published: bool) -> None:
        for overtaken in [] if self.sync is None else self.sync.take_overtaken():
            self.journal.append_decision(overtaken, published=False)
        self.journal.append_decision(version, published)

    def expect(self, version: int, token_ids: list[int], log_probs: list[float], following: np.ndarray) -> None:
        """Make the actors' log-probs of the probe, and of what they sample behind it, be compared with the trainer's
        under `version`."""
        assert self.actors is not None
        self.actors.answers.expect(version, token_ids, log_probs, following)

    def wake(self, tag: Tag) -> None:
        """Make sleeping actors reallocate a part of their memory: the weights before they get a version, the KV cache
        afterwards. Returns when they have done so or their deadline has passed."""
        if self._sleep_times and self.actors is not None:
            with self._timed("time/wake_s"):
                timeout_s = self.config.inference.sleep_timeout_s + CALL_TIMEOUT_S
                self._call(self.actors.wake, tag, timeout_s=timeout_s)

    def rollout_state(self) -> bytes | None:
        """Return, for a checkpoint between two steps, finished but unused groups and the position in the prompts."""
        if self.demonstrations is not None:
            return self.demonstrations.export_state()
        return None if self.rollouts is None else self._call(self.rollouts.flow.export_state)

    def take_sleep_times(self) -> dict[str, float]:
        """Return keys for metrics.jsonl: how long the trainer waited for actors to sleep and wake since the last call;
        none if they do neither."""
        times, self._sleep_times = self._sleep_times, dict.fromkeys(self._sleep_times, 0.0)
        return times

    def log_step(
        self,
        version: int,
        batch: Batch,
        figures: Mapping[str, Figure],
        snapshots: Sequence[Snapshot],
        actors: Mapping[str, mismatch.ActorFigures] | None = None,
    ) -> None:
        """Record a trained batch. Actors whose log-probs are not the trainer's are evicted, and a batch that differs by
        more than its age explains gives a warning."""
        step_s = figures["time/step_s"]
        tokens = sum(sample.num_tokens for sample in batch.samples)
        rate = {"tokens_per_s": tokens / step_s} if step_s else {}
        row = {"policy_version": version} | batch.statistics | dict(figures) | rate
        self.metrics.log_step(version, row | self.sync_metrics.step_behind(row, snapshots), self.weights.states())
        self.metrics.log_completions(version, batch, self.tokenizer)
        self._hold_against(batch.version, actors or {})
        fields = mismatch.alarm(self.config, row)
        # Warn when it begins, not in every step while it lasts.
        if fields is not None and not self._mismatched:
            self.events.write("mismatch_kl_alarm", level=logging.WARNING, version=version, **fields)
        self._mismatched = fields is not None

    def _hold_against(self, version: int, actors: Mapping[str, mismatch.ActorFigures]) -> None:
        for name, reason in mismatch.judge_actors(self.config, actors, version).items():
            if reason:
                fields = {"version": version, **vars(actors[name]), "bound": sampling_tolerance(self.config)}
                self.events.write("log_probs_differ", level=logging.ERROR, actor=name, **fields, reason=reason)
            if self.actors is not None:
                self._call(self.actors.judge_samples, name, version, reason)

    def _reach(self, version: int) -> None:
        """Start the rollouts for the batch of `version`, and perhaps its evaluation."""
        if self.rollouts is not None and self.prepared is None:
            # Without steps this only evaluates: rewards alone are told the version.
            trains = self.config.training.steps > 0
            self._call(self.rollouts.flow.set_version if trains else self.rollouts.rewards.set_step, version)
        elif self.demonstrations is None:
            return
        self.evaluations.reach(version)

    def _next_batch(self, version: int, timeout: float) -> Batch | None:
        if self.prepared is not None:
            return self.prepared.next_batch(version)
        assert self.rollouts is not None
        return self._call(self.rollouts.flow.next_batch, version, timeout, timeout_s=timeout + CALL_TIMEOUT_S)

    def _sleep(self) -> None:
        """Make actors on the trainer's devices free their memory before training. Returns when they have done so or
        their deadlines have passed."""
        assert self.actors is not None
        inference = self.config.inference
        with self._timed("time/sleep_s"):
            timeout_s = inference.drain_timeout_s + inference.sleep_timeout_s + CALL_TIMEOUT_S
            self._call(self.actors.sleep, timeout_s=timeout_s)

    @contextlib.contextmanager
    def _timed(self, key: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self._sleep_times[key] += time.monotonic() - started

    async def _watch_actors(self) -> None:
        """Watch for lost actors during a training step, when prompts go out but no command is requested."""
        while True:
            await self._note_evictions(self.weights.actors())
            if self.config.inference.discover and self.actors is not None and self.sync is not None:
                await self.actors.admit(self.sync.guests())
            await asyncio.sleep(EVICTION_LOOK_S)

    async def _note_evictions(self, actors: Mapping[str, ActorStatus]) -> None:
        """Copy evictions and missed deadlines from weight sync's journal to the run's events. The requests of an actor
        that is gone are redone on others."""
        for name, status in actors.items():
            if status.evictions > self._evictions.get(name, 0):
                self.events.write(
                    "actor_evicted_from_sync", level=logging.WARNING, actor=name, version=status.version,
                    reason=status.eviction,
                )  # fmt: skip
                # An actor that is back by now had only lost its connection.
                if status.state in OUT and self.actors is not None:
                    await self.actors.redo_elsewhere(name, status.eviction)
            self._evictions[name] = status.evictions
        late = {name for name, status in actors.items() if status.state is ActorState.LATE}
        for name in sorted(late - self._late):
            late_actor = actors[name]
            self.events.write(
                "actor_late", level=logging.WARNING, actor=name, version=late_actor.version, reason=late_actor.reason
            )
        self._late = late
