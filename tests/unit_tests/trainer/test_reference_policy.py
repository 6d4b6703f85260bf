"""The second policy that a KL term compares with: frozen, following, offloaded, in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.unit_tests.trainer.test_gradient_independence import LONGEST, make_batch
from torchtitan.config.job_config import JobConfig, Lora
from torchtitan.distributed import device
from torchtitan.distributed.placement import ParallelDims, full_tensor
from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_checkpoint import save_adapter
from torchtitan.models.layers.attention import PackedLayout
from torchtitan.models.parallelize import build_policy
from torchtitan.models.shape.checkpoint_shape import read_shape
from torchtitan.models.shape.costs import MemoryEstimate, estimate_memory
from torchtitan.trainer.checkpoint import Checkpointer
from torchtitan.trainer.policy_trainer import PolicyTrainer
from torchtitan.trainer.reference import Reference, ReferencePolicy, build_reference


@pytest.fixture
def config(tiny_checkpoint: Callable[..., Path]) -> Iterator[JobConfig]:
    config = JobConfig()
    config.model.hf_assets_path = str(tiny_checkpoint("qwen3", tied=True))
    config.grpo.kl_coefficient = 0.1
    config.grpo.geometric_mask = []
    config.optimizer.lr = 1e-2
    config.rollout.max_completion_tokens = LONGEST
    yield config
    # Offloading made a process group.
    device.shutdown()


def build(config: JobConfig) -> tuple[Decoder, Reference, PolicyTrainer]:
    trainer = PolicyTrainer(config, ParallelDims(1, 1, 1, world_size=1, rank=0))
    reference = trainer.references[""]
    assert isinstance(reference, ReferencePolicy)
    return trainer.policy, reference, trainer


def weights(policy: Decoder) -> dict[str, torch.Tensor]:
    return {name: full_tensor(parameter.detach()).clone() for name, parameter in policy.named_parameters()}


@torch.no_grad()
def change(policy: Decoder, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        parameter += 0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.device)


@torch.no_grad()
def log_probs(policy: Decoder) -> torch.Tensor:
    tokens = torch.arange(3, 33, device=device.device())
    found: torch.Tensor = policy(tokens[:-1], PackedLayout([29], device.device()), tokens[1:])[0]
    return found


def test_divergence_is_zero_until_the_policy_moves(config: JobConfig) -> None:
    policy, reference, trainer = build(config)
    before = weights(policy)
    divergences = [trainer.train_batch(make_batch(seed)).metrics["reference_kl"] for seed in (0, 1)]
    assert divergences[0] == 0.0 and divergences[1] is not None and divergences[1] > 1e-4
    for name, parameter in reference.policy.named_parameters():
        assert torch.equal(parameter, before[name]) and parameter.grad is None and not parameter.requires_grad
    assert not torch.equal(policy.model.norm.weight, before["model.norm.weight"])


@pytest.mark.parametrize("offload", [False, True])
def test_follows_as_an_average_in_float64_does(config: JobConfig, offload: bool) -> None:
    config.grpo.reference_ema_decay = 0.8
    config.training.enable_cpu_offload = "optimizer" if offload else False
    policy, reference, _ = build(config)
    expected = {name: tensor.double() for name, tensor in weights(policy).items()}
    for version in range(1, 7):
        change(policy, version)
        # As in training: a forward comes before.
        log_probs(reference.policy)
        reference.follow(policy)
        for name, weight in weights(policy).items():
            expected[name] = 0.8 * expected[name] + 0.2 * weight.double()
    assert reference.follows
    for name, weight in weights(reference.policy).items():
        torch.testing.assert_close(weight.double(), expected[name].to(weight.device), rtol=1e-5, atol=1e-6)
    # What is asked is what has followed.
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            weight.copy_(expected[name])
    torch.testing.assert_close(log_probs(reference.policy), log_probs(policy), rtol=1e-4, atol=1e-4)


def estimate(config: JobConfig) -> MemoryEstimate:
    args = read_shape(config)
    assert args is not None
    return estimate_memory(config, args, 1)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    ("layout", "second"),
    [
        ({}, True),
        ({"rank": 4}, False),
        ({"rank": 4, "adapter_path": "start"}, False),
        ({"rank": 4, "modules_to_save": ["norm", "down_proj"]}, True),
        ({"rank": 4, "modules_to_save": ["norm", "down_proj"], "adapter_path": "start"}, True),
        ({"rank": 4, "modules_to_save": ["norm", "down_proj"], "base_bits": 4}, True),
    ],
    ids=["whole", "adapters", "begun adapters", "adapters and modules", "begun adapters and modules", "four bits"],
)
def test_plan_counts_its_bytes(
    config: JobConfig, tmp_path: Path, layout: dict[str, Any], second: bool, offload: bool
) -> None:
    dims = ParallelDims(1, 1, 1, world_size=1, rank=0)
    config.lora = Lora(target_modules=["q_proj", "up_proj"], **layout | {"adapter_path": ""})
    if "adapter_path" in layout:
        save_adapter(build_policy(config, dims), tmp_path)
        config.lora.adapter_path = str(tmp_path)
    config.training.enable_cpu_offload = "optimizer" if offload else False
    policy = build_policy(config, dims)
    shared = {id(parameter) for parameter in policy.parameters()}
    reference = build_reference(config, dims, policy).policy
    planned = estimate(config)
    assert planned.reference == sum(weight.nbytes for weight in reference.parameters() if id(weight) not in shared)
    assert (planned.reference > 0) == second
    assert planned.parameters == sum(parameter.nbytes for parameter in policy.parameters())
    config.grpo.kl_coefficient = 0.0
    alone = estimate(config)
    assert alone.reference == 0
    # What lies in host memory comes to the device in units.
    assert (planned.gathered > alone.gathered) == (second and offload)


def test_offloaded_reference_says_the_same(config: JobConfig) -> None:
    _, on_device, _ = build(config)
    config.training.enable_cpu_offload = "optimizer"
    policy, offloaded, _ = build(config)
    for _ in range(2):
        assert torch.equal(log_probs(offloaded.policy), log_probs(on_device.policy))
        # Nothing is left gathered after a forward.
        assert all(isinstance(shard, DTensor) and shard.device.type == "cpu" for shard in offloaded.policy.parameters())
    assert not any(isinstance(parameter, DTensor) for parameter in policy.parameters())


@pytest.mark.parametrize("offload", [False, True])
def test_a_reference_that_follows_comes_back_from_a_checkpoint(
    config: JobConfig, tmp_path: Path, offload: bool
) -> None:
    config.grpo.reference_ema_decay = 0.5
    config.training.enable_cpu_offload = "optimizer" if offload else False

    def attach() -> tuple[Decoder, Reference, Checkpointer]:
        policy, reference, trainer = build(config)
        parts = policy, trainer.optimizer, trainer.scheduler, reference.policy
        return policy, reference, Checkpointer(config.checkpoint, tmp_path, *parts)

    policy, reference, checkpointer = attach()
    change(policy, 1)
    log_probs(reference.policy)
    reference.follow(policy)
    checkpointer.save(1)
    _, restored, other = attach()
    other.load()
    for name, weight in weights(restored.policy).items():
        assert torch.equal(weight, weights(reference.policy)[name])
        assert not torch.equal(weight, weights(policy)[name])
