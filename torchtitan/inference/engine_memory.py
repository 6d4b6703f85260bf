"""How much memory an engine on the trainer's own devices takes, from the configuration. No torch here.

vLLM is told both figures that follow, the KV cache in bytes and gpu_memory_utilization, so it has nothing to guess.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

from torchtitan.config.derived import shard_degree
from torchtitan.config.job_config import JobConfig
from torchtitan.models.memory import BYTES, MemoryEstimate, estimate_memory, parts_on_host
from torchtitan.models.model_args import ModelArgs
from torchtitan.models.shape import read_shape

GIB = 2**30
# What no formula gives: contexts, communicators, captured graphs, fragments.
DEVICE_RESERVE = 2 * GIB
# Tokens that vLLM computes in one step at most, unless engine_args say it.
STEP_TOKENS = 8192
# KV blocks are taken whole; the CPU's are the largest.
BLOCK_TOKENS = 128
SMALLEST_KV = 64 * 2**20


@dataclass(frozen=True)
class EngineMemory:
    """Bytes that one rank's part of the engine takes.

    kv_cache: for inference.max_sequences of the longest sequences (training.seq_len), or inference.engine_memory_gb,
    or what the device has left. work: activations of a step and its logits (rough). Weights are exact but for padding.
    """

    weights: int
    kv_cache: int
    work: int
    kv_wanted: int
    kv_one_sequence: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.work

    def utilization(self, device_bytes: int) -> float:
        """The engine's share of a device: vLLM's gpu_memory_utilization."""
        return min(0.99, -(-1000 * self.total // device_bytes) / 1000)


def engine_memory(config: JobConfig, args: ModelArgs, device_bytes: int | None, trainer_bytes: int) -> EngineMemory:
    """The engine beside a trainer that keeps `trainer_bytes` on the same device while the engine generates.

    Without a device (None) memory is the host's and nothing is cut down. Where it does not fit, kv_cache is below
    kv_one_sequence.
    """
    inference, size = config.inference, config.inference.tensor_parallel_size
    width = BYTES[inference.dtype]
    heads = max(1, args.num_key_value_heads // size)
    # Of latent attention vLLM and SGLang keep what keys and values are made of, whole on every rank.
    kept = 2 * heads * args.head_dim if args.latent is None else args.latent.keys + args.latent.turned
    per_token = args.num_hidden_layers * kept * width
    longest = -(-config.training.seq_len // BLOCK_TOKENS) * BLOCK_TOKENS
    wanted = max(SMALLEST_KV, per_token * longest * inference.max_sequences)
    if inference.engine_memory_gb > 0:
        wanted = int(inference.engine_memory_gb * GIB)
    weights = -(-args.num_parameters() * width // size)
    step_tokens = max(STEP_TOKENS, config.training.seq_len)
    per_step_token = (6 * args.hidden_size + 3 * args.intermediate_size // size) * width
    logits = 3 * inference.max_sequences * args.vocab_size * 4
    work = step_tokens * per_step_token + logits
    kv_cache = wanted
    if device_bytes is not None:
        kv_cache = min(wanted, max(0, device_bytes - DEVICE_RESERVE - trainer_bytes - weights - work))
    return EngineMemory(weights, kv_cache, work, wanted, per_token * longest)


def colocated_memory(config: JobConfig, ranks: int, device_bytes: int | None) -> EngineMemory | None:
    """The engine on a rank's device, colocated or a server that sleeps while the trainer trains; None while the model's
    shape is not known. device_bytes: None on a CPU.

    With a sleeping engine the trainer's activations and gradients are gone while the KV cache is there.
    """
    args = read_shape(config)
    if args is None:
        return None
    tensor = config.parallelism.tensor_parallel_degree
    shard = shard_degree(config, ranks) * config.parallelism.context_parallel_degree
    memory = estimate_memory(config, args, shard, tensor, ranks)
    return engine_memory(config, args, device_bytes, beside_generation(config, memory))


def beside_generation(config: JobConfig, memory: MemoryEstimate) -> int:
    """Bytes that the trainer keeps on its device while the engine's KV cache is there."""
    parts = {"parameters", "reference", "optimizer"} if config.inference.sleep_level else set(vars(memory))
    parts -= parts_on_host(config) | ({"optimizer"} if config.inference.offload_optimizer else set())
    return sum(getattr(memory, part) for part in parts)


def device_bytes_of_driver() -> int | None:
    """Memory of the smallest NVIDIA GPU here, as its driver says; None without one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        return min(int(line) for line in answer.split()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
