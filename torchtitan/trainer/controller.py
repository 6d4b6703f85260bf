"""Rank 0's part of a run: it decides what all ranks do next, evaluates, and writes down what happens."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from torchtitan.config.derived import sleeps_between_batches
from torchtitan.config.job_config import JobConfig
from torchtitan.inference.colocated.rounds import Answer
from torchtitan.report.html import write_report
from torchtitan.report.live import LivePage
from torchtitan.report.metrics import METRICS_FILE, Figure, MetricsLogger
from torchtitan.report.sync_metrics import SyncMetrics
from torchtitan.report.trace import write_trace
from torchtitan.rollout.journal import Journal
from torchtitan.rollout.source import RolloutSource, open_rollouts
from torchtitan.rollout.tokenizer import Tokenizer
from torchtitan.rollout.types import Batch
from torchtitan.trainer import mismatch
from torchtitan.trainer.commands import Command, Kind
from torchtitan.trainer.evaluation import Evaluator
from torchtitan.trainer.signals import SignalFlags
from torchtitan.trainer.weight_path import WeightPath
from torchtitan.utils.events import EventLog
from torchtitan.utils.json_lines import read_json_lines
from torchtitan.weight_sync import faults
from torchtitan.weight_sync.facade import ActorStatus
from torchtitan.weight_sync.publisher import Snapshot

logger = logging.getLogger(__name__)

# How long rank 0 looks for a batch before it looks at signals and owed versions again.
POLL_S = 0.05
# While a version is owed, a batch that is ready is taken, and one that is not is barely waited for.
OWED_POLL_S = 0.01
# Without free slots an owed version is not tried again for this long.
SNAPSHOT_PAUSE_S = 0.25
# How long prompts may go on to an actor that the weight coordinator has evicted, however long a training step is.
EVICTION_LOOK_S = 0.1
REST_TIMES = ("time/sleep_s", "time/wake_s")


class Controller:
    """Context manager; lives on rank 0 only."""

    _watch: concurrent.futures.Future[None] | None = None
    """Ends by itself only with an error"""
    _batch: Batch | None = None
    """Goes to the ranks next, when the actors sleep"""

    def __init__(self, config: JobConfig, run_dir: Path, epoch: str, token: str, signals: SignalFlags):
        self.config = config
        self.run_dir = run_dir
        self.epoch = epoch
        self.token = token
        self.signals = signals
        self._closing = contextlib.ExitStack()
        self._evaluation: concurrent.futures.Future[dict[str, Figure] | None] | None = None
        self._evaluation_due = False
        self._evaluations: list[tuple[float, float]] = []
        self._rest_times = dict.fromkeys(REST_TIMES, 0.0) if sleeps_between_batches(config) else {}
        self._resumed_step: int | None = None
        self._last_snapshot_try = 0.0
        self._newest = 0
        """The newest version that was snapshotted for the actors"""
        self._evictions: dict[str, int] = {}
        self._closed = threading.Event()
        self._mismatched = False
        # Other ranks sit in a collective while rank 0 waits; it must hear from rank 0 well before its deadline.
        self._keep_alive_s = config.comm.train_timeout_seconds / 4

    def __enter__(self) -> Controller:
        config = self.config
        with contextlib.ExitStack() as stack:
            self.tokenizer = Tokenizer(config.model.hf_assets_path)
            self.events = EventLog(self.run_dir / "events.jsonl")
            if injected := faults.active():
                told = config.fault_injection.faults or injected
                self.events.write("fault_injection_is_on", level=logging.WARNING, faults=told)
            self.journal = Journal(self.run_dir)
            stack.callback(self.journal.close)
            self.rollout: RolloutSource = open_rollouts(
                config, self.tokenizer, self.journal, self.events, self.run_dir, self.epoch, self.token
            )
            stack.callback(self.rollout.close)
            self.rollout.launch()
            self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="evaluation")
            stack.callback(self._executor.shutdown, wait=False, cancel_futures=True)
            self._closing = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closing.close()

    def resume(self, version: int, rollout: bytes | None) -> None:
        """Go on after the checkpoint of `version`, with the rollouts that it held."""
        self.journal.resume_at(version)
        self._resumed_step = version
        if rollout is not None:
            self.rollout.restore_state(rollout)
        logger.info("resuming at version %d", version)

    def connect(self, weights: WeightPath) -> None:
        """Give the actors the way by which weights come."""
        self.weights = weights
        self.evaluator = Evaluator(
            self.config, self.rollout.held_out_prompts(), self.rollout.generate, self.rollout.score, self.events
        )
        self.metrics = MetricsLogger(self.config, self.run_dir, resumed_step=self._resumed_step)
        if self.config.metrics.live_port:
            self._closing.callback(LivePage(self.run_dir, self.config.metrics.live_port).close)
        self.sync_metrics = SyncMetrics(self.run_dir, read_json_lines(self.run_dir / METRICS_FILE))
        # Also a run that ends with an error has something to show.
        self._closing.callback(self._draw_report)
        if self.rollout.has_actors:
            self.rollout.connect_weights(weights.coordinator_address)
            self._start_watch()

    def start(self, version: int) -> None:
        """Start the rollouts of version `version`, which has just been published, and an evaluation if one is due.

        After a resume one may be due that the interrupted run did not come to.
        """
        self.journal.append_decision(version, published=True)
        self._newest = version
        self.rollout.start(version)
        rows = read_json_lines(self.run_dir / METRICS_FILE)
        if not any(row.get("step") == version and "eval/version" in row for row in rows):
            self._plan_evaluation(version)

    def decide(self, version: int) -> Command:
        """The next command. Returns within a quarter of comm.train_timeout_seconds, or when the actors sleep.

        Raises:
            UserError: no data came for too long, or the rollouts cannot go on.
        """
        if self._batch is not None:
            held, self._batch = self._batch, None
            with self._timed("time/sleep_s"):
                self.rollout.sleep()
            return Command(Kind.BATCH, held)
        give_up = time.monotonic() + self._keep_alive_s
        while True:
            if self._watch is not None and self._watch.done():
                self._watch.result()
            owed = self.weights.owed is not None
            generates = self.rollout.rounds is not None and self.rollout.rounds.wanted(self._newest)
            if self.signals.stop_requested:
                return Command(Kind.STOP)
            if self.signals.take_export_request():
                return Command(Kind.EXPORT)
            if self._evaluation is not None:
                self._look_at_evaluation(version, timeout=0 if generates else POLL_S)
            elif self._evaluation_due and not owed:
                self._start_evaluation(version)
            elif self._evaluation_due:
                # The version to evaluate is still owed to the actors; it goes out first.
                time.sleep(OWED_POLL_S)
            elif version >= self.config.training.steps:
                return Command(Kind.STOP)
            else:
                poll = 0 if generates else OWED_POLL_S if owed else POLL_S
                batch = self.rollout.next_batch(version, timeout=poll)
                if batch is not None:
                    if not sleeps_between_batches(self.config):
                        return Command(Kind.BATCH, batch)
                    # Until actors sleep takes time of its own: let other ranks hear from rank 0 before.
                    self._batch = batch
                    return Command(Kind.WAIT)
            if generates and self.rollout.rounds is not None:
                return Command(Kind.GENERATE, generation=self.rollout.rounds.begin_round(self._newest))
            now = time.monotonic()
            if owed and self._evaluation is None and now - self._last_snapshot_try > SNAPSHOT_PAUSE_S:
                self._last_snapshot_try = now
                return Command(Kind.SNAPSHOT)
            if now > give_up:
                return Command(Kind.WAIT)

    def generated(self, answers: list[Answer]) -> None:
        """The ranks have generated: what is finished goes back to the rollouts."""
        assert self.rollout.rounds is not None
        self.rollout.rounds.finish_round(answers)

    def make_way(self) -> None:
        """The batch has been trained on, and its version comes next: actors that slept take memory for the weights."""
        with self._timed("time/wake_s"):
            self.rollout.wake("weights")

    def published(self, version: int, published: bool) -> None:
        """Record the decision on a version; in blocking mode, wait until the live actors have it, and are awake."""
        self.journal.append_decision(version, published)
        self._newest = version if published else self._newest
        if published and not self.config.grpo.async_weight_update:
            outcome = self.weights.wait_until_applied(version, self.config.weight_sync.blocking_timeout_s)
            for actor, reason in outcome.missing.items():
                self.events.write(
                    "version_not_applied", level=logging.WARNING, actor=actor, version=version, reason=reason
                )
        with self._timed("time/wake_s"):
            self.rollout.wake("kv_cache")
        self.rollout.set_version(version)
        self._plan_evaluation(version)

    def snapshotted_owed(self, version: int) -> None:
        """Record that a version which had been skipped went out after all."""
        self.journal.append_decision(version, published=True)
        self._newest = version

    def warn_of_mismatch(self, version: int, figures: Mapping[str, Figure]) -> None:
        """Say so where the trainer's log-probs and the engine's are further apart than they should be."""
        fields = mismatch.alarm(self.config, figures)
        # Said when it begins, not in every step that it lasts.
        if fields is not None and not self._mismatched:
            self.events.write("mismatch_kl_alarm", level=logging.WARNING, version=version, **fields)
        self._mismatched = fields is not None

    def expect(self, version: int, token_ids: list[int], log_probs: list[float]) -> None:
        """The trainer's word on the probe under `version`, which actors are held to."""
        self.rollout.expect(version, token_ids, log_probs)

    def take_rest_times(self) -> dict[str, float]:
        """Keys for metrics.jsonl: how long the trainer waited for actors to sleep and to wake since the last call; none
        where they do neither."""
        times, self._rest_times = self._rest_times, dict.fromkeys(self._rest_times, 0.0)
        return times

    @contextlib.contextmanager
    def _timed(self, key: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        if key in self._rest_times:
            self._rest_times[key] += time.monotonic() - started

    def take_evaluations(self) -> list[tuple[float, float]]:
        """Begin and end (seconds since 1970) of the evaluations since the last call; their time belongs to no step."""
        evaluations, self._evaluations = self._evaluations, []
        return evaluations

    def log_step(
        self, version: int, batch: Batch, figures: Mapping[str, Figure], snapshots: Sequence[Snapshot]
    ) -> None:
        step_s = figures["time/step_s"]
        tokens = sum(len(sample.prompt_ids) + len(sample.completion_ids) for sample in batch.samples)
        rate = {"tokens_per_s": tokens / step_s} if step_s else {}
        actors = self.weights.actors()
        states = {name: f"{status.state} v{status.version}" for name, status in actors.items()}
        row = {"policy_version": version} | batch.statistics | dict(figures) | rate
        self.metrics.log_step(version, row | self.sync_metrics.step(row, snapshots), states)
        self.metrics.log_completions(version, batch, self.tokenizer)

    def _start_watch(self) -> None:
        """Watch the actors from a thread: during a training step nobody asks for commands, and prompts go out."""
        executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="evictions")
        self._closing.callback(executor.shutdown)
        self._closing.callback(self._closed.set)
        self._watch = executor.submit(self._watch_actors)

    def _watch_actors(self) -> None:
        while not self._closed.wait(EVICTION_LOOK_S):
            self._note_evictions(self.weights.actors())

    def _note_evictions(self, actors: Mapping[str, ActorStatus]) -> None:
        """Weight sync has its own journal; what concerns an actor's service belongs into the run's events too, and
        what an actor that is gone was working on is redone elsewhere."""
        for name, status in actors.items():
            if status.evictions > self._evictions.get(name, 0):
                self.events.write(
                    "actor_evicted_from_sync", level=logging.WARNING, actor=name, version=status.version,
                    reason=status.reason,
                )  # fmt: skip
                # One that is back by now had only lost its connection.
                if status.state == "EVICTED":
                    self.rollout.redo_elsewhere(name, status.reason)
            self._evictions[name] = status.evictions

    def _draw_report(self) -> None:
        self.metrics.close()
        self.sync_metrics.close()
        logger.info("report: %s", write_report(self.run_dir))
        logger.info("trace: %s", write_trace(self.run_dir))

    def _plan_evaluation(self, version: int) -> None:
        interval = self.config.eval.interval
        regular = version == 0 or version >= self.config.training.steps or (interval > 0 and version % interval == 0)
        self._evaluation_due = self.config.eval.enable and self.rollout.has_actors and regular

    def _start_evaluation(self, version: int) -> None:
        """Evaluate in the background; commands wait for the end, so the weights stand still meanwhile."""
        self._evaluation_due = False
        self._evaluation_started, self._evaluation_began = time.monotonic(), time.time()
        self._evaluation = self._executor.submit(self._run_evaluation, version)

    def _run_evaluation(self, version: int) -> dict[str, Figure] | None:
        started = time.monotonic()
        pinned = self._newest
        self.weights.wait_until_applied(pinned, self.config.eval.timeout_s / 2, at_least=1, counts_as_stall=False)
        self.weights.pin(pinned)
        try:
            remaining = max(self.config.eval.timeout_s - (time.monotonic() - started), 1.0)
            return self.evaluator.evaluate(version, self.epoch, pinned, remaining)
        finally:
            self.weights.unpin()

    def _look_at_evaluation(self, version: int, timeout: float) -> None:
        assert self._evaluation is not None
        done, _ = concurrent.futures.wait([self._evaluation], timeout)
        if not done:
            return
        evaluation, self._evaluation = self._evaluation, None
        seconds = time.monotonic() - self._evaluation_started
        self._evaluations.append((self._evaluation_began, self._evaluation_began + seconds))
        figures = evaluation.result()
        if figures:
            self.metrics.log_evaluation(version, figures)
