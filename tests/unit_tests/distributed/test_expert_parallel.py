"""Experts over ranks, against one rank: the same tokens give the same loss, gradient norm, step, export and version."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed_launcher import run_distributed
from tests.mixtures import make_mixture
from tests.unit_tests.distributed.test_parallel import CP, EP, REPLICATE, TP, Layout, _config, check_layouts
from torchtitan.distributed import collectives, device
from torchtitan.distributed.placement import LocalTensors, ParallelDims, copy_full_, full_tensor
from torchtitan.errors import UserError
from torchtitan.models.decoder import Decoder
from torchtitan.models.layers.attention import PackedLayout
from torchtitan.models.lora import synced_parameters
from torchtitan.models.parallelize import build_policy
from torchtitan.trainer.checkpoint import Checkpointer
from torchtitan.trainer.optimizer import BatchLRScheduler, build_optimizer
from torchtitan.weight_sync.trainer.plan import placed_parameters, plan_rank

TWO_RANKS: list[Layout] = [
    {"name": "fsdp"},
    {"name": "ep", EP: 2},
    {"name": "tp", TP: 2},
    {"name": "tp x ep", TP: 2, EP: 2},
    {"name": "ep, recomputed", EP: 2, "activation_checkpoint.mode": "full"},
]
COMPILED: Layout = {"name": "ep, compiled", EP: 2, "compile.enable": True, "activation_checkpoint.mode": "selective"}
LATENT: Layout = {"name": "cp x ep, compiled", CP: 2, EP: 2, "compile.enable": True}
FOUR_RANKS: list[Layout] = [
    {"name": "fsdp x ep", EP: 2},
    {"name": "replicas of ep", EP: 2, REPLICATE: 2},
    {"name": "tp x fsdp, ep", EP: 2, TP: 2},
    {"name": "ep over both", EP: 4, TP: 2, "training.enable_cpu_offload": True},
]


def compare(directory: str, layouts: list[Layout], reference: str, scratch: str) -> list[dict[str, Any]]:
    """As compare_layouts of test_parallel; and what all ranks send is the files, each tensor once."""
    from tests.unit_tests.distributed import test_parallel

    original = load_file(Path(directory) / "model.safetensors")
    for layout in layouts:
        config = _config(directory, layout)
        dims = ParallelDims.from_config(config.parallelism, device.world_size(), device.rank())
        policy = build_policy(config, dims)
        sent = synced_parameters(policy)
        plan = plan_rank(placed_parameters(sent), device.rank(), "float32", 1 << 20)
        shards = plan.ranks[0]
        tensors = LocalTensors([sent[plan.parameters[shard.parameter].name] for shard in shards]).now()
        for shard, tensor in zip(shards, tensors, strict=True):
            whole = original[plan.parameters[shard.parameter].name]
            part = tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.shape, strict=True))
            assert torch.equal(tensor, whole[part]), layout["name"]
        elements = collectives.all_reduce_sum(torch.tensor(sum(tensor.numel() for tensor in tensors)))
        assert elements.item() == sum(tensor.numel() for tensor in original.values()), layout["name"]
        held = sum(p.to_local().numel() for n, p in policy.named_parameters() if ".experts." in n)  # type: ignore[attr-defined]
        whole = sum(p.numel() for n, p in policy.named_parameters() if ".experts." in n)
        assert held == whole // device.world_size() * dims.dp_replicate, layout["name"]
    return test_parallel.compare_layouts(directory, layouts, reference, scratch)


def _run(directory: str, layout: Layout, folder: str) -> tuple[Decoder, torch.optim.Optimizer, Checkpointer]:
    config = _config(directory, layout)
    dims = ParallelDims.from_config(config.parallelism, device.world_size(), device.rank())
    policy = build_policy(config, dims)
    optimizer = build_optimizer(policy, config.optimizer)
    scheduler = BatchLRScheduler(optimizer, config.lr_scheduler, 10)
    return policy, optimizer, Checkpointer(config.checkpoint, folder, policy, optimizer, scheduler)


def _state(policy: Decoder, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Whole tensors, but for what AdamW8bit has of each rank's part."""
    state = {name: full_tensor(parameter.detach()) for name, parameter in policy.named_parameters()}
    for name, parameter in policy.named_parameters():
        for key in {"exp_avg_sq", "momentum_buffer", "state2", "absmax2"} & optimizer.state[parameter].keys():
            state[f"{key}.{name}"] = full_tensor(optimizer.state[parameter][key])
    return state


def save_and_load(directory: str, folder: str) -> None:
    """A checkpoint of each layout of two ranks, loaded in the same one and in the next."""
    layouts = TWO_RANKS[:4]
    for number, layout in enumerate(layouts):
        policy, optimizer, checkpointer = _run(directory, layout, f"{folder}/{number}")
        dims = ParallelDims.from_config(_config(directory, layout).parallelism, device.world_size(), device.rank())
        share = torch.arange(2, 30)[dims.dp_rank :: dims.dp_size]
        policy(share, PackedLayout([len(share)]), share)[0].sum().backward()
        optimizer.step()
        checkpointer.save(1)
        expected = _state(policy, optimizer)
        if device.rank() == 0:
            save_file(expected, f"{folder}/{number}/expected.safetensors")
        for other in (layout, layouts[(number + 1) % len(layouts)]):
            policy, optimizer, checkpointer = _run(directory, other, f"{folder}/{number}")
            checkpointer.load()
            loaded = _state(policy, optimizer)
            assert all(torch.equal(loaded[name], expected[name]) for name in expected), (layout, other)


def _steps(policy: Decoder, optimizer: torch.optim.Optimizer, steps: range) -> dict[str, torch.Tensor]:
    """The state after steps with gradients that are the same in every layout."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for _, parameter in sorted(policy.named_parameters()):
            parameter.grad = torch.zeros_like(parameter)
            copy_full_(parameter.grad, torch.randn(parameter.shape, generator=generator))
        optimizer.step()
    return _state(policy, optimizer)


def save_and_go_on(directory: str, folder: str) -> None:
    """Muon, saved in one layout and resumed in another; AdamW8bit, which only resumes in the same layout."""
    _, ep, tp, *_ = TWO_RANKS
    names = ["Muon", "AdamW8bit"] if find_spec("bitsandbytes") else ["Muon"]
    for name in names:
        chosen = {"optimizer.name": name, "optimizer.lr": 1e-3}
        policy, optimizer, checkpointer = _run(directory, {**ep, **chosen}, f"{folder}/{name}")
        _steps(policy, optimizer, range(1, 3))
        checkpointer.save(2)
        unbroken = _steps(policy, optimizer, range(3, 5))
        policy, optimizer, checkpointer = _run(
            directory, {**(tp if name == "Muon" else ep), **chosen}, f"{folder}/{name}"
        )
        checkpointer.load()
        for key, tensor in _steps(policy, optimizer, range(3, 5)).items():
            torch.testing.assert_close(tensor, unbroken[key], rtol=1e-6, atol=1e-7 if name == "Muon" else 0)
    if name != "AdamW8bit":
        return
    assert any(value.dtype == torch.uint8 for value in unbroken.values())
    policy, optimizer, _ = _run(directory, {**ep, **chosen, "optimizer.name": "AdamW"}, folder)
    start = {key: full_tensor(parameter.detach()).clone() for key, parameter in policy.named_parameters()}
    for key, tensor in _steps(policy, optimizer, range(1, 5)).items():
        if key in start:
            assert (tensor - unbroken[key]).norm() < 0.1 * (tensor - start[key]).norm(), key
    *_, checkpointer = _run(directory, {**tp, **chosen}, f"{folder}/{name}")
    with pytest.raises(UserError, match=r"has no optimizer.*\]: resume with its optimizer.name, on as many ranks in"):
        checkpointer.load()


@pytest.mark.slow
def test_a_checkpoint_of_one_layout_loads_in_another(tmp_path: Path) -> None:
    directory = make_mixture(tmp_path / "checkpoint", "qwen3_moe")
    for function in ("save_and_load", "save_and_go_on"):
        name = f"tests.unit_tests.distributed.test_expert_parallel:{function}"
        run_distributed(name, 2, directory=str(directory), folder=str(tmp_path))
    original = load_file(directory / "model.safetensors")
    for number in range(4):
        policy, optimizer, checkpointer = _run(str(directory), {}, str(tmp_path / str(number)))
        checkpointer.load()
        expected, loaded = load_file(tmp_path / str(number) / "expected.safetensors"), _state(policy, optimizer)
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)
        assert not torch.equal(loaded["model.norm.weight"], original["model.norm.weight"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "family", "layouts"),
    [
        pytest.param(2, "qwen3_moe", TWO_RANKS, id="two"),
        pytest.param(2, "qwen3_moe", [COMPILED], id="two, compiled", marks=pytest.mark.exhaustive),
        pytest.param(2, "glm4_moe", TWO_RANKS[1:4], id="shared"),
        pytest.param(2, "gpt_oss", [{"name": "cp x ep", CP: 2, EP: 2}], id="contexts"),
        pytest.param(2, "deepseek_v3", [LATENT | {"compile.enable": False}], id="latent"),
        pytest.param(2, "deepseek_v3", [LATENT], id="latent, compiled", marks=pytest.mark.exhaustive),
        pytest.param(4, "mixtral", FOUR_RANKS, id="four"),
    ],
)
def test_layouts_of_experts_agree(world_size: int, family: str, layouts: list[Layout], tmp_path: Path) -> None:
    directory = make_mixture(tmp_path / "checkpoint", family)
    check_layouts("distributed.test_expert_parallel:compare", world_size, directory, layouts, tmp_path, rounding=1e-5)
