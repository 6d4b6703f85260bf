"""A step of a policy with adapters over two ranks, in every layout, against the same step on one."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed_launcher import run_distributed
from tests.mixtures import make_mixture
from tests.roundings import forward_rounding
from tests.unit_tests.distributed.test_parallel import COMPILED, EP, RECOMPUTED, TP
from tests.unit_tests.models.test_lora import config_of, fill
from torchtitan.config.job_config import Optimizer
from torchtitan.distributed import collectives, device
from torchtitan.distributed.placement import ParallelDims, copy_full_, full_tensor
from torchtitan.models.adapter_math import is_factor
from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_checkpoint import export_policy, save_adapter
from torchtitan.models.layers.attention import PackedLayout
from torchtitan.models.lora import base_parameters, whole_weights
from torchtitan.models.parallelize import build_policy
from torchtitan.models.shape.model_args import read_model_args
from torchtitan.trainer.optimizer import build_optimizer
from torchtitan.trainer.reference import build_reference

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "tp": {TP: 2},
    # One of each kind of split: tracing all of them would take longest of this file.
    "tp, compiled": {TP: 2, **RECOMPUTED, **COMPILED, "lora.target_modules": ["q_proj", "down_proj", "lm_head"]},
    "fsdp, full, bfloat16": {**RECOMPUTED, "training.dtype": "bfloat16"},
    "ep": {EP: 2},
}


# AdamW with an epsilon of the size of the gradients: its first step is lr · g / (|g| + epsilon), whose slope is at most
# lr / epsilon. With a small epsilon an element whose gradient is nothing but rounding would go either way by lr.
LR, EPSILON = 1e-2, 1.0
# Of the log-probs in `step`.
LARGEST_LOG_PROB = 25


def step(directory: str, layout: dict[str, Any], scratch: str) -> dict[str, Any]:
    """Loss and norm of the gradient, of a policy laid out over the ranks there are.

    Its exports after a step lie in `scratch`, and the gradient's largest element is written there.
    """
    config = config_of(directory, layout)
    dims = ParallelDims.from_config(config.parallelism, device.world_size(), device.rank())
    policy = build_policy(config, dims)
    assert {p.dtype for n, p in policy.named_parameters() if is_factor(n)} == {torch.float32}
    muon = _muon(policy)
    fill(policy)
    optimizer = build_optimizer(policy, config.optimizer)
    rows = [0, 1] if dims.dp_size == 1 else [dims.dp_rank]
    tokens = torch.cat([torch.arange(3, 17) + 14 * row for row in rows])
    targets = tokens.view(-1, 14).roll(-1, 1).flatten()
    loss = -policy(tokens, PackedLayout([14] * len(rows)), targets)[0].sum() / 28
    loss.backward()
    total = collectives.all_reduce_sum(loss.detach()) / dims.tp
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    norm, _ = collectives.gradient_norm_and_votes(trained, torch.zeros(1))
    largest = max(full_tensor(parameter.grad).abs().max().item() for parameter in trained if parameter.grad is not None)
    for group in optimizer.param_groups:
        group.update(lr=LR, eps=EPSILON)
    optimizer.step()
    with torch.no_grad(), build_reference(config, dims, policy).active():
        start = policy(tokens, PackedLayout([14] * len(rows)), targets)[0].sum()
    reference = collectives.all_reduce_sum(start) / dims.tp
    folder = Path(scratch)
    export_policy(policy, folder / "merged")
    save_adapter(policy, folder / "adapter")
    (folder / "largest").write_text(str(largest))
    if device.rank() == 0:
        save_file(muon, folder / "muon.safetensors")
    names = base_parameters(policy)
    sent, whole = dict(whole_weights(policy, names, torch.bfloat16)), dict(whole_weights(policy, names))
    as_rounded = all(torch.equal(sent[name], whole[name].to(torch.bfloat16)) for name in whole)
    return {"loss": total.item(), "norm": norm.item(), "reference": reference.item(), "sent as rounded": as_rounded}


def _muon(policy: Decoder) -> dict[str, torch.Tensor]:
    """The factors after a step of Muon on gradients that are the same in every layout."""
    fill(policy)
    factors = {name: parameter for name, parameter in sorted(policy.named_parameters()) if parameter.requires_grad}
    generator = torch.Generator().manual_seed(0)
    for factor in factors.values():
        factor.grad = torch.zeros_like(factor)
        copy_full_(factor.grad, torch.randn(factor.shape, generator=generator))
    build_optimizer(policy, Optimizer(name="Muon", lr=1e-2)).step()
    result = {name: full_tensor(parameter.detach()).clone() for name, parameter in factors.items()}
    policy.zero_grad()
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=name, marks=[pytest.mark.exhaustive] if COMPILED.items() <= layout.items() else [])
        for name, layout in LAYOUTS.items()
    ],
)
def test_layouts_agree(tiny_checkpoint: Callable[..., Path], tmp_path: Path, layout: dict[str, Any]) -> None:
    directory = tiny_checkpoint("qwen2", False)
    if EP in layout:
        directory = make_mixture(tmp_path / "mixture", "qwen3_moe", mlp_only_layers=[])
    alone = {key: value for key, value in layout.items() if key.partition(".")[0] in ("training", "lora")}
    start = build_policy(config_of(str(directory), alone), ParallelDims(1, 1, 1, world_size=1))
    fill(start, seed=1)
    save_adapter(start, tmp_path / "start")
    began = {"lora.adapter_path": str(tmp_path / "start"), "grpo.kl_coefficient": 0.1}
    alone, layout = alone | began, layout | began
    expected = step(str(directory), alone, str(tmp_path / "alone"))
    assert expected["norm"] > 0.1 and expected["sent as rounded"]
    function, scratch = "tests.unit_tests.distributed.test_adapter_layouts:step", str(tmp_path / "two")
    results = run_distributed(function, 2, directory=str(directory), layout=layout, scratch=scratch)
    rounds = "training.dtype" in layout
    tolerance = 2e-2 if rounds else 1e-4
    for result in results:
        assert result == pytest.approx(expected, rel=tolerance)
    # What rounding adds to a logit changes its gradient by that share, and a step by lr / epsilon times as much.
    share = tolerance if rounds else forward_rounding(read_model_args(directory), LARGEST_LOG_PROB)
    factor = LR / EPSILON * share * float((tmp_path / "alone" / "largest").read_text())
    # An element of scale · B A has 2 · rank products with an element that is off.
    saved = load_file(tmp_path / "alone" / "adapter" / "adapter_model.safetensors")
    lora = config_of(str(directory), layout).lora
    products = (
        lora.alpha / lora.rank * math.sqrt(2 * lora.rank) * max(tensor.abs().max().item() for tensor in saved.values())
    )
    of_merged = min(products * factor, 3e-2)
    ours, reference = (load_file(tmp_path / ranks / "muon.safetensors") for ranks in ("two", "alone"))
    assert ours.keys() == reference.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], reference[name], rtol=1e-6, atol=1e-8)
    files = {"adapter/adapter_model.safetensors": factor, "merged/model.safetensors": of_merged}
    for file, rounding in files.items():
        ours, reference = load_file(tmp_path / "two" / file), load_file(tmp_path / "alone" / file)
        assert ours.keys() == reference.keys()
        for name in ours:
            torch.testing.assert_close(ours[name], reference[name], rtol=tolerance if rounds else 0, atol=rounding)
