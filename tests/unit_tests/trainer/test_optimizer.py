"""Optimizers and the learning-rate schedule against their formulas."""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.distributed_launcher import run_distributed
from tests.tiny_models import make_tiny
from torchtitan.config.job_config import Checkpoint, JobConfig, LRScheduler, Optimizer
from torchtitan.config.optimizer_step import warn_long_warmup
from torchtitan.distributed import device
from torchtitan.distributed.placement import ParallelDims, copy_full_, full_tensor
from torchtitan.errors import UserError
from torchtitan.models.parallelize import build_policy
from torchtitan.models.roles import Role, role_of
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


@pytest.mark.parametrize("fused", [True, False])
def test_adamw_follows_its_formula_with_and_without_the_fused_kernel(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan.trainer.optimizer._fused_kernel_works", lambda _: fused)
    config = Optimizer(lr=0.02, beta1=0.8, beta2=0.9, weight_decay=0.3)
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
            denominator = (second[name] / (1 - 0.9**step)).sqrt() + 1e-8
            expected[name] -= 0.02 * first[name] / (1 - 0.8**step) / denominator
        optimizer.step()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), expected[name], rtol=1e-5, atol=1e-6)
    assert all(bool(group["fused"]) == fused for group in optimizer.param_groups)


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


def test_muon_is_torchs_for_every_matrix_of_a_layer_and_adamw_for_the_rest() -> None:
    config = Optimizer(name="Muon", lr=0.01, weight_decay=0.2)
    ours, adamw = Layers(), Layers()
    optimizer, reference = build_optimizer(ours, config), build_optimizer(adamw, Optimizer(lr=0.01, weight_decay=0.2))
    whole = {name: nn.Parameter(adamw.get_parameter(f"{name}.weight").detach().clone()) for name in ("tall", "wide")}
    experts = [nn.Parameter(expert.clone()) for expert in adamw.experts.detach()]
    # torch's Muon takes one matrix at a time.
    torch_muon = torch.optim.Muon(
        [*whole.values(), *experts], lr=0.01, weight_decay=0.2, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(3):
        gradients(ours, step)
        gradients(adamw, step)
        for name, matrix in whole.items():
            matrix.grad = ours.get_parameter(f"{name}.weight").grad
        for expert, gradient in zip(experts, ours.experts.grad, strict=True):
            expert.grad = gradient
        for stepped in (optimizer, reference, torch_muon):
            stepped.step()
    expected = {f"{name}.weight": matrix.detach() for name, matrix in whole.items()} | {"experts": torch.stack(experts)}
    for name, parameter in ours.named_parameters():
        if name in expected:  # five products in bfloat16, in another order
            torch.testing.assert_close(parameter, expected[name], rtol=0, atol=3 * 0.01 * 0.2 * math.sqrt(24) * 2**-6)
        else:
            assert torch.equal(parameter, adamw.get_parameter(name)), name
    assert {id(parameter) for parameter in optimizer.state} == {id(parameter) for parameter in ours.parameters()}
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in ours.parameters())


ATTENTION = "self_attn.{q,k,v,o}_proj.weight"


@pytest.mark.parametrize(
    ("family", "config", "vectors", "matrices"),
    [
        (
            "gpt_oss",
            {"num_local_experts": 4},
            "self_attn.{q,k,v,o}_proj.bias self_attn.sinks mlp.gate.bias mlp.experts.{gate_up,down}_proj_bias "
            "{input,post_attention}_layernorm.weight",
            f"{ATTENTION} mlp.gate.weight mlp.experts.{{gate_up,down}}_proj",
        ),
        (
            "qwen3_moe",
            {"num_experts": 4, "head_dim": 16},
            "self_attn.{q,k}_norm.weight {input,post_attention}_layernorm.weight",
            f"{ATTENTION} mlp.gate.weight mlp.experts.{{gate,up,down}}_proj.weight",
        ),
        # By transformers. Its norms of heads have two dimensions.
        (
            "cohere",
            {"use_qk_norm": True},
            "self_attn.{q,k}_norm.weight input_layernorm.weight",
            f"{ATTENTION} mlp.{{gate,up,down}}_proj.weight",
        ),
    ],
)
def test_roles_do_not_follow_from_shapes(
    tmp_path: Path, family: str, config: dict[str, Any], vectors: str, matrices: str
) -> None:
    def spelled(names: str) -> set[str]:
        """a{b,c} is ab and ac."""
        parts = [re.fullmatch(r"(.*?)(?:\{(.*)\}(.*))?", name) for name in names.split()]
        return {f"{p[1]}{choice}{p[3] or ''}" for p in parts if p is not None for choice in (p[2] or "").split(",")}

    of_run = JobConfig()
    of_run.model.hf_assets_path = str(make_tiny(tmp_path, family, **config))
    policy = build_policy(of_run, ParallelDims(1, 1, 1, world_size=1))
    roles = {name.partition("layers.0.")[2]: role_of(policy, name) for name, _ in policy.named_parameters()}
    roles.pop("")
    expected = dict.fromkeys(spelled(vectors), Role.VECTOR) | dict.fromkeys(spelled(matrices), Role.MATRIX)
    assert roles == expected
    assert role_of(policy, "model.embed_tokens.weight") is Role.OTHER
    for name in ("AdamW", "Muon"):
        groups = build_optimizer(policy, Optimizer(name=name, weight_decay=0.1)).param_groups  # type: ignore[arg-type]
        decay = {parameter: group["weight_decay"] for group in groups for parameter in group["params"]}
        for parameter, value in policy.named_parameters():
            assert (decay[value] == 0) == (role_of(policy, parameter) is Role.VECTOR)


FULL = ["full_attention"] * 3
# Two key heads of 8, and four value heads of 12.
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"], "num_hidden_layers": 3, "head_dim": 16,
}  # fmt: skip
NEXT = {**DELTA, "num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}


def by_heads(weight: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """As Qwen3-Next's layers in transformers divide what they have projected."""
    return [part.flatten(0, 1) for part in weight.unflatten(0, (-1, sum(sizes))).split(sizes, 1)]


@pytest.mark.parametrize(
    ("family", "config", "name", "cut"),
    [
        ("phi3", {}, "self_attn.qkv_proj.weight", lambda w: w.split([64, 32, 32])),
        ("phi3", {}, "mlp.gate_up_proj.weight", lambda w: w.split(96)),
        ("gpt_oss", {"num_local_experts": 2}, "mlp.experts.gate_up_proj", lambda w: [*w[..., ::2], *w[..., 1::2]]),
        ("qwen3_5_text", DELTA, "linear_attn.in_proj_qkv.weight", lambda w: w.split([16, 16, 48])),
        ("qwen3_5_text", DELTA, "linear_attn.in_proj_z.weight", lambda w: [w]),
        ("qwen3_next", NEXT, "linear_attn.in_proj_qkvz.weight", lambda w: by_heads(w, [8, 8, 24, 24])),
        ("qwen3_next", NEXT, "linear_attn.in_proj_ba.weight", lambda w: by_heads(w, [2, 2])),
        ("qwen3_next", {**NEXT, "layer_types": FULL}, "self_attn.q_proj.weight", lambda w: by_heads(w, [16, 16])),
        ("qwen3_5_text", {**DELTA, "layer_types": FULL}, "self_attn.k_proj.weight", lambda w: [w]),
    ],
)
def test_muon_takes_projections_apart_that_are_stored_as_one(
    tmp_path: Path, family: str, config: dict[str, Any], name: str, cut: Callable[[torch.Tensor], list[torch.Tensor]]
) -> None:
    of_run = JobConfig()
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    directory = make_tiny(tmp_path, family, **{**sizes, "head_dim": 16, **config})
    of_run.model.hf_assets_path = str(directory)
    policy = build_policy(of_run, ParallelDims(1, 1, 1, world_size=1))
    weight = policy.get_parameter(f"model.layers.0.{name}")
    parts = [nn.Parameter(part.clone()) for part in cut(weight.detach())]
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    for part, gradient in zip(parts, cut(weight.grad), strict=True):
        part.grad = gradient.clone()
    build_optimizer(policy, Optimizer(name="Muon", lr=0.01)).step()
    torch.optim.Muon(parts, lr=0.01, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw").step()
    for part, expected in zip(cut(weight.detach()), parts, strict=True):
        torch.testing.assert_close(part, expected.detach(), rtol=0, atol=0.01 * 0.2 * math.sqrt(96) * 2**-6)


def after_muon(directory: str, layouts: list[dict[str, int]]) -> list[list[list[float]]]:
    """Of every layout, the whole matrices after two steps on gradients that all layouts have alike."""
    found = []
    for layout in layouts:
        config = JobConfig()
        config.model.hf_assets_path = directory
        vars(config.parallelism).update(layout)
        dims = ParallelDims.from_config(config.parallelism, device.world_size(), device.rank())
        policy, generator = build_policy(config, dims), torch.Generator().manual_seed(2)
        optimizer = build_optimizer(policy, Optimizer(name="Muon", lr=0.01))
        for _ in range(2):
            for _, parameter in sorted(policy.named_parameters()):
                parameter.grad = torch.zeros_like(parameter)
                copy_full_(parameter.grad, torch.randn(parameter.shape, generator=generator))
            optimizer.step()
        matrices = [name for name, _ in policy.named_parameters() if "in_proj" in name or "q_proj" in name]
        found.append([full_tensor(policy.get_parameter(name).detach()).flatten().tolist() for name in matrices])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("family", "config"), [("qwen3_5_text", DELTA), ("qwen3_next", NEXT)])
def test_ranks_put_matrices_together_that_are_stored_by_head(
    tmp_path: Path, family: str, config: dict[str, Any]
) -> None:
    directory = str(make_tiny(tmp_path, family, **config))
    (alone,) = after_muon(directory, [{}])
    layouts = [{}, {"tensor_parallel_degree": 2}]
    for rank in run_distributed(f"{__name__}:after_muon", 4, directory=directory, layouts=layouts):
        assert rank == [alone, alone]


@pytest.mark.parametrize(("warmup", "steps"), [(w, s) for w in (0, 1, 3, 7) for s in (1, 2, 3, 4, 8)])
def test_a_rate_that_never_reaches_its_peak_is_named(warmup: int, steps: int) -> None:
    config = JobConfig()
    config.lr_scheduler.warmup_steps, config.training.steps = warmup, steps
    highest = max(lr_factor(batch, config.lr_scheduler, steps) for batch in range(steps))
    assert (warn_long_warmup(config) is not None) == (highest < 1)


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


def test_eight_bits_are_refused_without_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(UserError, match="needs the package bitsandbytes"):
        build_optimizer(Layers(), Optimizer(name="AdamW8bit"))


@settings(max_examples=100)
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
