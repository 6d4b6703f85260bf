"""Rollouts with the real engine and the real weight path: actors are killed and frozen while versions go on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.patience import PATIENCE_S
from tests.policies import make_debug_checkpoint
from tests.processes import started_by
from tests.unit_tests.report.trace_format import check_trace
from torchtitan.config.job_config import JobConfig
from torchtitan.models.decoder import Decoder
from torchtitan.report.sync_metrics import read_journal, sums_by_actor
from torchtitan.report.timeline import write_trace
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.flow.journal import Journal, ReplaySource
from torchtitan.rollout.flow.rollouts import Rollouts, make_rollouts
from torchtitan.rollout.types import Batch
from torchtitan.utils.json_lines import EventLog, read_json_lines
from torchtitan.weight_sync.facade import WeightSync

EPOCH, TOKEN = "1-test", "secret-of-the-test"


class Run:
    """A trainer without training: it changes the weights a little and publishes them."""

    def __init__(self, config: JobConfig, policy: Decoder, rollouts: Rollouts, sync: WeightSync, run_dir: Path):
        self.config, self.policy, self.sync, self.run_dir = config, policy, sync, run_dir
        self.call, self.flow, self.pool = rollouts.loop.call, rollouts.flow, rollouts.pool
        self.version = 0
        self.batches: list[Batch] = []

    def publish(self) -> None:
        self.sync.commit(self.version, 0 if self.sync.reserve() else 1)

    def next_batch(self) -> Batch:
        deadline = time.monotonic() + PATIENCE_S
        while (batch := self.call(self.flow.next_batch, self.version, 0.1)) is None:
            assert time.monotonic() < deadline, "no batch came"
            if self.sync.pending_version is not None:
                self.sync.snapshot_pending(self.version)
        self.batches.append(batch)
        return batch

    def train(self) -> None:
        self.sync.fence()
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter.mul_(1.001)
        self.version += 1

    def step(self) -> Batch:
        batch = self.next_batch()
        self.train()
        self.publish()
        self.call(self.flow.set_version, self.version)
        return batch

    def steps_until(self, condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it never happened"
            self.step()

    def events(self, kind: str, actor: str) -> list[dict[str, Any]]:
        log = read_json_lines(self.run_dir / "events.jsonl")
        return [event for event in log if event["kind"] == kind and event["actor"] == actor]

    def process_of(self, actor: str) -> psutil.Process:
        return next(proc for proc in started_by(psutil.Process(), f"/{actor}.") if ".port" in " ".join(proc.cmdline()))


def make_config(directory: Path) -> tuple[JobConfig, Decoder]:
    """A small job, and its policy, whose checkpoint is in `directory`."""
    torch.set_num_threads(1)
    policy = make_debug_checkpoint(directory)
    config = JobConfig()
    config.model.hf_assets_path = str(directory)
    config.training.seq_len, config.rollout.max_completion_tokens = 32, 12
    config.training.global_batch_size, config.grpo.group_size = 16, 4
    config.grpo.drop_zero_variance = False  # random weights earn nothing
    config.rollout.max_staleness = 1
    config.inference.threads_per_actor = 1
    config.inference.health_timeout_s = 1.0
    return config, policy


@contextlib.contextmanager
def running(config: JobConfig, policy: Decoder, run_dir: Path) -> Iterator[Run]:
    run_dir.mkdir()
    journal = Journal(run_dir)
    tokenizer = Tokenizer(config.model.hf_assets_path)
    events = EventLog(run_dir / "events.jsonl")
    with contextlib.closing(journal), contextlib.ExitStack() as stack:
        rollouts = make_rollouts(config, 1, tokenizer, journal, events, run_dir, EPOCH, TOKEN)
        stack.enter_context(rollouts)
        parameters = dict(policy.named_parameters())
        sync = WeightSync(config.weight_sync, parameters, epoch=EPOCH, token=TOKEN, run_dir=run_dir)
        stack.callback(sync.close)
        made = Run(config, policy, rollouts, sync, run_dir)
        made.publish()
        made.call(rollouts.pool.connect_weights, sync.registry_address)
        made.call(rollouts.flow.set_version, 0)
        yield made


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with running(*make_config(tmp_path / "checkpoint"), tmp_path / "run") as run:
        yield run


@pytest.mark.exhaustive
def test_killed_and_frozen_actors_cost_nothing_but_time(run: Run) -> None:
    run.steps_until(lambda: all(run.events("actor_ready", f"actor-{i}") for i in range(2)))
    run.step()

    victim = run.process_of("actor-1")
    victim.send_signal(signal.SIGKILL)
    run.steps_until(lambda: len(run.events("actor_ready", "actor-1")) == 2)
    (evicted,) = run.events("actor_evicted", "actor-1")
    assert evicted["state"] in ("ready", "pulling", "applying", "suspect") and "SIGKILL" in evicted["reason"]
    assert run.events("actor_restarting", "actor-1")[0]["restart"] == 1
    assert run.process_of("actor-1").pid != victim.pid
    newcomer_joined_at = run.version
    run.step()

    frozen = run.process_of("actor-0")
    os.kill(frozen.pid, signal.SIGSTOP)
    try:
        run.steps_until(lambda: bool(run.events("actor_evicted", "actor-0")))
        run.step()
        run.step()
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    run.steps_until(lambda: len(run.events("actor_ready", "actor-0")) == 2)
    assert run.process_of("actor-0").pid == frozen.pid
    run.step()
    assert run.version > newcomer_joined_at

    # Through all of it: full batches, every prompt once, no token too old or of another epoch.
    used = [group.prompt_index for batch in run.batches for group in batch.groups]
    assert len(used) == len(set(used))
    for version, batch in enumerate(run.batches):
        assert [len(group.samples) for group in batch.groups] == [4] * 4
        spans = [span for sample in batch.samples for span in sample.spans]
        assert {span.epoch for span in spans} == {EPOCH}
        assert all(version - 1 <= span.version <= version for span in spans)
    assert run.batches[-1].statistics["inference/evictions"] == 2.0
    replay = ReplaySource(run.run_dir)
    assert [replay.next_batch(version) for version in replay.versions] == run.batches


def test_drain_mode_gives_completions_of_one_version(tmp_path: Path) -> None:
    config, policy = make_config(tmp_path / "checkpoint")
    config.inference.update_mode = "drain"
    with running(config, policy, tmp_path / "run") as run:
        run.steps_until(lambda: all(run.events("actor_ready", f"actor-{i}") for i in range(2)))
        last = run.version + 10
        timeline = run.run_dir / "timeline" / "actor-0.jsonl"
        # On a busy machine most versions are replaced by newer ones before an actor has drained.
        run.steps_until(lambda: run.version >= last and timeline.read_text().count('"apply"') > 4)
        last = run.version
    for version, batch in enumerate(run.batches):
        for group in batch.groups:
            assert len(group.samples) == 4
            spans = [span for sample in group.samples for span in sample.spans]
            # A group has one version, whole: in flight some of them would be cut.
            assert len({span.version for span in spans}) == 1 and len(spans) == 4
            assert version - 1 <= spans[0].version <= version
    assert max(span.version for sample in batch.samples for span in sample.spans) >= last - 2
    notes = [json.loads(line) for line in timeline.read_text().splitlines()]
    drained = {note["version"] for note in notes if note["what"] == "drain"}
    assert drained == {note["version"] for note in notes if note["what"] == "apply"} and len(drained) > 3
    sums = sums_by_actor(read_journal(run.run_dir))["actor-0"]
    assert 0 <= len(drained) - sums["applied"] <= 1  # the last acknowledgement may have come too late
    assert sums["apply_s"] > sums["drain_s"] + sums["pause_s"] > 0
    assert sums["bytes_full"] == sums["applied"] * sum(4 * parameter.numel() for parameter in policy.parameters())
    trace = check_trace(write_trace(run.run_dir).read_text())
    assert {"delivery", "transfer", "apply", "drain", "generate", "pause"} <= {event.get("cat") for event in trace}
