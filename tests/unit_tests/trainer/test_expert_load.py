"""The experts that move a router's bias: those of every token of every sequence, once, whatever is computed besides."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed_launcher import run_distributed
from tests.mixtures import make_mixture
from tests.unit_tests.trainer.test_policy_trainer import run_config
from tests.unit_tests.trainer.test_prefixes import make_tree
from torchtitan.config.job_config import JobConfig
from torchtitan.distributed import device
from torchtitan.distributed.placement import ParallelDims
from torchtitan.models.hf_checkpoint import load_policy
from torchtitan.models.layers.attention import PackedLayout
from torchtitan.models.parallelize import mixtures
from torchtitan.rollout.types import Batch, Group
from torchtitan.trainer.policy_trainer import PolicyTrainer

RATE = 0.01
CHECKPOINTING = {"activation_checkpoint.mode": "full"}
COMPILE = {"compile.enable": True, "compile.backend": "aot_eager"}
TWO_RANKS: list[dict[str, Any]] = [
    {},
    {"parallelism.expert_parallel_degree": 2},
    {"parallelism.tensor_parallel_degree": 2},
    {"parallelism.context_parallel_degree": 2},
]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixture(tmp_path_factory.mktemp("mixtures") / "glm4_moe", "glm4_moe")


def expected_loads(directory: Path, groups: list[Group]) -> torch.Tensor:
    """[mixtures, experts]: how often each sequence's tokens choose them, each sequence computed alone."""
    policy = load_policy(directory)
    loads = torch.zeros(len(mixtures(policy)), 8, dtype=torch.int64)
    for place, layer in enumerate(mixtures(policy)):

        def count(_: int, experts: torch.Tensor, into: torch.Tensor = loads[place]) -> None:
            into += experts[: len(tokens)].flatten().bincount(minlength=8)

        layer.record = count
    for branch in (branch for group in groups for sample in group.samples for branch in sample.branches):
        tokens = torch.tensor(branch.token_ids[:-1])
        with torch.no_grad():
            policy(tokens, PackedLayout([len(tokens)]))
    return loads


class Counted(PolicyTrainer):
    """Remembers what every optimizer step has moved biases by, and the loads that it counted."""

    def __init__(self, config: JobConfig, merges_prefixes: bool = True):
        dims = ParallelDims.from_config(config.parallelism, device.world_size(), device.rank())
        super().__init__(config, dims, merges_prefixes=merges_prefixes)
        self.loads: list[torch.Tensor] = []
        self.moved: list[torch.Tensor] = []
        assert self.expert_load is not None
        self._step, self.expert_load.step = self.expert_load.step, self._counted_step  # type: ignore[method-assign]

    def _counted_step(self) -> None:
        gates = [layer.gate for layer in mixtures(self.policy)]
        before = [gate.e_score_correction_bias.clone() for gate in gates]
        self.loads.append(torch.stack([self.expert_load._loads[layer.index] for layer in mixtures(self.policy)]))
        self._step()
        self.moved.append(
            torch.stack([gate.e_score_correction_bias - bias for gate, bias in zip(gates, before, strict=True)])
        )


def config_of(directory: str | Path, values: dict[str, Any]) -> JobConfig:
    config = run_config(directory)
    # The bias of a step must not decide about the next one's experts.
    config.training.expert_bias_rate, config.optimizer.lr = RATE, 0.0
    config.training.tokens_per_micro_batch = 80
    for key, value in values.items():
        table, _, name = key.partition(".")
        setattr(getattr(config, table), name, value)
    return config


def check_moves(moved: torch.Tensor, loads: torch.Tensor) -> None:
    wanted = RATE * (loads.double().mean(-1, keepdim=True) - loads).sign()
    torch.testing.assert_close(moved.double(), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("merged", "budget", "values"),
    [
        (False, 80, {}),
        (False, 4000, {"grpo.recompute_old_log_probs": True}),
        (True, 80, {"grpo.recompute_old_log_probs": True}),
        (True, 200, {}),
        (True, 4000, CHECKPOINTING),
        pytest.param(True, 200, {**COMPILE, **CHECKPOINTING}, marks=pytest.mark.slow),
    ],
)
def test_loads_do_not_depend_on_how_a_batch_is_computed(
    mixture: Path, values: dict[str, Any], budget: int, merged: bool
) -> None:
    config = config_of(mixture, {"training.tokens_per_micro_batch": budget, **values})
    trainer, batch = Counted(config, merged), make_tree(0)
    loads = expected_loads(mixture, batch.groups)
    trainer.score([3, 4, 5, 6])
    trainer.cross_entropy(batch)
    metrics = trainer.train_batch(batch).metrics
    assert (metrics["computed_share"] < 0.9) == merged
    (found,) = trainer.loads
    assert torch.equal(found, loads.double())
    check_moves(trainer.moved[0], loads)
    # A version that is asked for in the middle of a run changes nothing either.
    trainer.score([3, 4, 5, 6])
    assert not trainer.expert_load._loads


def test_every_step_counts_its_own_minibatch_and_none_that_was_skipped(mixture: Path) -> None:
    batch = make_tree(0)
    spoiled = batch.groups[1]
    for sample in spoiled.samples:
        sample.reward = math.nan
    trainer = Counted(config_of(mixture, {"grpo.num_minibatches": 3}))
    metrics = trainer.train_batch(batch).metrics
    assert metrics["optimizer_steps_skipped"] == 1
    first, last = (expected_loads(mixture, [batch.groups[place]]).double() for place in (0, 2))
    # The first step's bias may have changed the second one's experts, but not how many there are.
    assert torch.equal(trainer.loads[0], first)
    assert torch.equal(trainer.loads[1].sum(-1), last.sum(-1))


def biases_moved(directory: str, layouts: list[dict[str, Any]]) -> list[list[list[float]]]:
    found = []
    for values in layouts:
        trainer = Counted(config_of(directory, values))
        # One rank has nothing to train in the last of its micro-batches.
        trainer.train_batch(Batch(0, make_tree(0).groups[:1]))
        found.append(trainer.moved[0].tolist())
    return found


@pytest.mark.slow
def test_ranks_count_as_one_does(mixture: Path) -> None:
    loads = expected_loads(mixture, make_tree(0).groups[:1])
    ranks = run_distributed(
        "tests.unit_tests.trainer.test_expert_load:biases_moved", 2, directory=str(mixture), layouts=TWO_RANKS
    )
    for rank in ranks:
        for moved in rank:
            check_moves(torch.tensor(moved), loads)
