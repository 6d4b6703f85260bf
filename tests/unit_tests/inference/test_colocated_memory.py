"""Memory of a colocated run: the optimizer's state goes and comes back, the engine gets what the trainer leaves."""

from __future__ import annotations

import importlib.util
import os
import re
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.distributed_launcher import run_distributed
from tests.patience import until
from torchtitan.config.job_config import JobConfig
from torchtitan.distributed.offload import OptimizerOffload
from torchtitan.errors import UserError
from torchtitan.inference.engines.colocated import vllm_engine
from torchtitan.inference.engines.colocated.vllm_engine import engine_arguments
from torchtitan.inference.engines.sidecar.sidecar_process import share_beside_trainer
from torchtitan.inference.placement import GIB, EngineMemory, colocated_memory, engine_memory, own_share
from torchtitan.models.shape.costs import estimate_memory
from torchtitan.models.shape.model_args import ModelArgs
from torchtitan.preflight.plan import describe_plan

# The optimizer's state


def trained(steps: int, offload_at: int | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    offload = OptimizerOffload(optimizer)
    offload.away()  # before a first step there is nothing to move
    offload.back()
    for step in range(steps):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        if step == offload_at:
            moments = [state["exp_avg"] for state in optimizer.state.values()]
            before = [moment.clone() for moment in moments]
            on_device = [weakref.ref(moment) for moment in moments if moment.numel() > 1]
            del moments
            offload.away()
            offload.away()
            assert all(reference() is None for reference in on_device)
            # A checkpoint may be written meanwhile.
            assert all(map(torch.equal, before, [state["exp_avg"] for state in optimizer.state.values()]))
            offload.back()
            assert all(map(torch.equal, before, [state["exp_avg"] for state in optimizer.state.values()]))
    return [parameter.detach() for parameter in model.parameters()]


def test_the_optimizers_state_comes_back_bit_for_bit() -> None:
    assert all(map(torch.equal, trained(6, offload_at=3), trained(6, offload_at=None)))


def offload_sharded() -> list[bool]:
    """FSDP2's moments are DTensors: this rank's part of them goes and comes back."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    model.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    before = [state["exp_avg_sq"].full_tensor() for state in optimizer.state.values()]
    on_device = [weakref.ref(state["exp_avg_sq"]._local_tensor) for state in optimizer.state.values()]
    offload = OptimizerOffload(optimizer)
    offload.away()
    # The thread of a collective that has just ended may hold them a moment longer.
    are_freed = [bool(until(lambda held=held: held() is None)) for held in on_device]
    offload.back()
    after = [state["exp_avg_sq"].full_tensor() for state in optimizer.state.values()]
    return [*are_freed, *map(torch.equal, before, after)]


def test_sharded_optimizer_state_is_moved_too() -> None:
    assert all(map(all, run_distributed("tests.unit_tests.inference.test_colocated_memory:offload_sharded", 2)))


# Memory and arguments

QWEN_7B = ModelArgs(
    family="qwen2", vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
    num_attention_heads=28, num_key_value_heads=4, head_dim=128, tie_word_embeddings=False,
)  # fmt: skip


def colocated_config(tensor_parallel_size: int = 4) -> JobConfig:
    config = JobConfig()
    config.inference.backend, config.inference.dtype = "colocated", "bfloat16"
    config.inference.engine.tensor_parallel_size = tensor_parallel_size
    config.inference.max_sequences, config.training.seq_len = 64, 4096
    return config


def test_memory_of_the_engine() -> None:
    memory = engine_memory(colocated_config(), QWEN_7B, 80 * GIB, trainer_bytes=20 * GIB)
    assert memory.weights == pytest.approx(7.6e9 * 2 / 4, rel=0.02)
    # Keys and values of 28 layers, one head of 128 per rank, two bytes: 14,336 bytes a token.
    assert memory.kv_one_sequence == 14336 * 4096
    assert memory.kv_cache == memory.kv_wanted == 14336 * 4096 * 64
    share = memory.utilization(80 * GIB)
    assert memory.total <= share * 80 * GIB < memory.total + 0.002 * 80 * GIB


def test_memory_is_cut_down_to_what_the_trainer_leaves() -> None:
    config = colocated_config()
    config.inference.max_sequences = 128
    tight = engine_memory(config, QWEN_7B, 80 * GIB, trainer_bytes=66 * GIB)
    assert 0 < tight.kv_cache < tight.kv_wanted
    assert tight.total + tight.stays + 66 * GIB < 80 * GIB
    # Rounded up, its share still leaves what the others need.
    assert tight.utilization(80 * GIB) * 80 * GIB + tight.stays + 66 * GIB <= 80 * GIB
    # What NeMo-RL #2619 saw beside a 7B.
    assert tight.graphs + tight.overhead > 4.1 * GIB
    config.inference.engine.args["enforce-eager"] = True
    assert engine_memory(config, QWEN_7B, 80 * GIB, trainer_bytes=66 * GIB).graphs == 0
    no_room = engine_memory(config, QWEN_7B, 80 * GIB, trainer_bytes=79 * GIB)
    assert no_room.kv_cache == 0 < no_room.kv_one_sequence
    config.inference.engine.memory_gb = 1.5
    assert engine_memory(config, QWEN_7B, None, 0).kv_cache == 1.5 * GIB


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> JobConfig:
    """Of eight ranks with GPUs of 80 GiB."""
    monkeypatch.setattr("torchtitan.preflight.plan.device_bytes_of_driver", lambda: 80 * GIB)
    monkeypatch.setenv("WORLD_SIZE", "8")
    config = colocated_config()
    config.model.name, config.model.flavor = "qwen2", "2.5-Math-7B"
    return config


def test_plan_shows_both_halves_of_a_step(config: JobConfig) -> None:
    config.inference.sleep_level, config.training.enable_cpu_offload = 1, "optimizer"
    memory = estimate_memory(config, QWEN_7B, 8)
    engine = engine_memory(config, QWEN_7B, 80 * GIB, trainer_bytes=memory.parameters, ranks=8)
    text = describe_plan(config, 8)
    assert "actors: 2 × colocated (tensor parallel 4, bfloat16) on the ranks" in text
    assert f"gpu_memory_utilization: {engine.utilization(80 * GIB):.3f} on this machine's GPU of 80 GiB" in text
    training = (memory.total - memory.optimizer + engine.overhead) / GIB
    assert f"while training: {training:.2f} GiB, the engine asleep" in text
    generating = (memory.parameters + engine.total + engine.overhead) / GIB
    assert f"while generating: {generating:.2f} GiB, the optimizer's state in host memory" in text
    assert "slots per rank" not in text


@pytest.mark.parametrize("sleep_level", [0, 1])
def test_plan_leaves_room_for_a_reference(config: JobConfig, monkeypatch: pytest.MonkeyPatch, sleep_level: int) -> None:
    monkeypatch.setenv("TORCHTITAN_DEVICE", "cuda")
    config.inference.sleep_level = sleep_level

    def planned() -> tuple[float, float, str]:
        text = describe_plan(config, 8)
        sizes = re.search(r"while training: (\S+) GiB.*while generating: (\S+) GiB", text, re.DOTALL)
        assert sizes is not None
        return float(sizes[1]), float(sizes[2]), text

    training, generating, _ = planned()
    config.grpo.kl_coefficient = 0.1
    share = QWEN_7B.num_parameters() * 4 / 8 / GIB
    with_reference = planned()
    assert with_reference[:2] == pytest.approx((training + share, generating + share), abs=0.02)
    assert f"#   reference: {share:.2f} GiB\n" in with_reference[2]
    config.training.enable_cpu_offload = "optimizer"
    offloaded = planned()
    assert f"#   reference: {share:.2f} GiB of host memory\n" in offloaded[2]
    config.grpo.kl_coefficient = 0.0
    assert offloaded[:2] == planned()[:2]


def test_plan_counts_servers_that_sleep_like_colocated_engines(config: JobConfig) -> None:
    config.inference.backend, config.inference.num_actors = "vllm", 2
    config.inference.engine.tensor_parallel_size = 4
    assert "engine per GPU" not in describe_plan(config, 8)
    config.inference.sleep_level, config.grpo.async_weight_update = 2, False
    memory = estimate_memory(config, QWEN_7B, 8)
    kept = memory.parameters + memory.optimizer
    engine = engine_memory(config, QWEN_7B, 80 * GIB, kept, ranks=8)
    text = describe_plan(config, 8)
    assert "actors: 2 × vllm (bfloat16) on the ranks' GPUs, every step waits for them" in text
    assert f"engine per GPU: {engine.total / GIB:.2f} GiB" in text and "slots per rank" in text
    training = memory.total - memory.slots + engine.overhead
    assert f"while training: {training / GIB:.2f} GiB, the engine asleep" in text


def test_slots_and_staging_on_the_gpu_leave_less_for_the_kv_cache(
    config: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHTITAN_DEVICE", "cuda")
    config.inference.backend, config.inference.num_actors = "vllm", 8
    config.inference.sleep_level, config.grpo.async_weight_update, config.inference.max_sequences = 2, False, 256
    planned = {}
    for config.weight_sync.transport in ("tcp", "ipc"):
        planned[config.weight_sync.transport] = colocated_memory(config, 8, 80 * GIB)
    tcp, ipc = planned["tcp"], planned["ipc"]
    assert tcp is not None and ipc is not None and tcp.staging == 0 and tcp.kv_cache < tcp.kv_wanted
    # One version in bfloat16 beside the engine, and the rank's share of three.
    version = 2 * QWEN_7B.num_parameters()
    assert ipc.staging == version and tcp.kv_cache - ipc.kv_cache == pytest.approx(version + 3 * version / 8, rel=1e-6)
    text = describe_plan(config, 8)
    assert f"{version / GIB:.2f} GiB of staging" in text
    (halves,) = re.findall(r"while training: (\S+) GiB(.*)\n.* generating: (\S+) GiB", text)
    # Training does not fit with this much beside it, and that is said.
    assert float(halves[0]) > 80 and "DOES NOT FIT, the GPU has 80.00 GiB" in halves[1] and float(halves[2]) < 80
    # On a GPU of its own, an engine leaves room for the version that arrives.
    config.inference.sleep_level, config.grpo.async_weight_update = 0, True
    config.weight_sync.transport = "nccl"
    assert 0.5 < own_share(config, 80 * GIB) < 1 - version / (80 * GIB) and own_share(config, 400 * GIB) == 0.92
    share = own_share(config, 80 * GIB)
    assert f"gpu_memory_utilization of the engine beside it: {share:.3f} of 80 GiB" in describe_plan(config, 8)
    config.weight_sync.transport = "tcp"
    assert own_share(config, 80 * GIB) == 0


def test_plan_says_what_is_in_host_memory(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHTITAN_DEVICE", "cuda")
    config.inference.backend = "vllm"
    share = QWEN_7B.num_parameters() * 4 / 8 / GIB

    def planned(**training: bool) -> tuple[float, float]:
        config.training.enable_cpu_offload = training.get("offload", False)
        found = re.search(r"estimate per rank: (\S+) GiB of its GPU(?:, (\S+) GiB of host)?", describe_plan(config, 8))
        assert found is not None
        return float(found[1]), float(found[2] or 0)

    gpu, host = planned()
    offloaded = planned(offload=True)
    # Parameters, gradients and two moments.
    assert offloaded == (pytest.approx(gpu - 4 * share, abs=0.02), pytest.approx(host + 4 * share, abs=0.02))
    config.weight_sync.transport = "nccl"
    assert planned() == (pytest.approx(gpu + host, abs=0.02), 0) and host > 0


def test_servers_that_share_gpus_are_told_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr("torchtitan.inference.engines.sidecar.sidecar_process.device_bytes_of_driver", lambda: 80 * GIB)
    config = colocated_config()
    config.model.name, config.model.flavor = "qwen2", "2.5-Math-7B"
    config.inference.backend = "vllm"
    config.inference.engine.tensor_parallel_size = 4
    assert share_beside_trainer(config) == 0
    config.inference.sleep_level, config.grpo.async_weight_update = 1, False
    memory = estimate_memory(config, QWEN_7B, 8)
    kept = memory.parameters + memory.optimizer
    engine = engine_memory(config, QWEN_7B, 80 * GIB, kept, ranks=8)
    assert share_beside_trainer(config) == engine.utilization(80 * GIB)
    # SGLang's fraction leaves activations and graphs out.
    config.inference.backend = "sglang"
    config.inference.engine.tensor_parallel_size, config.inference.sleep_level = 4, 1
    left = share_beside_trainer(config) * 80 * GIB - engine.weights - engine.kv_cache
    assert 0 <= left < 0.001 * 80 * GIB
    config.inference.backend = "vllm"
    monkeypatch.setattr("torchtitan.inference.engines.sidecar.sidecar_process.device_bytes_of_driver", lambda: 12 * GIB)
    with pytest.raises(UserError, match="does not fit beside the trainer"):
        share_beside_trainer(config)


def test_logits_are_bounded_by_the_heads_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    config = colocated_config()

    def logits() -> int:
        # Without FSDP2, whose units may take more at a moment at which there are no logits.
        return estimate_memory(config, QWEN_7B, 1).logits

    assert logits() == 36 * 2**20
    # A GPU has a second buffer of the size.
    monkeypatch.setenv("TORCHTITAN_DEVICE", "cuda")
    assert logits() == 2 * 2**30
    config.training.tokens_per_micro_batch = 64
    assert logits() == 16 * 64 * 152064


def test_options_of_the_engine_go_over_ours() -> None:
    config = colocated_config()
    config.inference.engine.args = {
        "max-num-batched-tokens": 512, "no-enable-prefix-caching": True, "compilation-config.level": 0,
        "enforce-eager": False, "quantization": "fp8",
    }  # fmt: skip
    arguments = engine_arguments(config, EngineMemory(1, 2, 3, 2, 1), None)
    assert arguments["max_num_batched_tokens"] == 512
    assert arguments["enable_prefix_caching"] is False
    assert arguments["compilation_config"] == {"level": 0}
    assert "enforce_eager" not in arguments
    assert "gpu_memory_utilization" not in arguments
    assert arguments["quantization"] == "fp8"
    on_gpu = engine_arguments(colocated_config(), EngineMemory(GIB, GIB, GIB, GIB, 1), 80 * GIB)
    # It measures what its cache can have, unless somebody has said it.
    assert on_gpu["gpu_memory_utilization"] == 0.038 and "kv_cache_memory_bytes" not in on_gpu
    config.inference.engine.memory_gb = 1.0
    for device_bytes in (None, 80 * GIB):
        options = engine_arguments(config, EngineMemory(GIB, GIB, GIB, GIB, 1), device_bytes)
        assert options["kv_cache_memory_bytes"] == GIB
    assert on_gpu["enable_sleep_mode"] is False
    assert on_gpu["hf_overrides"] == {"head_dtype": "float32"} and "hf_overrides" not in arguments


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="this Python has vLLM")
def test_a_python_without_vllm_says_how_to_get_one(tmp_path: Path) -> None:
    from torchtitan.inference.engines.colocated.vllm_engine import VllmEngine

    with (
        mock.patch.dict(os.environ),
        pytest.raises(UserError, match=r"has none: start the run with PYTHON=\"\$\(scripts/install_engine.sh vllm"),
    ):
        VllmEngine({}, tmp_path / "vllm.log")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="this Python has vLLM")
def test_the_environment_of_an_engine_in_the_ranks_is_what_the_run_relies_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_DP_SIZE": "2", "VLLM_LOGGING_LEVEL": "DEBUG"}
    environment = os.environ | given
    monkeypatch.setattr(os, "environ", environment)
    with pytest.raises(UserError, match="needs vLLM in the trainer's own Python"):
        vllm_engine._import_vllm("config")
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and "VLLM_DP_SIZE" not in environment
    assert environment["VLLM_LOGGING_LEVEL"] == "DEBUG"
