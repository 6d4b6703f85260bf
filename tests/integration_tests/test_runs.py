"""A real asynchronous run on two ranks: an actor killed, the trainer killed, resumed to the end, and replayed from its
record.

One run serves all tests here, as starting processes is what takes the time.
"""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults import variables, write_plan
from tests.integration_tests.test_busy_machine import SAYS, gnu_openmp
from tests.processes import Processes, started_by
from tests.runs import RUN_SECONDS, Run
from tests.simulator.measured import values_from_run
from tests.unit_tests.report.test_report import data_in
from tests.unit_tests.report.trace_format import check_trace
from torchtitan.report.metrics import REQUIRED_KEYS
from torchtitan.rollout.flow.journal import ReplaySource, batch_from_json, read_records
from torchtitan.rollout.types import Batch, Group
from torchtitan.trainer.run_dir import whole_steps
from torchtitan.utils.json_lines import read_json_lines

# The first test waits for the whole story.
pytestmark = pytest.mark.timeout(3 * RUN_SECONDS)

INTERVAL = 6
ENDLESS = 100_000


def start(
    processes: Processes, checkpoint: Path, dump: Path, steps: int, *options: str, ranks: int = 0, **environment: str
) -> Run:
    """The default configuration, small: 8 prompts × 8 samples a step. The first life of a run that is to be killed gets
    more steps than it can make."""
    return Run(
        processes, "debug_cpu", checkpoint, dump,
        "--training.steps", str(steps),
        "--training.global_batch_size", "64",
        "--checkpoint.interval", str(INTERVAL),
        "--checkpoint.keep_latest_k", "0",
        "--eval.num_prompts", "8",
        "--eval.interval", "0",
        "--inference.threads_per_actor", "1",
        *options,
        ranks=ranks,
        **environment,
    )  # fmt: skip


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in read_json_lines(run_dir / "metrics.jsonl") if "loss" in row]


@dataclass
class Story:
    """What is left of the run: its folder, and what was seen while it was alive."""

    run_dir: Path
    replay_dir: Path
    steps: int
    """Steps of the whole run"""
    killed_at: int
    """Newest whole checkpoint when the trainer was killed"""
    before: list[dict[str, Any]]
    """Rows of metrics.jsonl when the trainer was killed"""
    unused_groups: list[Group]
    """Finished groups that the checkpoint held"""
    policies: list[str | None]
    """OMP_WAIT_POLICY of what the run has started"""
    output: str
    """What the run wrote first, with the settings of OpenMP in the ranks and in the process that actors come from"""


@pytest.fixture(scope="module")
def story(debug_checkpoint: Path, module_processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Story:
    dump = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_WAIT_POLICY", raising=False)
        run = start(module_processes, debug_checkpoint, dump, ENDLESS, ranks=2, OMP_DISPLAY_ENV="VERBOSE")
    run.wait(lambda: len(run.steps()) >= 2)
    run_dir = run.folder
    run.wait(lambda: len(run.events("actor_ready")) == 2)
    # The ranks say it to themselves before they import torch, and what they wrote first shows it.
    others = [child for child in run.process.children(recursive=True) if "torchtitan.grpo_train" not in child.cmdline()]
    policies = [child.environ().get("OMP_WAIT_POLICY") for child in others]
    log = run.log()
    started_by(run.process, "torchtitan.inference.engines.embedded")[0].kill()
    run.wait(lambda: len(run.events("actor_ready")) == 3)
    folder = run_dir / "checkpoint"
    run.wait(lambda: len(whole_steps(folder)) > 1)
    run.end(-signal.SIGKILL, by=signal.SIGKILL)
    before = run.steps()
    killed_at = whole_steps(folder)[-1]
    unused = groups_in(folder / f"step-{killed_at}" / "rollout.bin")
    steps = killed_at + 8
    options = ("--checkpoint.resume", str(run_dir))
    start(module_processes, debug_checkpoint, dump, steps, *options, ranks=2).end()
    options = ("--rollout.replay", str(run_dir))
    replay = start(module_processes, debug_checkpoint, dump / "replay", steps, *options, ranks=2)
    replay.end()
    return Story(run_dir, replay.folder, steps, killed_at, before, unused, policies, log)


def groups_in(state: Path) -> list[Group]:
    """Finished groups of a checkpoint, as a resumed run has them: held against none of its actors, which are others."""
    ready = batch_from_json(json.loads(state.read_bytes())["ready"])
    ready.forget_actors()
    return ready.groups


def oldest_version(group: Group) -> int:
    return min(span.version for sample in group.samples for span in sample.spans)


def batches(run_dir: Path) -> dict[int, Batch]:
    source = ReplaySource(run_dir)
    return {version: source.read_batch(version) for version in source.versions}


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
    assert lost["actor"] in ("actor-0", "actor-1") and lost["state"]
    after = events[events.index(lost) :]
    assert any(event["kind"] == "actor_restarting" and event["actor"] == lost["actor"] for event in after)
    assert any(event["kind"] == "actor_ready" and event["actor"] == lost["actor"] for event in after)


def test_resume_continues_from_the_last_checkpoint(story: Story) -> None:
    rows = {row["step"]: row for row in steps_of(story.run_dir)}
    assert 0 < story.killed_at <= len(story.before)
    for row in story.before[: story.killed_at]:
        assert row["loss"] == rows[row["step"]]["loss"]
    epochs = read_json_lines(story.run_dir / "epochs.jsonl")
    assert len(epochs) == 2 and epochs[0] != epochs[1]


def test_no_finished_rollout_of_the_checkpoint_is_lost(story: Story) -> None:
    """The first two batches after the resume have them, as far as the staleness gate (1 version) admits them."""
    admitted = [group for group in story.unused_groups if oldest_version(group) >= story.killed_at - 1]
    assert admitted, "the checkpoint held no rollouts: nothing was tested"
    trained = {version: batch.groups for version, batch in batches(story.run_dir).items()}
    # What was unfinished is sampled again, and takes its place in the order of the prompts.
    by_index = {group.prompt_index: group for version in (0, 1) for group in trained[story.killed_at + version]}
    assert [by_index.get(group.prompt_index) for group in admitted] == admitted
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
    for version, batch in batches(story.run_dir).items():
        for sample in batch.samples:
            assert sample.spans[0].start == 0
            assert sample.spans[-1].end == len(sample.completion_ids)
            for span in sample.spans:
                assert decisions[span.version]
                assert 0 <= version - span.version <= 1


def test_every_token_was_sampled_by_a_version_that_an_actor_applied(story: Story) -> None:
    """versions.jsonl is made from the registry's journal, tokens are tagged by the engines: two witnesses."""
    rows = read_json_lines(story.run_dir / "weight_sync" / "versions.jsonl")
    epochs = [record["epoch"] for record in read_json_lines(story.run_dir / "epochs.jsonl")]
    assert {row["epoch"] for row in rows} == set(epochs)
    # An actor that was killed is back at once, and then gets the version that it had once more.
    assert len({(row["epoch"], row["version"], row["actor"], row["ended_at"]) for row in rows}) == len(rows)
    applied = {(row["epoch"], row["version"]) for row in rows if row["outcome"] == "applied"}
    for batch in batches(story.run_dir).values():
        for sample in batch.samples:
            assert {(span.epoch, span.version) for span in sample.spans} <= applied
    for row in rows:
        if row["outcome"] == "applied" and row["begun_at"]:
            figures = row["figures"]
            assert 0 <= figures["pause_s"] <= figures["apply_s"]
            assert figures["transfer_s"] > 0 and figures["bytes_full"] > 0
            assert row["offered_at"] <= row["begun_at"] <= row["staged_at"] <= row["ended_at"]
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


def test_simulator_reads_the_run(story: Story, debug_checkpoint: Path) -> None:
    values = values_from_run(story.run_dir)
    assert values["actors"] == 2
    file = debug_checkpoint / "model.safetensors"
    # It is stored in bfloat16 and sent in float32.
    assert values["gigabytes"] * 1e9 == pytest.approx(2 * file.stat().st_size, rel=0.05)


def test_report_shows_the_run(story: Story) -> None:
    data = data_in(story.run_dir / "report.html")
    assert data["progress"]["step"] == story.steps and data["outcome"]["kind"] == "good"
    assert {"Reward", "Seconds per step", "Loss"} <= {plot["title"] for plot in data["plots"]}
    assert len(data["samples"]) == 3 and data["samples"][-1]["step"] == story.steps
    assert [line[0] for line in data["actors"]["lines"]] == ["actor-0", "actor-1"]
    assert {lane["name"] for lane in data["timeline"]["lanes"]} >= {"actor-0", "actor-1"} and data["versions"]["lines"]


@gnu_openmp
def test_threads_of_a_run_sleep_while_they_wait(story: Story) -> None:
    assert len(story.policies) >= 3 and set(story.policies) == {"PASSIVE"}, "actors, a rewards' worker, a weight server"
    # Two ranks, and the fork server, in which the library is loaded once for all actors.
    assert story.output.count(SAYS.format(0)) == story.output.count(SAYS.partition("{")[0]) == 3


def test_actors_sleep_while_the_trainer_trains(debug_checkpoint: Path, processes: Processes, tmp_path: Path) -> None:
    """In blocking mode, by the real command, with evaluations in between. Two ranks of tensor parallelism have their
    devices freed together, and every step waits for all actors that have joined."""
    run = start(
        processes, debug_checkpoint, tmp_path, ENDLESS, "--grpo.async_weight_update", "false", "--eval.interval", "2",
        "--inference.sleep_level", "2", "--parallelism.tensor_parallel_degree", "2", ranks=2,
    )  # fmt: skip

    def versions(row: dict[str, Any]) -> set[int | None]:
        return {row.get(f"weight_sync/actor-{i}/version") for i in (0, 1)}

    def evaluated() -> list[int]:
        return [row["eval/version"] for row in run.rows() if "eval/version" in row]

    # On a busy machine one of them may join late.
    run.wait(lambda: len(evaluated()) >= 3 and None not in versions(run.steps()[-1]))
    run.end(128 + signal.SIGTERM, by=signal.SIGTERM)
    steps = run.steps()
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
    for row in steps:
        assert row["time/sleep_s"] > 0 and row["time/wake_s"] > 0 and row["staleness/max"] == 0
        assert row["time/sleep_s"] + row["time/wake_s"] < row["time/step_s"]
        assert row["weight_sync/versions_skipped"] == 0
        assert versions(row) - {None} == {row["policy_version"]}
        # Sampled right after waking, with the weights that the trainer still had.
        assert row["mismatch_kl/same_version"] < 1e-6
    assert evaluated() == list(range(0, 2 * len(evaluated()), 2))
    for kind in ("actor_evicted", "actor_stays_awake", "actor_stays_asleep", "evaluation_missing"):
        assert not run.events(kind)
    assert whole_steps(run.folder / "checkpoint")[-1] == len(steps)


@pytest.mark.exhaustive
def test_a_run_survives_an_actor_that_freezes_and_one_that_dies_and_saves_when_asked_to_stop(
    debug_checkpoint: Path, processes: Processes, tmp_path: Path
) -> None:
    """One actor freezes for a while when it is about to apply, the other dies in the middle of a transfer."""
    faults = [
        "freeze:phase=apply,actor=actor-0,version=2-,seconds=4",
        "kill:phase=receive,actor=actor-1,version=4-",
    ]
    plan = tmp_path / "faults.txt"
    write_plan(faults, plan)
    run = start(
        processes, debug_checkpoint, tmp_path, ENDLESS, "--inference.health_timeout_s", "1.5",
        "--checkpoint.interval", str(ENDLESS),
        **variables(f"@{plan}"),
    )  # fmt: skip
    run.wait(lambda: {event["actor"] for event in run.events("actor_evicted")} == {"actor-0", "actor-1"})
    struck_at = len(run.steps())
    run.wait(lambda: len(run.steps()) >= struck_at + 3)
    run.end(128 + signal.SIGTERM, by=signal.SIGTERM)
    steps = [row["step"] for row in run.steps()]
    assert steps == list(range(1, len(steps) + 1))
    assert whole_steps(run.folder / "checkpoint") == steps[-1:]
    assert "Traceback" not in run.log() and "FAULT INJECTION IS ON" in run.log()
    struck = (tmp_path / "faults.txt.struck").glob("*.json")
    assert sorted(json.loads(path.read_text())["fault"] for path in struck) == faults
