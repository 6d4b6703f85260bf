"""An OpenEnv environment, a server of its own, trained on by its WebSocket protocol."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT, Processes
from tests.runs import RUN_SECONDS, Run


@pytest.mark.exhaustive
@pytest.mark.timeout(RUN_SECONDS)
def test_twenty_steps_of_its_game(debug_checkpoint: Path, processes: Processes, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.openenv_server"]
    port = processes.start_server("openenv", command)
    options: list[Any] = [
        "--environment.factory", "game:Game", "--environment.max_turns", "3", "--environment.sandbox.network",
        "--rewards.functions", "--training.steps", "20", "--training.global_batch_size", "64",
        "--training.seq_len", "64", "--optimizer.lr", "5e-4", "--rollout.max_completion_tokens", "32",
        "--inference.num_actors", "1", "--eval.num_prompts", "0",
        # On policy: what it learns in 20 steps does not depend on how busy the machine is.
        "--grpo.async_weight_update", "false", "--rollout.max_staleness", "0",
    ]  # fmt: skip
    path = f"{ROOT / 'examples' / 'openenv'}:{ROOT}"
    environment = {"OPENENV_URL": f"http://127.0.0.1:{port}", "PYTHONPATH": path}
    run = Run(processes, "debug_cpu", debug_checkpoint, tmp_path, *options, **environment)
    run.end()
    steps = run.steps()
    assert len(steps) == 20, run.log()[-3000:]
    assert all(step["environment/episodes_lost"] == 0 for step in steps)
    rewards = [step["reward/mean"] for step in steps]
    assert statistics.mean(rewards[-5:]) > 1.5 * statistics.mean(rewards[:5]), rewards
