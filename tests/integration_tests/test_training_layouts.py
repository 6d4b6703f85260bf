"""The same recorded rollouts on one rank, and with CP, FSDP2 with TP and with CP: the same losses and gradient norms.
Steps of more layouts are compared in tests/unit_tests/distributed/test_parallel.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed_launcher import run_distributed
from tests.trajectories import single_turn
from torchtitan.config.job_config import JobConfig
from torchtitan.distributed import device
from torchtitan.distributed.placement import ParallelDims
from torchtitan.inference.types import VersionSpan
from torchtitan.rollout.flow.journal import Journal, ReplaySource
from torchtitan.rollout.types import Batch, Group
from torchtitan.trainer.policy_trainer import PolicyTrainer

STEPS = 3
FIGURES = ("loss", "grad_norm", "entropy", "mismatch_kl", "trained_tokens", "ratio/max")
# Decoupled or not, and the loss; that of whole sequences has no part for each rank.
MODES = [(True, "dapo"), (False, "grpo"), (False, "gspo")]
FUNCTION = "tests.integration_tests.test_training_layouts:train_modes"


def record(run_dir: Path) -> None:
    """A journal of batches with groups of many lengths, as a run writes it."""
    rng = random.Random(0)
    journal = Journal(run_dir)
    for version in range(STEPS):
        groups = []
        for index in range(6):
            prompt = [rng.randrange(128) for _ in range(rng.randint(1, 7))]
            samples = []
            for _ in range(4):
                length = rng.randint(1, 20)
                samples.append(
                    single_turn(
                        prompt_ids=prompt,
                        completion_ids=[rng.randrange(128) for _ in range(length)],
                        # Near what the policy says, or every sequence would be masked.
                        log_probs=[rng.uniform(-6.5, -4.5) for _ in range(length)],
                        spans=[VersionSpan("e", max(version - 1, 0), 0, length)],
                        finish_reason="stop",
                        reward=rng.random(),
                    )
                )
            groups.append(Group(index, samples))
        journal.append_batch(Batch(version, groups))
    journal.close()


def train_modes(
    checkpoint: str, run_dir: str, tp: int, cp: int, modes: list[tuple[bool, str]]
) -> list[list[list[float]]]:
    """What train_recorded says in each mode, one after the other: processes take longest to start."""
    return [train_recorded(checkpoint, run_dir, tp, cp, *mode) for mode in modes]


def train_recorded(
    checkpoint: str, run_dir: str, tp: int, cp: int, decoupled: bool, loss_type: str
) -> list[list[float]]:
    """(loss, gradient norm, entropy) of every recorded batch, in this process's layout."""
    config = JobConfig()
    config.model.hf_assets_path = checkpoint
    config.parallelism.tensor_parallel_degree = tp
    config.parallelism.context_parallel_degree = cp
    config.optimizer.lr = 1e-3
    config.grpo.recompute_old_log_probs = decoupled
    config.grpo.loss_type = loss_type
    config.grpo.num_minibatches = 2
    config.grpo.geometric_mask = []
    config.training.tokens_per_micro_batch = 64
    config.training.max_norm = 0.5
    config.rollout.max_completion_tokens = 20
    device.set_threads(1, 1)
    dims = ParallelDims.from_config(config.parallelism, device.world_size(), device.rank())
    trainer = PolicyTrainer(config, dims)
    source = ReplaySource(run_dir)
    figures = []
    for version in range(STEPS):
        result = trainer.train_batch(source.next_batch(version), Slots())
        # One rank without a free slot must be known to all of them.
        assert result.votes_against == (1 if device.world_size() > 1 else 0)
        figures.append([result.metrics[name] for name in FIGURES])
    return figures


class Slots:
    """None is free on rank 1."""

    def reserve(self) -> bool:
        return device.rank() != 1

    def fence(self) -> None:
        pass


@pytest.fixture(scope="module")
def recorded(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every layout trains."""
    run_dir = tmp_path_factory.mktemp("recorded")
    record(run_dir)
    return {"checkpoint": str(tiny_checkpoint("qwen3", tied=True)), "run_dir": str(run_dir)}


@pytest.fixture(scope="module")
def references(recorded: dict[str, Any]) -> list[list[list[float]]]:
    """The figures of one rank."""
    found = train_modes(tp=1, cp=1, modes=MODES, **recorded)
    assert all(abs(step[0]) > 1e-3 for reference in found for step in reference)
    return found


@pytest.mark.parametrize(
    # The modes differ in the loss alone: all of them where a layout has its own way with it.
    ("ranks", "tp", "cp", "modes"),
    [(4, 2, 1, 2), (2, 1, 2, 3), (4, 1, 2, 1)],
    ids=["fsdp x tp", "cp", "fsdp x cp"],
)
def test_layouts_agree(
    ranks: int, tp: int, cp: int, modes: int, recorded: dict[str, Any], references: list[list[list[float]]]
) -> None:
    for rank in run_distributed(FUNCTION, ranks, tp=tp, cp=cp, modes=MODES[:modes], **recorded):
        assert len(rank) == modes
        for figures, reference in zip(rank, references, strict=False):
            for (loss, norm, *others), expected in zip(figures, reference, strict=True):
                assert loss == pytest.approx(expected[0], abs=1e-5)
                assert norm == pytest.approx(expected[1], rel=1e-4)
                assert others == pytest.approx(expected[2:], rel=1e-4, abs=1e-4)
