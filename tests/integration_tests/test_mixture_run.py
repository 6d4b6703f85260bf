"""A live run of a mixture of experts: two ranks with half of the experts each, then one that goes on alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.policies import make_debug_checkpoint
from tests.processes import Processes
from tests.runs import BRIEF, RUN_SECONDS, Run

pytestmark = pytest.mark.timeout(2 * RUN_SECONDS)


def run(processes: Processes, checkpoint: Path, dump: Path, steps: int, ranks: int, *options: str) -> Run:
    """A few steps of the debug run, to their end."""
    started = Run(
        processes, "debug_cpu_moe", checkpoint, dump,
        "--parallelism.expert_parallel_degree", str(max(1, ranks)),
        "--training.steps", str(steps),
        "--grpo.routing_replay", "true",
        "--optimizer.lr", "1e-3",
        *BRIEF, *options,
        ranks=ranks,
    )  # fmt: skip
    started.end()
    return started


def test_experts_over_two_ranks_learn_and_one_rank_goes_on(processes: Processes, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    make_debug_checkpoint(checkpoint, mixture=True)
    first = run(processes, checkpoint, tmp_path, 6, 2)
    resumed = run(processes, checkpoint, tmp_path, 12, 0, "--checkpoint.resume", str(first.folder))
    rows = resumed.steps()
    assert [row["step"] for row in rows] == list(range(1, 13))
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.15, rewards
    # The engine has each version's experts, and the trainer computes with those that it chose.
    assert all(row["routing/replayed_share"] == 1 for row in rows)
    same = [row["mismatch_kl/same_version"] for row in rows if row["mismatch_kl/same_version"] is not None]
    assert same and max(same) < 1e-6
    assert not resumed.events("weights_differ")
