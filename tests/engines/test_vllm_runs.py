"""Whole training runs with a vLLM server: pool, agent, engine."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engines.processes import ROOT, Processes
from tests.engines.vllm_job import holding_weights
from tests.patience import PATIENCE_S

RUN_SECONDS = 500.0
# Fewer bring less than one batch differs from the next.
STEPS = 60
KILL_AT = 8


def start(processes: Processes, checkpoint: Path, dump: Path, *options: str) -> psutil.Process:
    """The run of train_configs/debug_cpu_vllm.toml."""
    run = processes.start(
        "run",
        [
            sys.executable, "-m", "torchtitan.utils.launch", "--standalone", "--nproc-per-node", "1",
            "-m", "torchtitan.grpo_train",
            "--job.config_file", ROOT / "train_configs" / "debug_cpu_vllm.toml",
            "--model.hf_assets_path", checkpoint,
            "--job.dump_folder", dump,
            "--training.steps", str(STEPS),
            "--training.threads", "1",
            "--optimizer.lr", "2e-4",
            "--lr_scheduler.warmup_steps", "2",
            "--lr_scheduler.decay_type", "constant",
            "--checkpoint.interval", "1000",
            "--eval.interval", str(STEPS),
            "--metrics.log_freq", "1",
            *options,
        ],
    )  # fmt: skip
    return psutil.Process(run.pid)


def rows_of(dump: Path) -> list[dict[str, Any]]:
    path = dump / "latest" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps_of(dump: Path) -> list[dict[str, Any]]:
    return [row for row in rows_of(dump) if "reward/mean" in row]


def check_learned(dump: Path) -> None:
    """Also on the 128 held-out prompts, where both versions draw with the same random numbers."""
    before, after = [row for row in rows_of(dump) if "eval/version" in row]
    assert (before["eval/version"], after["eval/version"]) == (0, STEPS)
    assert after["eval/pass@1"] > before["eval/pass@1"]
    steps = steps_of(dump)
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    rewards = [row["reward/mean"] for row in steps]
    assert sum(rewards[-10:]) > sum(rewards[:10])


def end(run: psutil.Process, processes: Processes) -> None:
    """Of a run that goes well; nothing of it is left."""
    children = run.children(recursive=True)
    assert run.wait(RUN_SECONDS) == 0, processes.tail("run")
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
    assert alive == []


@pytest.mark.usefixtures("vllm_python")
def test_reward_rises_though_the_engine_is_killed(debug_checkpoint: Path, processes: Processes, tmp_path: Path) -> None:
    run = start(processes, debug_checkpoint, tmp_path, "--grpo.async_weight_update", "true")
    processes.wait("run", lambda: len(steps_of(tmp_path)) >= KILL_AT, RUN_SECONDS)
    (worker,) = holding_weights(run.children(recursive=True))
    worker.send_signal(signal.SIGKILL)
    end(run, processes)
    check_learned(tmp_path)
    events = [json.loads(line) for line in (tmp_path / "latest" / "events.jsonl").read_text().splitlines()]
    assert len([event for event in events if event["kind"] == "actor_restarting"]) == 1
    steps = steps_of(tmp_path)
    assert max(row["staleness/max"] for row in steps) == 1
    # A step may hold no token of the policy's own version.
    mismatches = [row["mismatch_kl/same_version"] for row in steps if row.get("mismatch_kl/same_version") is not None]
    assert mismatches
    assert max(mismatches) < 1e-6


@pytest.mark.usefixtures("vllm_python")
def test_reward_rises_where_the_trainer_waits(debug_checkpoint: Path, processes: Processes, tmp_path: Path) -> None:
    run = start(processes, debug_checkpoint, tmp_path, "--grpo.async_weight_update", "false")
    processes.wait("run", lambda: len(steps_of(tmp_path)) >= 1, RUN_SECONDS)
    end(run, processes)
    check_learned(tmp_path)
    assert all(row["weight_sync/actor-0/version"] == row["step"] for row in steps_of(tmp_path))
