"""Which cores and GPUs of a machine each engine gets, and how much memory, from the configuration. No torch here.

On a GPU an engine gets a share of the memory (vLLM's gpu_memory_utilization) and measures itself what its KV cache can
have of it: told the cache's bytes, vLLM measures nothing. A KV cache of memory_gb is told in bytes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from torchtitan.config.device_memory import stages_on_device
from torchtitan.config.job_config import Inference, JobConfig
from torchtitan.config.values import option_name
from torchtitan.errors import UserError
from torchtitan.models.shape.checkpoint_shape import read_shape
from torchtitan.models.shape.costs import (
    BYTES,
    MemoryEstimate,
    estimate_memory,
    kv_elements,
    parts_on_host,
    version_bytes,
)
from torchtitan.models.shape.model_args import ModelArgs
from torchtitan.utils.machine import CUDA_VARIABLE, ask_driver, count_cores, count_gpus, hides_gpus
from torchtitan.utils.ranks import local_world_size

GIB = 2**30
# What no formula gives, and no GPU has told us yet: the context of a process, the buffers of a communicator, the graphs
# that an engine captures, and of the device what lies between blocks. NeMo-RL #2619 saw 4.1 GiB of it all beside a 7B.
CONTEXT, COMMUNICATOR, GRAPHS, FRAGMENTS = int(0.6 * GIB), GIB // 2, int(1.5 * GIB), 0.02
# What vLLM takes of a GPU that it has for itself, unless it is told.
USUAL_SHARE = 0.92
# Tokens that vLLM computes in one step at most, unless its args say it.
STEP_TOKENS = 8192
# KV blocks are taken whole; the CPU's are the largest.
BLOCK_TOKENS = 128
SMALLEST_KV = 64 * 2**20


def threads_per_actor(config: Inference) -> int:
    """inference.threads_per_actor, or else an equal share of this process's cores."""
    return config.threads_per_actor or max(1, count_cores() // max(1, config.num_actors))


def visible_devices() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; none on a machine without."""
    named = os.environ.get(CUDA_VARIABLE)
    if hides_gpus():
        return []
    if named is not None:
        return [name for name in named.split(",") if name.strip()]
    return [str(number) for number in range(count_gpus())]


def engine_devices(config: JobConfig, number: int) -> dict[str, str]:
    """What goes into the environment of started actor `number` (from 0); nothing for engines that need no GPU.

    Raises:
        UserError: the ranks leave too few.
    """
    devices = visible_devices()
    if not devices or not config.inference.spec.on_gpus:
        return {}
    on_cpu = os.environ.get("TORCHTITAN_DEVICE") == "cpu"
    ranks = 0 if on_cpu or config.shares_devices else local_world_size()
    size = config.inference.engine.tensor_parallel_size
    first = ranks + number * size
    if first + size > len(devices):
        actors = config.inference.num_actors
        raise UserError(
            f"{ranks} ranks and {actors} engines on {size} GPUs each need {ranks + actors * size} GPUs, and there are "
            f"{len(devices)} ({CUDA_VARIABLE}): lower NGPU, inference.num_actors or "
            f"{config.inference.engine_key('tensor_parallel_size')}"
        )
    return {CUDA_VARIABLE: ",".join(devices[first : first + size])}


@dataclass(frozen=True)
class EngineMemory:
    """Bytes that one rank's part of the engine takes.

    kv_cache: for inference.max_sequences of the longest sequences (training.seq_len), or memory_gb,
    or what the device has left. work: activations of a step and its logits (rough). Weights are exact but for padding.
    graphs, and beside the engine's share: staging, the version that arrives, and overhead, the contexts, communicators
    and fragments of trainer and engine. Those two stay while it sleeps.
    """

    weights: int
    kv_cache: int
    work: int
    kv_wanted: int
    kv_one_sequence: int
    graphs: int = 0
    staging: int = 0
    overhead: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.work + self.graphs

    @property
    def stays(self) -> int:
        return self.staging + self.overhead

    def utilization(self, device_bytes: int, static: bool = False) -> float:
        """The engine's share of a device: vLLM's gpu_memory_utilization. static: of weights and KV cache alone,
        SGLang's mem-fraction-static."""
        taken = self.weights + self.kv_cache if static else self.total
        return min(0.99, -(-1000 * taken // device_bytes) / 1000)


def engine_memory(
    config: JobConfig, args: ModelArgs, device_bytes: int | None, trainer_bytes: int, ranks: int = 1
) -> EngineMemory:
    """The engine beside a trainer that keeps `trainer_bytes` on the same device while the engine generates.

    Without a device (None) memory is the host's and nothing is cut down. Where it does not fit, kv_cache is below
    kv_one_sequence.
    """
    inference, size = config.inference, config.inference.engine.tensor_parallel_size
    width = BYTES[inference.dtype]
    per_token = args.num_hidden_layers * kv_elements(args, size) * width
    longest = -(-config.training.seq_len // BLOCK_TOKENS) * BLOCK_TOKENS
    wanted = max(SMALLEST_KV, per_token * longest * inference.max_sequences)
    if inference.engine.memory_gb > 0:
        wanted = int(inference.engine.memory_gb * GIB)
    weights = -(-args.num_parameters() * width // size)
    step_tokens = max(STEP_TOKENS, config.training.seq_len)
    per_step_token = (6 * args.hidden_size + 3 * args.intermediate_size // size) * width
    logits = 3 * inference.max_sequences * args.vocab_size * 4
    work = step_tokens * per_step_token + logits
    if device_bytes is None:
        return EngineMemory(weights, wanted, work, wanted, per_token * longest)
    chosen = {option_name(key) for key, value in inference.engine.args.items() if value}
    graphs = 0 if chosen.intersection(config.inference.spec.eager_options) else GRAPHS
    staging = version_bytes(config, args) if stages_on_device(config) else 0
    groups = 0
    if ranks > 1:
        groups += 2 if config.parallelism.tensor_parallel_degree > 1 else 1
    if size > 1:
        groups += 1
    overhead = CONTEXT * (1 if config.is_colocated else 2) + COMMUNICATOR * groups + int(FRAGMENTS * device_bytes)
    # Shares are whole thousandths, rounded up.
    left = int(0.999 * device_bytes) - trainer_bytes - weights - work - graphs - staging - overhead
    kv_cache = min(wanted, max(0, left))
    return EngineMemory(weights, kv_cache, work, wanted, per_token * longest, graphs, staging, overhead)


def own_share(config: JobConfig, device_bytes: int | None) -> float:
    """The share that an engine may take of a GPU of its own, beside which a version is staged; 0: the usual one."""
    if not device_bytes or not stages_on_device(config):
        return 0.0
    version = version_bytes(config, read_shape(config))
    left = device_bytes * (1 - FRAGMENTS) - version - CONTEXT - COMMUNICATOR
    return max(0.0, min(USUAL_SHARE, int(1000 * left / device_bytes) / 1000))


def colocated_memory(config: JobConfig, ranks: int, device_bytes: int | None) -> EngineMemory:
    """The engine on a rank's device, colocated or a server that sleeps while the trainer trains.

    device_bytes: None on a CPU.

    With a sleeping engine the trainer's activations and gradients are gone while the KV cache is there.
    """
    args = read_shape(config)
    trainer_bytes = beside_generation(config, estimate_memory(config, args, ranks))
    return engine_memory(config, args, device_bytes, trainer_bytes, ranks)


def check_fits(config: JobConfig, memory: EngineMemory) -> None:
    """Raise UserError where the engine has no room for one sequence."""
    if text := unfit_engine(config, memory):
        raise UserError(text)


def unfit_engine(config: JobConfig, memory: EngineMemory) -> str:
    """What to say where the engine has no room for one sequence; else an empty string."""
    if memory.kv_cache >= memory.kv_one_sequence:
        return ""
    return (
        "the engine does not fit beside the trainer: no room for one sequence of training.seq_len = "
        f"{config.training.seq_len} in its KV cache. Raise {config.inference.engine_key('tensor_parallel_size')} "
        "or inference.sleep_level, or set training.enable_cpu_offload (--dry-run shows the memory plan)"
    )


def beside_generation(config: JobConfig, memory: MemoryEstimate) -> int:
    """Bytes that the trainer keeps on its device while the engine's KV cache is there."""
    kept = {"parameters", "reference", "optimizer", "slots"} if config.inference.sleep_level else set(vars(memory))
    return sum(getattr(memory, part) for part in kept - parts_on_host(config))


def device_bytes_of_driver(count: int | None = None) -> int | None:
    """Memory of the smallest NVIDIA GPU here, as its driver says; None without one.

    count: of the smallest among so many with the most memory. It is what so many ranks have at best: which of unlike
    GPUs CUDA gives them the driver does not say, as it counts them in another order.
    """
    try:
        found = sorted(map(int, ask_driver("--query-gpu=memory.total", "--format=csv,noheader,nounits")), reverse=True)
    except ValueError:  # memory that is not its own
        return None
    return min(found[:count]) * 2**20 if found else None
