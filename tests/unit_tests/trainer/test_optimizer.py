"""Optimizers and the learning-rate schedule against their formulas."""

from __future__ import annotations

import logging
import math
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchtitan.config.job_config import Checkpoint, LRScheduler, Optimizer
from torchtitan.errors import ConfigError, UserError
from torchtitan.preflight.validate import draft_of, ready
from torchtitan.trainer.checkpoint import Checkpointer
from torchtitan.trainer.optimizer import BatchLRScheduler, build_optimizer, lr_factor


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 3)
        self.norm = nn.RMSNorm(3)
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


def gradients(policy: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_adamw_follows_its_formula(implementation: str) -> None:
    config = Optimizer(lr=0.02, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3, implementation=implementation)
    policy = Policy()
    optimizer = build_optimizer(policy, config)
    expected = {name: value.detach().double().clone() for name, value in policy.named_parameters()}
    first = {name: torch.zeros_like(value) for name, value in expected.items()}
    second = {name: torch.zeros_like(value) for name, value in expected.items()}
    for step in range(1, 5):
        gradients(policy, step)
        for name, parameter in policy.named_parameters():
            if name == "frozen":
                continue
            gradient = parameter.grad.double()
            first[name] = 0.8 * first[name] + 0.2 * gradient
            second[name] = 0.9 * second[name] + 0.1 * gradient**2
            if name == "linear.weight":  # the bias and the norm do not decay
                expected[name] *= 1 - 0.02 * 0.3
            denominator = (second[name] / (1 - 0.9**step)).sqrt() + 1e-6
            expected[name] -= 0.02 * first[name] / (1 - 0.8**step) / denominator
        optimizer.step()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), expected[name], rtol=1e-5, atol=1e-6)
    assert all(bool(group["fused"]) == (implementation == "fused") for group in optimizer.param_groups)


def test_fused_falls_back_with_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    policy = nn.Linear(2, 2, dtype=torch.complex64)  # the fused kernels take real numbers only
    with caplog.at_level(logging.WARNING):
        optimizer = build_optimizer(policy, Optimizer())
    assert optimizer.param_groups[0]["foreach"] is True
    assert "using foreach" in caplog.text


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(11, 8)
        self.tall, self.wide = nn.Linear(8, 24), nn.Linear(24, 8, bias=False)
        self.experts = nn.Parameter(torch.randn(2, 3, 8))
        self.lm_head = nn.Linear(8, 11, bias=False)


def test_muon_takes_the_matrices_of_layers_and_adamw_the_rest() -> None:
    config = Optimizer(name="Muon", lr=0.01, weight_decay=0.2)
    ours, adamw = Layers(), Layers()
    optimizer, reference = build_optimizer(ours, config), build_optimizer(adamw, Optimizer(lr=0.01, weight_decay=0.2))
    before = {name: one.detach().double() for name, one in ours.named_parameters()}
    gradients(ours, 1)
    gradients(adamw, 1)
    optimizer.step()
    reference.step()
    for name, parameter in ours.named_parameters():
        if name not in ("tall.weight", "wide.weight"):
            assert torch.equal(parameter, adamw.get_parameter(name)), name
            continue
        # An orthogonal matrix in the gradient's place, of the size of AdamW's update: 0.2 √(larger side).
        update = (before[name] * (1 - 0.01 * 0.2) - parameter.detach().double()) / (0.01 * 0.2 * math.sqrt(24))
        left, _, right = torch.linalg.svd(parameter.grad.double(), full_matrices=False)
        rotated = left.T @ update @ right.T
        assert (rotated.diagonal() > 0.6).all() and (rotated.diagonal() < 1.3).all()
        assert (rotated - rotated.diagonal().diag()).abs().max() < 0.1
    assert {id(one) for one in optimizer.state} == {id(one) for one in ours.parameters()}
    optimizer.zero_grad()
    assert all(one.grad is None for one in ours.parameters())


@pytest.mark.parametrize("name", ["Muon", "AdamW8bit"])
def test_a_resumed_optimizer_goes_on_as_the_unbroken_one(name: str, tmp_path: Path) -> None:
    if name == "AdamW8bit":
        pytest.importorskip("bitsandbytes")
    config = Optimizer(name=name, lr=0.01, weight_decay=0.1)  # type: ignore[arg-type]

    def start() -> tuple[nn.Module, torch.optim.Optimizer, Checkpointer]:
        policy = Layers()
        policy.embed_tokens = nn.Embedding(512, 8)  # large enough for eight bits
        optimizer = build_optimizer(policy, config)
        scheduler = BatchLRScheduler(optimizer, LRScheduler(decay_type="linear"), 8)
        return policy, optimizer, Checkpointer(Checkpoint(enable=True), tmp_path, policy, optimizer, scheduler)

    unbroken, optimizer, checkpoints = start()
    for step in range(1, 7):
        gradients(unbroken, step)
        optimizer.step()
        if step == 3:
            checkpoints.save(step)
    resumed, optimizer, checkpoints = start()
    checkpoints.load(3)
    for step in range(4, 7):
        gradients(resumed, step)
        optimizer.step()
    for key, parameter in resumed.named_parameters():
        assert torch.equal(parameter, unbroken.get_parameter(key)), key
    plain = Layers()
    plain.embed_tokens = nn.Embedding(512, 8)
    reference = build_optimizer(plain, Optimizer(lr=0.01, weight_decay=0.1))
    for step in range(1, 7):
        gradients(plain, step)
        reference.step()
    state = optimizer.state[resumed.embed_tokens.weight]
    if name == "AdamW8bit":
        assert {state[key].dtype for key in ("state1", "state2")} == {torch.uint8}
        moved = (resumed.embed_tokens.weight - plain.embed_tokens.weight).detach()
        assert 0 < moved.square().mean().sqrt() < 0.1 * 6 * 0.01


@pytest.mark.parametrize("name", ["Muon", "AdamW8bit"])
def test_optimizers_that_know_no_shards_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=f'optimizer.name = "{name}" is not allowed: it needs one trainer rank'):
        ready(draft_of("debug_cpu", {"optimizer.name": name}))
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(UserError, match="torch 2.9 or newer|needs the package bitsandbytes"):
        build_optimizer(Layers(), Optimizer(name=name))  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None)
@given(
    warmup=st.integers(0, 20),
    rest=st.integers(1, 60),
    floor=st.floats(0, 1),
    decay=st.sampled_from(["constant", "linear", "cosine"]),
)
def test_schedule_shape(warmup: int, rest: int, floor: float, decay: str) -> None:
    total = warmup + rest
    config = LRScheduler(warmup_steps=warmup, decay_type=decay, min_lr_factor=floor)
    factors = [lr_factor(batch, config, total) for batch in range(total + 3)]
    warm, decayed = factors[: warmup + 1], factors[warmup:]
    assert all(0 < factor <= 1 for factor in warm) and warm == sorted(warm) and factors[warmup] == pytest.approx(1)
    assert decayed == sorted(decayed, reverse=True)
    end = 1.0 if decay == "constant" else floor
    assert factors[total] == pytest.approx(end, abs=1e-12) and factors[total + 2] == pytest.approx(end, abs=1e-12)
    middle = warmup + rest // 2
    if rest % 2 == 0 and decay != "constant":  # both shapes pass half-way at half time
        assert factors[middle] == pytest.approx((1 + floor) / 2)
    if decay == "cosine":
        step = math.pi / rest
        assert factors[warmup + 1] == pytest.approx(floor + (1 - floor) * (0.5 + 0.5 * math.cos(step)))


def test_schedule_sets_all_groups_and_continues() -> None:
    config = LRScheduler(warmup_steps=3, decay_type="linear")
    optimizer = build_optimizer(Policy(), Optimizer(lr=0.4))
    scheduler = BatchLRScheduler(optimizer, config, total_batches=7)
    seen = []
    for _ in range(7):
        assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
        assert len(set(scheduler.get_last_lr())) == 1
        seen.append(scheduler.get_last_lr()[0])
        scheduler.step()
    assert seen == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.3, 0.2, 0.1])
    again = BatchLRScheduler(build_optimizer(Policy(), Optimizer(lr=0.4)), config, total_batches=7)
    again.load_state_dict({"batch": 5})
    assert again.get_last_lr() == [seen[5]] * 2 and again.state_dict() == {"batch": 5}
