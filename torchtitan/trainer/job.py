"""One run on one rank: puts the parts together, and takes them apart in reverse order whatever happens."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from torchtitan.config.device_memory import (
    allocator_settings,
)
from torchtitan.config.gpu_defaults import trains_on_gpu
from torchtitan.config.job_config import JobConfig
from torchtitan.config.optimizer_step import warn_long_warmup, warn_no_fp32_masters
from torchtitan.config.run_folders import CHECKPOINTS
from torchtitan.config.source_configs import stop_tokens
from torchtitan.distributed import device
from torchtitan.distributed.collectives import broadcast_bytes, gather_bytes
from torchtitan.distributed.placement import ParallelDims
from torchtitan.errors import UserError, exit_code_of
from torchtitan.inference.engines.registry import engine_of
from torchtitan.inference.engines.replicas.replica_pool import Round
from torchtitan.inference.pool.weight_probe import sampled_behind
from torchtitan.models.layers.batch_invariance import size_message
from torchtitan.models.shape.untrained_files import prediction_heads
from torchtitan.report.live_server import LivePage
from torchtitan.report.metrics import set_up_logging
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.data.demonstrations import Demonstrations
from torchtitan.rollout.flow.journal import Journal, ReplaySource
from torchtitan.rollout.flow.rollouts import make_rollouts
from torchtitan.rollout.types import Batch
from torchtitan.trainer import mismatch
from torchtitan.trainer.checkpoint import SAVE_TIMEOUT_S, Checkpointer, Restored
from torchtitan.trainer.commands import Command, Kind, share_command
from torchtitan.trainer.controller import Controller, DataPath
from torchtitan.trainer.origins import Origins
from torchtitan.trainer.policy_trainer import BatchResult, PolicyTrainer
from torchtitan.trainer.run_dir import (
    Start,
    changed_keys,
    claim,
    locked,
    new_epoch,
    open_run_directory,
    tables_of,
    whole_steps,
)
from torchtitan.trainer.signals import SignalFlags
from torchtitan.trainer.weight_path import open_weight_path
from torchtitan.utils.json_lines import EventLog, StepRecorder
from torchtitan.utils.machine import raise_descriptor_limit
from torchtitan.utils.provenance import provenance
from torchtitan.weight_sync.facade import WeightSync

logger = logging.getLogger(__name__)

# What machines of one job may differ in.
PER_MACHINE_KEYS = ("training.threads",)


class TrainingJob:
    """Context manager around a run. The same on every rank, but for `controller`, which only rank 0 has."""

    controller: Controller | None = None

    def __init__(self, config: JobConfig):
        self.config = config
        self.version = 0
        self._sleeps = config.sleeps_between_batches
        self._closing = contextlib.ExitStack()
        self._waited = self._probe_s = 0.0
        self._stepped = self._done = False
        self._failure: UserError | None = None
        self._events: EventLog | None = None
        """On rank 0, once the start of the run is recorded there"""
        self._mismatch: UserError | None = None
        """Why the run must not go on, known on every rank"""

    def __enter__(self) -> TrainingJob:
        try:
            self._build()
        except BaseException as error:
            self._end(error)
            raise
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """Record why the run ends, and take its parts down; the report, which says it too, is drawn then."""
        if self._events is not None:
            code, reason = self._outcome(error)
            # Whoever catches the error shows it.
            level = logging.WARNING if code else logging.INFO
            if error is not None:
                level = logging.DEBUG
            with contextlib.suppress(OSError):
                self._events.write("run_ended", level=level, code=code, reason=reason, version=self.version)
        self._closing.close()

    def _outcome(self, error: BaseException | None) -> tuple[int, str]:
        """Return the exit code of this rank, and why it ends."""
        if error is not None:
            reason = str(error) if isinstance(error, UserError) else repr(error)
            return exit_code_of(error), reason
        if self.signals.stop_signal is not None:
            return self.exit_code, f"stopped by {signal.Signals(self.signals.stop_signal).name}"
        trained = self.version >= self.config.training.steps
        return self.exit_code, "all steps are trained" if trained else "eval.stop_at is reached"

    def _record_start(self, events: EventLog) -> None:
        self._events = events
        facts: dict[str, Any] = {"version": self.version, "ranks": device.world_size(), **provenance()}
        events.write("run_started", **facts)
        if meaning := prediction_heads(self.config):
            events.write("prediction_heads_kept", level=logging.WARNING, meaning=meaning)

    @property
    def exit_code(self) -> int:
        """0, or 128 + the signal that stopped the run. Rank 0 speaks for all."""
        return 0 if self.controller is None else self.signals.exit_code

    def start(self) -> None:
        """Publish the initial weights, then start the rollouts."""
        if self.sync is not None:
            self.sync.reserve()
        self._offer_version(votes_against=0)
        if self.controller is not None:
            self.controller.start(self.version)
        self._boundary = time.perf_counter()

    def load(self, folder: Path, step: int) -> bool:
        """Take the policy of a checkpoint in the folder of any run's checkpoints, to evaluate it (collective). False if
        it is not there any more: a run keeps only its latest ones (checkpoint.keep_latest_k)."""
        if self.sync is not None:
            self.sync.fence()
        self.checkpointer.folder = folder
        try:
            self.version = self.checkpointer.load(step, policy_only=True).version
        except UserError:
            if self.checkpointer.has(step):
                raise
            return False
        return True

    def next_command(self) -> Command:
        """What all ranks do next, as rank 0 decides."""
        started, started_at = time.perf_counter(), time.time()
        decision = None
        if self.controller is not None:
            try:
                stops = self._mismatch is not None
                decision = Command(Kind.STOP) if stops else self.controller.decide(self.version)
            except UserError as error:
                # No data, no actors: all ranks leave in order, so that what was trained is saved.
                self._failure = error
                decision = Command(Kind.STOP)
        command = share_command(decision)
        self._waited += time.perf_counter() - started
        self._recorder.add("data wait", started_at)
        self._commanded_at = time.time()
        self._done = command.kind is Kind.DONE or self.version >= self.config.training.steps
        if command.kind in (Kind.BATCH, Kind.EVALUATE, Kind.STOP, Kind.DONE) and self.replica is not None:
            self.replica.release_memory()
        if command.kind is Kind.STOP and not self._done:
            self.signals.start_deadline()
        return command

    def generate(self, generation: Round) -> None:
        """Have the engines on the trainer's own devices sample for a while; to a step that is waiting for its data."""
        assert self.replica is not None
        started, started_at = time.perf_counter(), time.time()
        answers = self.replica.run(generation)
        if self.controller is not None and self.controller.colocated is not None and answers is not None:
            self.controller.colocated.finish_round(answers)
        self._waited += time.perf_counter() - started
        self._recorder.add("rollout", started_at)

    def evaluate(self, batch: Batch) -> None:
        """Compute the loss of held-out demonstrations."""
        started, started_at = time.perf_counter(), time.time()
        figures = self.trainer.cross_entropy(batch)
        if self.controller is not None:
            self.controller.evaluations.take_loss(self.version, figures, started_at, time.perf_counter() - started)
        self._waited += time.perf_counter() - started

    def publish(self, result: BatchResult) -> None:
        """Offer the weights after a batch to the actors, or skip this version; without async_weight_update, wait."""
        self._recorder.add("train", self._commanded_at)
        self._wake_actors()
        # A step that was dropped as non-finite makes no version to publish; like one without a slot, it stays pending.
        # Nor does one of demonstrations, before an evaluation asks for it.
        unwanted = not result.last_step_applied or self.config.job.stage == "sft"
        published = self._offer_version(result.votes_against + unwanted)
        self._release_memory()
        if self.controller is not None:
            started_at = time.time()
            self.controller.published(self.version, published)
            if not self.config.grpo.async_weight_update:
                self._recorder.add("sync stall", started_at)
            if result.asked_to_leave and not self.signals.stop_requested:
                logger.warning("%d rank(s) were told to stop: all ranks stop together", result.asked_to_leave)
                self.signals.start_deadline()

    def _wake_actors(self) -> None:
        """Actors that slept on these devices take their weights' memory again (collective)."""
        if not self._sleeps:
            return
        started_at = time.time()
        self._release_memory()
        if self.controller is not None:
            self.controller.wake("weights")
        self._recorder.add("wake", started_at)

    def _release_memory(self) -> None:
        """Leave actors that sleep on these devices the memory that is not in use (collective)."""
        if self._sleeps:
            device.release_cached_memory()
            # No rank may be late with that.
            gather_bytes(b"")

    def publish_pending(self) -> None:
        """Offer a version that was skipped, while there is no data to train on."""
        assert self.sync is not None
        started_at = time.time()
        published = self.sync.snapshot_pending(self.version)
        self._offered(published, started_at)
        if published and self.controller is not None:
            self.controller.published_late(self.version)

    def _offer_version(self, votes_against: int) -> bool:
        """Offer the weights as they are now to the actors (collective). False: this version is skipped."""
        started_at = time.time()
        published = self.weights.commit(self.version, votes_against) == "published"
        self._offered(published, started_at)
        return published

    def _offered(self, published: bool, started_at: float) -> None:
        """Of a published version, compute what actors have to say of the probe (collective)."""
        self._recorder.add("commit" if published else "skip", started_at)
        if published and self._probe:
            started, started_at = time.perf_counter(), time.time()
            # Actors that prove their weights by themselves only sample.
            log_probs = self.trainer.score(self._probe) if self.config.verification == "probe" else []
            following = self.trainer.next_log_probs(self._probe, sampled_behind(self._probe))
            self._recorder.add("probe", started_at)
            self._probe_s += time.perf_counter() - started
            if self.controller is not None:
                self.controller.expect(self.version, self._probe, log_probs, following)

    def save_if_due(self) -> None:
        if self.checkpointer.due(self.version):
            started_at = time.time()
            self._save()
            self._recorder.add("checkpoint", started_at)

    def log_step(self, batch: Batch, result: BatchResult) -> None:
        """Close the books on a step: everything since the last call belongs to it, evaluations left out."""
        now = time.perf_counter()
        evaluations = [] if self.controller is None else self.controller.evaluations.take_times()
        evaluation = sum(end - begin for begin, end in evaluations)
        sleeps = {} if self.controller is None else self.controller.take_sleep_times()
        times = {
            "time/step_s": now - self._boundary - evaluation,
            "time/data_wait_s": max(self._waited - evaluation - sleeps.get("time/sleep_s", 0.0), 0.0),
            **sleeps,
        }
        if self._probe:
            times["time/probe_s"], self._probe_s = self._probe_s, 0.0
        if not self._stepped:
            # Compilation and first connections are over: from now on a rank that is late is a rank that is lost.
            device.set_timeouts(self.config.comm.train_timeout_seconds, self.dims.groups)
            self._stepped = True
        self._boundary, self._waited = now, 0.0
        for begin, end in evaluations:
            self._recorder.add("evaluation", begin, end)
        snapshots = [] if self.sync is None else self.sync.take_snapshots()
        self._recorder.end_step(self.version, snapshots)
        if self._profiler is not None:
            self._profiler.step()
        if self.controller is not None:
            statistics = result.metrics | self.weights.statistics() | times | device.memory_statistics()
            self.controller.log_step(self.version, batch, statistics, snapshots, result.actors)
        self._mismatch = mismatch.reason_to_stop(self.config, result.metrics, result.actors, self.version)

    def export(self) -> None:
        """Write the policy as a Hugging Face checkpoint directory (collective)."""
        comm = self.config.comm
        # Meanwhile the other ranks wait for rank 0 and its disk, a file at a time.
        device.set_timeouts(SAVE_TIMEOUT_S, self.dims.groups)
        try:
            self.checkpointer.export_hf(self.version, self.config.model.hf_assets_path or None, self._end_token_ids)
        finally:
            seconds = comm.train_timeout_seconds if self._stepped else comm.init_timeout_seconds
            device.set_timeouts(seconds, self.dims.groups)

    def export_on_demand(self) -> None:
        """As `export`, but a failure (a full disk, say) does not end the run."""
        try:
            self.export()
        except UserError as error:
            logger.error("the export after step %d failed, training goes on: %s", self.version, error)

    def finish(self) -> None:
        """Write the last checkpoint and the export. Raises what stopped the run early."""
        # A run that must not go on is saved in any case, so that it can be looked at.
        if self.config.checkpoint.enable or self._mismatch is not None:
            self._save()
            self.checkpointer.wait()
        if self.config.checkpoint.last_save_in_hf and self._done:
            self.export()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise what stopped the run early, if anything did."""
        if (failure := self._failure or self._mismatch) is not None:
            raise failure

    def _save(self) -> None:
        # Only rank 0 has rollouts to keep; data positions are in there too.
        self.checkpointer.save(self.version, None if self.controller is None else self.controller.rollout_state())

    def _build(self) -> None:
        config, launch_config = self.config, copy.deepcopy(self.config)
        raise_descriptor_limit()  # rank 0 holds a connection for each request, and its children inherit this
        device.set_allocators(allocator_settings(config))
        address = device.init_process_group(config.comm)
        self._closing.callback(device.shutdown)
        rank, ranks = device.rank(), device.world_size()
        flags = SignalFlags(config.checkpoint.save_deadline_s, leads=rank == 0, saves=config.checkpoint.enable)
        self.signals = self._closing.enter_context(flags)
        start, epoch, token = self._agree_on_start()
        self.run_dir = Path(start.run_dir)
        if rank == 0:
            self._closing.enter_context(locked(self.run_dir))
        set_up_logging(self.run_dir, rank)
        self._describe_devices(address)
        self._recorder = StepRecorder(self.run_dir, rank)
        self._closing.callback(self._recorder.close)
        device.set_threads(config.training.threads, beside=config.started_actors)
        device.seed_everything(config.training.seed, config.training.deterministic)
        self.dims = ParallelDims.from_config(config.parallelism, ranks, rank)
        data = self._open_data(start, epoch, token) if rank == 0 else None
        self._end_token_ids = [] if data is None else [*data.tokenizer.eos_token_ids, *stop_tokens(config)]
        if config.sft.epochs and config.job.stage == "sft":
            config.training.steps = int(broadcast_bytes(str(config.training.steps).encode() if rank == 0 else None))
        if rank == 0 and (rising := warn_long_warmup(config)) is not None:
            logger.warning(rising)
        restored = self._build_trainer(start, None if data is None else data.tokenizer)
        every = config.metrics.profile_freq
        self._profiler = self._closing.enter_context(profile(every, self.run_dir, rank, self.version))
        self.replica = self._closing.enter_context(engine_of(config).open_in_rank(config, self.run_dir))
        path = open_weight_path(config, self.trainer.policy, epoch, token, self.run_dir, self.replica)
        self.weights = self._closing.enter_context(path)
        self.sync = self.weights if isinstance(self.weights, WeightSync) else None
        if data is not None:
            about = (config, self.run_dir, epoch, self.signals)
            self.controller = Controller(*about, data, self.weights, restored, start.lost)
            self._announce(data.events, launch_config)

    def _describe_devices(self, address: str) -> None:
        """Log what a user should know of this machine's devices, and where the ranks meet (collective)."""
        if device.rank() == 0 and (rounded := warn_no_fp32_masters(self.config)) is not None:
            logger.warning(rounded)
        if device.rank() == 0 and device.device().type == "cuda" and not trains_on_gpu():
            logger.warning(
                "torch sees a GPU that neither nvidia-smi nor /dev shows, so the defaults are those for CPUs. Set "
                "TORCHTITAN_DEVICE=cuda for those for GPUs"
            )
        if address:
            for number, place in enumerate(gather_bytes(f"{address} on {socket.gethostname()}".encode()) or []):
                logger.info("rank %d meets the others at %s", number, place.decode())

    def _open_data(self, start: Start, epoch: str, token: str) -> DataPath:
        """Open what batches come from, and the run's records. Only rank 0 has these."""
        config, ranks = self.config, device.world_size()
        tokenizer = Tokenizer(config.model.hf_assets_path, config.rollout.chat_template_kwargs)
        events = EventLog(self.run_dir / "events.jsonl")
        self._closing.callback(events.close)
        journal = Journal(self.run_dir, config.rollout.journal_max_mb << 20, self._trains_again_from)
        self._closing.callback(journal.close)
        if start.load_step is None:
            self._record_start(events)  # a resume may still be refused, which leaves the folder as it was
        data = DataPath(tokenizer, events, journal)
        if config.metrics.live_port:
            # Before anything that takes minutes: the port may be taken. A run that goes on can do without the page.
            begins = start.load_step is None and not start.lost
            data.live_page = LivePage(self.run_dir, config.metrics.live_port, must_start=begins)
            self._closing.callback(data.live_page.close)
        if config.has_engines:
            # Actors need as long to start as the trainer does: let them start side by side.
            data.rollouts = make_rollouts(config, ranks, tokenizer, journal, events, self.run_dir, epoch, token)
            self._closing.enter_context(data.rollouts)
        if config.rollout.replay:
            data.prepared = ReplaySource(config.rollout.replay, journal)
        elif config.job.stage == "sft":
            data.prepared = Demonstrations(config, tokenizer, ranks)
            config.training.steps = data.prepared.steps
        # Also a run that ends with an error has something to show, and the rest has ended by then.
        self._closing.callback(self._close_controller)
        return data

    def _build_trainer(self, start: Start, tokenizer: Tokenizer | None) -> Restored | None:
        """Build the policy, and load the checkpoint that the run continues from (collective). tokenizer: on rank 0."""
        config = self.config
        self.trainer = trainer = PolicyTrainer(config, self.dims)
        policy, reference = trainer.policy, trainer.references.get("")
        trainer.is_told_to_stop = lambda: self.signals.stop_received
        changing = reference.policy if reference is not None and reference.follows else None
        origins = None if tokenizer is None else Origins(config, policy.args, tokenizer)
        self.checkpointer = Checkpointer(
            config.checkpoint, self.run_dir, policy, trainer.optimizer, trainer.scheduler, changing, origins
        )
        self._closing.callback(self.checkpointer.wait, config.checkpoint.save_deadline_s)
        # An engine in these processes is judged by what it samples, see mismatch.py.
        in_ranks = config.is_colocated
        self._probe = [] if in_ranks else mismatch.probe_tokens(config, policy.args.vocab_size)
        if start.load_step is None:
            if config.checkpoint.enable:
                self.checkpointer.describe_origins()
            return Restored(0) if start.lost else None
        restored = self.checkpointer.load(start.load_step)
        self.version = restored.version
        return restored

    def _announce(self, events: EventLog, launch_config: JobConfig) -> None:
        """Record that the run begins, with its configuration as it was `given`."""
        if changed := claim(launch_config, self.run_dir):
            # What a run means may change with them (a temperature, a loss, a tokenizer).
            events.write("goes_on_with_other_values", level=logging.WARNING, **changed)
        if self._events is None:
            self._record_start(events)
        job, features = self.config.job, engine_of(self.config).features
        logger.info("%s; run folder %s", job.name, self.run_dir)
        alike = features.trainers_layers and not self.config.inference.engine.exact and device.device().type == "cpu"
        if alike and (size_difference := size_message(self.trainer.policy.invariant_sizes(), "the engine's log-probs")):
            logger.warning(size_difference)

    def _trains_again_from(self) -> float:
        """Return the version whose batch would be the first one after a restart of the ranks."""
        checkpoint = self.config.checkpoint
        return max(whole_steps(self.run_dir / CHECKPOINTS), default=0) if checkpoint.enable else math.inf

    def _close_controller(self) -> None:
        if self.controller is not None:
            self.controller.close()

    def _agree_on_start(self) -> tuple[Start, str, str]:
        """Where to begin, and this start's epoch and token: made on rank 0, the same everywhere. Raises UserError."""
        facts = None
        # Ranks of several machines may have read several files.
        for rank, tables in enumerate(gather_bytes(json.dumps(tables_of(self.config)).encode()) or []):
            for key, values in changed_keys(json.loads(tables), self.config).items():
                if key not in PER_MACHINE_KEYS:
                    raise UserError(f"rank {rank} and rank 0 have different configurations: {key} = {values} on rank 0")
        if device.rank() == 0:
            start = open_run_directory(self.config)
            facts = json.dumps((asdict(start), new_epoch(start.run_dir), secrets.token_urlsafe(32))).encode()
        start, epoch, token = json.loads(broadcast_bytes(facts))
        return Start(**start), epoch, token


@contextlib.contextmanager
def profile(every: int, run_dir: Path, rank: int, version: int) -> Iterator[torch.profiler.profile | None]:
    """Record one of `every` steps behind `version`, after one to warm up: profile_traces/step-N/rank-R.json.

    None where nothing is recorded (every = 0). The files open in Perfetto and chrome://tracing.
    """
    if not every:
        yield None
        return
    folder = run_dir / "profile_traces"

    def save(profiler: torch.profiler.profile) -> None:
        target = folder / f"step-{version + profiler.step_num}"
        target.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(target / f"rank-{rank}.json"))

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    schedule = torch.profiler.schedule(wait=every - 2, warmup=1, active=1)
    with torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=save) as profiler:
        yield profiler
