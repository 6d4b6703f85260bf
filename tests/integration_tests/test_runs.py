"""A real asynchronous run: an actor killed, the trainer killed, resumed to the end, and replayed from its record.

One run serves all tests here, as starting processes is what takes the time.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.patience import PATIENCE_S
from tests.unit_tests.report.trace_format import check_trace
from torchtitan.report.metrics import REQUIRED_KEYS
from torchtitan.rollout.batch_codec import batch_from_json
from torchtitan.rollout.journal import read_records
from torchtitan.rollout.types import Group
from torchtitan.trainer.checkpoint_folder import whole_steps
from torchtitan.utils.json_lines import read_json_lines

# The first test waits for the whole story.
pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
INTERVAL = 10
ENDLESS = 100_000


@pytest.fixture(scope="module")
def debug_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of the default run, made as ./run_grpo.sh makes it."""
    directory = tmp_path_factory.mktemp("assets") / "debug_arithmetic"
    script = ROOT / "scripts" / "make_debug_checkpoint.py"
    subprocess.run([sys.executable, script, "--output", directory], check=True, cwd=ROOT, timeout=240)
    return directory


def launch(
    checkpoint: Path, dump_folder: Path, steps: int, *overrides: str, launcher: tuple[str, ...] = ("-m",)
) -> subprocess.Popen[bytes]:
    """The default configuration, small: 8 prompts × 8 samples a step, one rank. The first life of a run that is to be
    killed gets more steps than it can make; a constant rate makes its steps those of a shorter run."""
    command = [
        sys.executable, *launcher, "torchtitan.grpo_train",
        "--job.config_file", str(ROOT / "train_configs" / "debug_cpu.toml"),
        "--job.dump_folder", str(dump_folder),
        "--model.hf_assets_path", str(checkpoint),
        "--training.steps", str(steps),
        "--lr_scheduler.decay_type", "constant",
        "--training.global_batch_size", "64",
        "--checkpoint.interval", str(INTERVAL),
        "--checkpoint.keep_latest_k", "0",
        "--eval.num_prompts", "8",
        "--eval.interval", "0",
        "--inference.threads_per_actor", "1",
        "--training.threads", "1",
        *overrides,
    ]  # fmt: skip
    log = (dump_folder / "console.log").open("ab")
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)


def wait_for(condition: Callable[[], Any], what: str, process: subprocess.Popen[bytes], log: Path) -> Any:
    deadline = time.monotonic() + 180
    while not (value := condition()):
        assert process.poll() is None and time.monotonic() < deadline, f"{what}: {log.read_text()[-4000:]}"
        time.sleep(0.05)
    return value


def finish(process: subprocess.Popen[bytes], log: Path) -> None:
    try:
        assert process.wait(240) == 0, log.read_text()[-6000:]
    finally:
        process.kill()


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in read_json_lines(run_dir / "metrics.jsonl") if "loss" in row]


def actors_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "torchtitan.inference.embedded" in child.cmdline()]


@dataclass
class Story:
    """What is left of the run: its folder, and what was seen while it was alive."""

    run_dir: Path
    replay_dir: Path
    steps: int
    """Steps of the whole run"""
    killed_at: int
    """Newest whole checkpoint when the trainer was killed"""
    orphans_gone: bool
    before: list[dict[str, Any]]
    """Rows of metrics.jsonl when the trainer was killed"""
    unused_groups: list[Group]
    """Finished groups that the checkpoint held"""


@pytest.fixture(scope="module")
def story(debug_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    dump = tmp_path_factory.mktemp("runs")
    log = dump / "console.log"
    process = launch(debug_checkpoint, dump, ENDLESS)
    try:
        latest = dump / "latest"
        wait_for(lambda: latest.exists() and len(steps_of(latest)) >= 2, "first steps", process, log)
        run_dir = latest.resolve()

        def times_ready() -> int:
            return sum(event["kind"] == "actor_ready" for event in read_json_lines(run_dir / "events.jsonl"))

        wait_for(lambda: times_ready() == 2, "both actors", process, log)
        actors_of(process)[0].kill()
        wait_for(lambda: times_ready() == 3, "the actor is back", process, log)
        folder = run_dir / "checkpoint"
        wait_for(lambda: len(whole_steps(folder)) > 1, "a checkpoint", process, log)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE_S)
        _, alive = psutil.wait_procs(children, timeout=15)
        before = steps_of(run_dir)
        killed_at = whole_steps(folder)[-1]
        unused = groups_in(folder / f"step-{killed_at}" / "rollout.bin")
        steps = killed_at + 15
        process = launch(debug_checkpoint, dump, steps, "--checkpoint.resume", str(run_dir))
        finish(process, log)
        replay_dump = dump / "replay"
        replay_dump.mkdir()
        process = launch(debug_checkpoint, replay_dump, steps, "--rollout.replay", str(run_dir))
        finish(process, replay_dump / "console.log")
        replay_dir = (replay_dump / "latest").resolve()
        yield Story(run_dir, replay_dir, steps, killed_at, not alive, before, unused)
    finally:
        process.kill()


def groups_in(state: Path) -> list[Group]:
    return batch_from_json(json.loads(state.read_bytes())["ready"]).groups


def oldest_version(group: Group) -> int:
    return min(span.version for sample in group.samples for span in sample.spans)


def batches(run_dir: Path) -> dict[int, dict[str, Any]]:
    return {
        record["version"]: record
        for _, record in read_records(run_dir / "journal.jsonl")
        if record["record"] == "batch"
    }


def test_every_step_has_its_row(story: Story) -> None:
    rows = steps_of(story.run_dir)
    assert [row["step"] for row in rows] == list(range(1, story.steps + 1))
    for row in rows:
        assert set(row) >= set(REQUIRED_KEYS)
        missing = [key for key in REQUIRED_KEYS if row[key] is None]
        assert not missing, f"step {row['step']}: no value for {missing}"
    evaluations = [row for row in read_json_lines(story.run_dir / "metrics.jsonl") if "eval/pass@1" in row]
    assert [row["step"] for row in evaluations] == [0, story.steps]


def test_killed_actor_is_logged_and_comes_back(story: Story) -> None:
    events = read_json_lines(story.run_dir / "events.jsonl")
    (lost,) = [event for event in events if event["kind"] == "actor_evicted"]
    assert lost["actor"] in ("actor-0", "actor-1") and lost["phase"]
    after = events[events.index(lost) :]
    assert any(event["kind"] == "actor_restarting" and event["actor"] == lost["actor"] for event in after)
    assert any(event["kind"] == "actor_ready" and event["actor"] == lost["actor"] for event in after)


def test_killed_trainer_leaves_no_process(story: Story) -> None:
    assert story.orphans_gone


def test_resume_continues_from_the_last_checkpoint(story: Story) -> None:
    rows = {row["step"]: row for row in steps_of(story.run_dir)}
    assert 0 < story.killed_at <= len(story.before)
    for row in story.before[: story.killed_at]:
        assert row["loss"] == rows[row["step"]]["loss"]
    epochs = read_json_lines(story.run_dir / "epochs.jsonl")
    assert len(epochs) == 2 and epochs[0] != epochs[1]


def test_no_finished_rollout_of_the_checkpoint_is_lost(story: Story) -> None:
    """The first batch after the resume is made of them, as far as the staleness gate (1 version) admits them."""
    admitted = [group for group in story.unused_groups if oldest_version(group) >= story.killed_at - 1]
    assert admitted, "the checkpoint held no rollouts: nothing was tested"
    trained = {version: batch_from_json(record).groups for version, record in batches(story.run_dir).items()}
    first = trained[story.killed_at]
    expected = admitted[: len(first)]
    by_index = {group.prompt_index: group for group in first}
    assert [by_index.get(group.prompt_index) for group in expected] == expected
    # No prompt is used twice, before the kill or after it.
    indices = [group.prompt_index for groups in trained.values() for group in groups]
    assert len(indices) == len(set(indices))


def test_replay_repeats_the_losses_to_the_last_bit(story: Story) -> None:
    """The uninterrupted replay is also the oracle for kill and resume: its losses are those of the two lives."""
    live = [(row["step"], row["loss"], row["grad_norm"], row["entropy"]) for row in steps_of(story.run_dir)]
    replayed = [(row["step"], row["loss"], row["grad_norm"], row["entropy"]) for row in steps_of(story.replay_dir)]
    assert replayed == live


def test_every_token_was_sampled_by_a_published_version(story: Story) -> None:
    decisions = {
        record["version"]: record["published"]
        for _, record in read_records(story.run_dir / "journal.jsonl")
        if record["record"] == "decision"
    }
    for version, record in batches(story.run_dir).items():
        for sample in batch_from_json(record).samples:
            assert sample.spans[0].start == 0
            assert sample.spans[-1].end == len(sample.completion_ids)
            for span in sample.spans:
                assert decisions[span.version]
                assert 0 <= version - span.version <= 1


def test_every_token_was_sampled_by_a_version_that_an_actor_applied(story: Story) -> None:
    """versions.jsonl is made from the coordinator's journal, tokens are tagged by the engines: two witnesses."""
    rows = read_json_lines(story.run_dir / "weight_sync" / "versions.jsonl")
    epochs = [one["epoch"] for one in read_json_lines(story.run_dir / "epochs.jsonl")]
    assert {row["epoch"] for row in rows} == set(epochs)
    assert len({(row["epoch"], row["version"], row["actor"]) for row in rows}) == len(rows)
    applied = {(row["epoch"], row["version"]) for row in rows if row["outcome"] == "applied"}
    for record in batches(story.run_dir).values():
        for sample in batch_from_json(record).samples:
            assert {(span.epoch, span.version) for span in sample.spans} <= applied
    for row in rows:
        if row["outcome"] == "applied" and not row["failures"]:
            assert 0 <= row["pause_s"] <= row["apply_s"] and row["transfer_s"] > 0 and row["bytes_full"] > 0
            assert row["published_at"] <= row["offered_at"] <= row["applied_at"]
    steps = [row for row in steps_of(story.run_dir) if row["step"] > story.killed_at]
    life = [row for row in rows if row["epoch"] == epochs[-1] and row["outcome"] == "applied"]
    assert 0 < sum(row["weight_sync/applied"] for row in steps) <= len(life)


def test_trace_opens_and_shows_all_processes(story: Story) -> None:
    events = check_trace((story.run_dir / "trace.json").read_text())
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"trainer", "weight sync", "actor-0", "actor-1"}
    kinds = {event.get("cat") for event in events}
    assert {"step", "train", "snapshot", "publish", "delivery", "transfer", "apply", "generate", "pause"} <= kinds
    # The replayed run has no actors; its steps are there all the same.
    assert {"step", "train"} <= {e.get("cat") for e in check_trace((story.replay_dir / "trace.json").read_text())}


def test_report_is_there(story: Story) -> None:
    report = (story.run_dir / "report.html").read_text()
    assert "<svg" in report and "Trainer and actors on one clock" in report and "Weight synchronisation" in report
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", report), "the page must not need the network"


def test_sigterm_saves_and_leaves(debug_checkpoint: Path, tmp_path: Path) -> None:
    process = launch(debug_checkpoint, tmp_path, ENDLESS, "--checkpoint.interval", str(ENDLESS))
    try:
        wait_for(
            lambda: (tmp_path / "latest").exists() and len(steps_of(tmp_path / "latest")) >= 2,
            "first steps",
            process,
            tmp_path / "console.log",
        )
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    finally:
        process.kill()
    last = steps_of(tmp_path / "latest")[-1]["step"]
    assert whole_steps(tmp_path / "latest" / "checkpoint") == [last]
    assert "Traceback" not in (tmp_path / "console.log").read_text()


def test_two_ranks_in_blocking_mode(debug_checkpoint: Path, tmp_path: Path) -> None:
    """Tensor parallelism over two ranks, started as ./run_grpo.sh starts it; every step waits for both actors."""
    log = tmp_path / "console.log"
    launcher = ("-m", "torchtitan.utils.launch", "--standalone", "--nproc-per-node", "2", "-m")
    process = launch(
        debug_checkpoint, tmp_path, 4, "--grpo.async_weight_update", "false",
        "--parallelism.tensor_parallel_degree", "2", launcher=launcher,
    )  # fmt: skip
    finish(process, log)
    rows = steps_of(tmp_path / "latest")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row["weight_sync/versions_skipped"] == 0
        assert {row[f"weight_sync/actor-{i}/version"] for i in (0, 1)} == {row["policy_version"]}
    assert (tmp_path / "latest" / "hf" / "step-4" / "model.safetensors").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_actors_sleep_while_the_trainer_trains(debug_checkpoint: Path, tmp_path: Path, ranks: int) -> None:
    """By the real command, with evaluations in between; with two ranks their devices are freed together."""
    options = ("--grpo.async_weight_update", "false", "--inference.sleep_level", str(ranks), "--eval.interval", "2")
    two = ("-m", "torchtitan.utils.launch", "--standalone", "--nproc-per-node", "2", "-m")
    launcher = ("-m",) if ranks == 1 else two
    process = launch(debug_checkpoint, tmp_path, 4, *options, launcher=launcher)
    finish(process, tmp_path / "console.log")
    run_dir = tmp_path / "latest"
    rows = steps_of(run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row["time/sleep_s"] > 0 and row["time/wake_s"] > 0 and row["staleness/max"] == 0
        assert row["time/sleep_s"] + row["time/wake_s"] < row["time/step_s"]
    evaluated = [row["eval/version"] for row in read_json_lines(run_dir / "metrics.jsonl") if "eval/version" in row]
    assert evaluated == [0, 2, 4]
    kinds = {event["kind"] for event in read_json_lines(run_dir / "events.jsonl")}
    assert not kinds & {"actor_evicted", "actor_stays_awake", "actor_stays_asleep", "evaluation_missing"}


def test_a_run_survives_the_faults_of_its_configuration(debug_checkpoint: Path, tmp_path: Path) -> None:
    """One actor freezes for a while when it is about to apply, the other dies in the middle of a transfer."""
    faults = [
        "freeze:phase=apply,actor=actor-0,version=2-,seconds=4",
        "kill:phase=receive,actor=actor-1,version=4-",
    ]
    process = launch(
        debug_checkpoint, tmp_path, 12, "--inference.health_timeout_s", "1.5", "--inference.health_interval_s", "0.5",
        "--fault_injection.enable", "true", "--fault_injection.faults", *faults,
    )  # fmt: skip
    finish(process, tmp_path / "console.log")
    run_dir = (tmp_path / "latest").resolve()
    assert [row["step"] for row in steps_of(run_dir)] == list(range(1, 13))
    assert "FAULT INJECTION IS ON" in (tmp_path / "console.log").read_text()
    assert "kill:phase=receive" in (run_dir / "report.html").read_text()
    events = read_json_lines(run_dir / "events.jsonl")
    assert [event["faults"] for event in events if event["kind"] == "fault_injection_is_on"] == [faults]
    assert {event["actor"] for event in events if event["kind"] == "actor_evicted"} == {"actor-0", "actor-1"}
    (epoch,) = read_json_lines(run_dir / "epochs.jsonl")
    struck = (run_dir / "weight_sync" / f"faults-{epoch['epoch']}.txt.struck").glob("*.json")
    assert sorted(json.loads(path.read_text())["fault"] for path in struck) == faults
