"""What a device computes against float64 on the CPU: attention, head, grouped products, norms, and a whole step."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

from scripts.make_debug_checkpoint import debug_model_args
from tests.devices import assert_near, needs_gpu, on_devices
from tests.distributed_launcher import run_distributed
from tests.unit_tests.models.test_attention import Layer, plain_attention
from torchtitan.config.job_config import JobConfig, Optimizer
from torchtitan.distributed import device
from torchtitan.distributed.placement import ParallelDims, full_tensor
from torchtitan.models.decoder import Decoder
from torchtitan.models.head.logprob_head import full_log_probs, fused_log_probs, fused_objective
from torchtitan.models.layers.attention import PackedAttention, PackedLayout, uses_varlen_flash
from torchtitan.models.layers.elementwise import rms_norm, rotate, swiglu
from torchtitan.models.layers.mixture import grouped_linear, places_of
from torchtitan.models.parallelize import parallelize
from torchtitan.trainer.optimizer import build_optimizer

on_types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def operands(where: str, dtype: torch.dtype, *shapes: tuple[int, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Random leaves on the device, and the same values in float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [tensor.to(where).requires_grad_() for tensor in drawn], [
        tensor.double().requires_grad_() for tensor in drawn
    ]


def compare(found: torch.Tensor, exact: torch.Tensor, ours: list, reference: list, dtype: torch.dtype) -> None:
    """Results, and gradients of a random projection of them."""
    assert_near(found, exact, dtype)
    along = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = torch.autograd.grad(found, ours, along.to(found))
    for gradient, exact_gradient in zip(got, torch.autograd.grad(exact, reference, along.double()), strict=True):
        assert_near(gradient, exact_gradient, dtype)


@on_devices
@on_types
@pytest.mark.parametrize("head", [24, 64, 128])
@pytest.mark.parametrize(("window", "sinks"), [(0, False), (33, False), (33, True)])
def test_attention(where: str, dtype: torch.dtype, head: int, window: int, sinks: bool) -> None:
    """Four query heads for each key head; on a GPU in bfloat16 the kernel of variable length."""
    lengths = [130, 1, 57]
    shapes: list[tuple[int, ...]] = [(sum(lengths), 8, head), (sum(lengths), 2, head), (sum(lengths), 2, head)]
    ours, reference = operands(where, dtype, *shapes, *[(8,)] * sinks)
    layer = Layer(window=window, scale=head**-0.5, sinks=ours[3] if sinks else None)
    exact = Layer(window=window, scale=head**-0.5, sinks=reference[3] if sinks else None)
    assert uses_varlen_flash(ours[0]) == (where == "cuda" and dtype == torch.bfloat16)
    found = PackedAttention(PackedLayout(lengths, where))(layer, *ours[:3])
    compare(found, plain_attention(exact, lengths, *reference[:3]), ours, reference, dtype)


@on_devices
@on_types
def test_attention_of_completions_behind_one_prompt(where: str, dtype: torch.dtype) -> None:
    prompt, completions = 40, [30, 9]
    total = prompt + sum(completions)
    ours, reference = operands(where, dtype, (total, 4, 64), (total, 2, 64), (total, 2, 64))
    layer = Layer(scale=0.125)
    found = PackedAttention(PackedLayout([prompt, *completions], where, [-1, 0, 0]))(layer, *ours)
    paths = [torch.arange(prompt + 30), torch.cat((torch.arange(prompt), torch.arange(prompt + 30, total)))]
    each = [plain_attention(layer, [len(path)], *(operand[path] for operand in reference)) for path in paths]
    exact = torch.cat((each[0], each[1][prompt:]))
    compare(found, exact, ours, reference, dtype)


@on_devices
@on_types
@pytest.mark.parametrize("one_pass", [False, True])
def test_log_probs_and_their_gradients(where: str, dtype: torch.dtype, one_pass: bool) -> None:
    ours, reference = operands(where, dtype, (67, 64), (1000, 64))
    targets = torch.randint(0, 1000, (67,), generator=torch.Generator().manual_seed(2))
    logits = reference[0] @ reference[1].t() / 0.7
    exact = logits.log_softmax(-1)
    entropy = -(exact.exp() * exact).sum(-1)
    exact = exact.gather(-1, targets[:, None])[:, 0]
    options = {"temperature": 0.7, "budget_bytes": 100_000}
    weights = torch.linspace(-1, 1, 67, dtype=torch.float64)
    if one_pass:
        by_row = weights.float().to(where)
        loss, log_probs, spread = fused_objective(
            *ours, targets.to(where), lambda row_log_probs, _, rows: by_row[rows] * row_log_probs, **options
        )
    else:
        log_probs, spread = fused_log_probs(*ours, targets.to(where), **options)
        loss = (log_probs * weights.to(log_probs)).sum()
    assert_near(log_probs, exact, torch.float32)
    assert_near(spread, entropy, torch.float32)
    for gradient, exact_gradient in zip(
        torch.autograd.grad(loss, ours), torch.autograd.grad(exact @ weights, reference), strict=True
    ):
        assert_near(gradient, exact_gradient, dtype)
    plain = full_log_probs((ours[0].float() @ ours[1].float().t()).detach(), targets.to(where), 0.7)
    assert_near(plain[0], exact, torch.float32)


@on_devices
@on_types
def test_products_of_experts(where: str, dtype: torch.dtype) -> None:
    """One expert has no row, and rows are left over at the end."""
    expert = torch.randint(0, 4, (200,), generator=torch.Generator().manual_seed(3))
    expert[expert == 2] = 0
    ours, reference = operands(where, dtype, (200, 64), (4, 32, 64))
    places = places_of(expert.to(where), 4, 8)
    rows = ours[0].new_zeros(len(places.token), 64).index_copy(0, places.place, ours[0])
    found = grouped_linear(rows, ours[1], places.ends).index_select(0, places.place)
    exact = torch.stack([reference[1][e] @ row for e, row in zip(expert.tolist(), reference[0], strict=True)])
    compare(found, exact, ours, reference, dtype)


@on_devices
@on_types
@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "rotate"])
def test_elementwise(where: str, dtype: torch.dtype, name: str) -> None:
    if name == "rms_norm":
        ours, reference = operands(where, dtype, (50, 4, 64), (64,))
        x, weight = reference
        exact = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
        found = rms_norm(ours[0], ours[1], 1e-6)
    elif name == "swiglu":
        ours, reference = operands(where, dtype, (50, 64), (50, 64))
        exact, found = torch.nn.functional.silu(reference[0]) * reference[1], swiglu(*ours)
    else:
        ours, reference = operands(where, dtype, (50, 4, 64))
        angles = torch.randn(50, 1, 32, generator=torch.Generator().manual_seed(4))
        tables = [torch.cat((angles.cos(),) * 2, -1).to(dtype), torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)]
        cosine, sine = (table.double() for table in tables)
        halves = reference[0].roll(32, -1)
        exact, found = reference[0] * cosine + halves * sine, rotate(*ours, *(table.to(where) for table in tables))
    compare(found, exact, ours, reference, dtype)


def one_step(mixture: bool, dtype: torch.dtype, where: torch.device | str) -> dict[str, torch.Tensor]:
    """Gradients of a pack and the weights after AdamW's step, in float64 on the CPU, by name."""
    policy = Decoder(dataclasses.replace(debug_model_args(mixture), num_hidden_layers=2)).to(dtype)
    policy.initialize_weights(0)
    ranks = 1
    if dtype != torch.float64:
        config, ranks = JobConfig(), device.world_size()
        config.training.mixed_precision_param = config.training.mixed_precision_reduce = "float32"
        parallelize(policy, ParallelDims.from_config(config.parallelism, ranks), config)
    policy.to(where)
    policy.tie_weights()
    generator = torch.Generator().manual_seed(5)
    tokens, targets = torch.randint(0, policy.args.vocab_size, (2, 60), generator=generator)
    log_probs, entropy = policy(tokens.to(where), PackedLayout([25, 35], where), targets.to(where), 0.9)
    # FSDP2 adds up the same gradient of every rank.
    (-(log_probs + 0.1 * entropy).sum() / ranks).backward()
    found = {
        f"gradient of {name}": full_tensor(parameter.grad).double().cpu()
        for name, parameter in policy.named_parameters()
        if parameter.grad is not None
    }
    with mock.patch("torchtitan.trainer.optimizer.EPS", 1e-4):
        build_optimizer(policy, Optimizer(lr=1e-3)).step()
    return found | {
        name: full_tensor(parameter.detach()).double().cpu() for name, parameter in policy.named_parameters()
    }


def deviations(mixture: bool) -> list[float]:
    """Of a step in float32 on this rank's device from the same in float64 on the CPU, relative; runs on every rank."""
    ours, exact = (one_step(mixture, dtype, where) for dtype, where in (
        (torch.float32, device.device()), (torch.float64, "cpu")
    ))  # fmt: skip
    assert ours.keys() == exact.keys() and len(exact) > 20
    return [float((ours[name] - exact[name]).norm() / exact[name].norm()) for name in exact]


@on_devices
@pytest.mark.parametrize("mixture", [False, True], ids=["dense", "mixture"])
def test_a_step_of_the_policy(where: str, mixture: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHTITAN_DEVICE", where)
    device.device.cache_clear()
    assert max(deviations(mixture)) < 1e-4
    device.device.cache_clear()


two_gpus = pytest.param("cuda", marks=[*needs_gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="2 GPUs")])


@pytest.mark.slow
@pytest.mark.parametrize("where", ["cpu", two_gpus])
def test_a_step_of_two_ranks(where: str) -> None:
    for of_rank in run_distributed("tests.unit_tests.models.test_numerics:deviations", 2, where=where, mixture=False):
        assert max(of_rank) < 1e-4
