"""The plan of a job, from its configuration alone: ranks, mesh, actors, tokens, bytes. No torch here."""

from __future__ import annotations

from torchtitan.config.device_memory import stages_on_device
from torchtitan.config.gpu_defaults import trains_on_gpu
from torchtitan.config.job_config import JobConfig
from torchtitan.config.optimizer_step import group_size, warn_long_warmup, warn_no_fp32_masters
from torchtitan.config.source_configs import longest_completion
from torchtitan.config.transports import TRANSPORTS
from torchtitan.errors import UserError
from torchtitan.inference.engines.registry import engine_of
from torchtitan.inference.placement import GIB, beside_generation, colocated_memory, device_bytes_of_driver, own_share
from torchtitan.models.shape.checkpoint_shape import read_shape
from torchtitan.models.shape.costs import (
    MemoryEstimate,
    estimate_memory,
    muon_bytes,
    on_device,
    parts_on_host,
    version_bytes,
)
from torchtitan.models.shape.model_args import ModelArgs
from torchtitan.models.shape.untrained_files import prediction_heads
from torchtitan.preflight.checkpoint import unusual_tokens
from torchtitan.preflight.gpu_memory import tight_gpu
from torchtitan.preflight.hub import lacking_weights
from torchtitan.preflight.inference import engine_python
from torchtitan.preflight.memory import OTHER_DESCRIPTORS, connections, few_descriptors, size_text, tight_memory
from torchtitan.preflight.sources import describe_mix
from torchtitan.preflight.step_time import describe_step_time
from torchtitan.utils.machine import possible_descriptors
from torchtitan.weight_sync.transports.nccl import differing_nccl

# Without a GPU to query, a run that shares devices with its engines is planned for this size.
PLANNED_DEVICE = 80 * GIB
# The largest fraction of a GPU's memory for weights: the rest is for the KV cache and the engine's workspace.
WEIGHTS_SHARE = 0.4


def describe_plan(config: JobConfig, ranks: int, chosen: str = "") -> str:
    """Return the plan as comments of TOML.

    chosen: see Draft.

    Raises:
        UserError: the model's shape cannot be read.
    """
    parallelism, args = config.parallelism, read_shape(config)
    batch, per_group = config.training.global_batch_size, group_size(config)
    tokens, generated = batch * config.training.seq_len, batch * longest_completion(config)
    context = f"{parallelism.context_parallel_degree} context × " if parallelism.context_parallel_degree > 1 else ""
    counts_epochs = config.job.stage == "sft" and config.sft.epochs
    warnings = (
        warn_no_fp32_masters(config),
        None if counts_epochs else warn_long_warmup(config),
        differing_nccl(config, engine_python(config)),
        tight_memory(config, ranks),
        tight_gpu(config, ranks),
        few_descriptors(config),
        unusual_tokens(config),
        prediction_heads(config),
    )
    lines = [
        *(f"WARNING: {warning}" for warning in warnings if warning),
        f"device: {_device(config)}",
        *([f"auto: {chosen}"] if chosen else []),
        f"ranks: {ranks}",
        f"mesh: {parallelism.data_parallel_replicate_degree} replicate × {parallelism.shard_degree(ranks)} shard × "
        f"{context}{parallelism.tensor_parallel_degree} tensor parallel{_experts(config)}",
        f"actors: {_actors(config, ranks)}",
        *_connections(config),
        f"batch: {batch // per_group} groups × {per_group} = {batch} completions, "
        f"{config.grpo.num_iterations * config.grpo.num_minibatches} optimizer step(s)",
        *describe_mix(config),
        f"tokens per step: at most {tokens:,}, of which at most {generated:,} are generated{_computed(config, batch)}",
    ]
    memory, version = estimate_memory(config, args, ranks), version_bytes(config, args)
    lines.append(f"model: {args.num_parameters():,} parameters")
    for key, lack in lacking_weights(config).items():
        size = size_text(lack.size)
        lines.append(f"{key}: {size} of weights of {lack.model} are downloaded before the run starts")
    lines.append(f"bytes per weight version: {version:,} ({size_text(version)}, {config.inference.dtype})")
    lines += _weight_sync(config, memory, version)
    lines.append(f"memory estimate per rank: {_total(config, memory)}")
    for part, part_bytes in vars(memory).items():
        lines.append(f"  {part}: {size_text(part_bytes)}{_where(config, part)}")
    orthogonalised = muon_bytes(config, args, ranks)
    if orthogonalised:
        lines.append(f"  while Muon orthogonalises: {size_text(orthogonalised)}")
    if trains_on_gpu():
        lines += describe_step_time(config, args, ranks)
    if config.is_colocated or config.shares_devices:
        lines += _describe_shared(config, ranks, memory)
    return "# Plan\n" + "\n".join(f"# {line}" for line in lines)


def _computed(config: JobConfig, batch: int) -> str:
    alone = group_size(config) == 1 or config.parallelism.context_parallel_degree > 1
    if alone:
        return ""
    completion = min(longest_completion(config), config.training.seq_len)
    prompts = batch // group_size(config) * (config.training.seq_len - completion)
    return f"; {prompts + batch * completion:,} are computed where every prompt is computed once for its group"


def _device(config: JobConfig) -> str:
    training = config.training
    types = f"{training.mixed_precision_param} products, {training.dtype} masters"
    name = "GPU" if trains_on_gpu() else "CPU (TORCHTITAN_DEVICE=cuda plans with the defaults for GPUs)"
    return f"{name}: {types}, {training.mixed_precision_reduce} reduction, {config.optimizer.name}"


def _experts(config: JobConfig) -> str:
    degree = config.parallelism.expert_parallel_degree
    return f", experts over {degree} of the shards and their tensor-parallel ranks" if degree > 1 else ""


def _total(config: JobConfig, memory: MemoryEstimate) -> str:
    if not trains_on_gpu():
        return size_text(memory.total)
    of_gpu = on_device(config, memory)
    host = memory.total - of_gpu
    return f"{size_text(of_gpu)} of its GPU" + (f", {size_text(host)} of host memory" if host else "")


def _where(config: JobConfig, part: str) -> str:
    return " of host memory" if trains_on_gpu() and part in parts_on_host(config) else ""


def _weight_sync(config: JobConfig, memory: MemoryEstimate, version_bytes: int) -> list[str]:
    """Describe the memory that each process needs for versions in transit."""
    sync, inference = config.weight_sync, config.inference
    if config.is_colocated:
        return []
    on_gpu = "slots" not in parts_on_host(config)
    slots = sync.slots_per_rank
    host = "host memory, shared with its shard server"
    lines = [f"slots per rank: {slots}, together {size_text(memory.slots)} of {'GPU memory' if on_gpu else host}"]
    if sync.table.delta:
        slot = memory.slots // slots
        text = f"base of deltas per rank: {size_text(slot)}, one of the slots; deltas of a version beside it: less than"
        lines.append(f"{text} {size_text(slot)} of host memory")
    workers = inference.engine.tensor_parallel_size
    # The workers of one engine share host memory; see inference/engines/vllm/backend.py.
    where = "GPU memory" if stages_on_device(config) else "host memory"
    shared = f", once for its {workers} workers" if workers > 1 else ""
    lines.append(f"{_staging(config)} per actor: {size_text(version_bytes)} of {where}{shared}")
    planned = device_bytes_of_driver() or PLANNED_DEVICE
    if not (config.shares_devices or inference.servers) and (share := own_share(config, planned)):
        lines.append(f"gpu_memory_utilization of the engine beside it: {share:.3f} of {planned / GIB:.0f} GiB")
    return lines


def _staging(config: JobConfig) -> str:
    """Name what an actor receives versions into. The actor's log says so, too: it sees the shards."""
    sync = config.weight_sync
    if not engine_of(config).features.two_sets or not TRANSPORTS[sync.transport].over_channel:
        return "staging"
    copied = {
        "relays read whole buckets": sync.table.relay,
        "adapters are merged": config.lora.rank > 0,
        "ranks send columns": config.parallelism.tensor_parallel_degree > 1,
    }
    reasons = [reason for reason, holds in copied.items() if holds]
    return f"staging ({', '.join(reasons)}; copied)" if reasons else "second set of weights"


def _describe_shared(config: JobConfig, ranks: int, memory: MemoryEstimate) -> list[str]:
    """Describe the memory of an engine that shares the trainer's device, in both halves of a step."""
    device_bytes = device_bytes_of_driver()
    planned = device_bytes or PLANNED_DEVICE
    level = config.inference.sleep_level
    engine = colocated_memory(config, ranks, planned if device_bytes or level else None)
    assert engine is not None
    beside = beside_generation(config, memory)
    on_host = "optimizer" in parts_on_host(config)
    training = on_device(config, memory) + engine.stays + (0 if level else engine.total)
    generating = beside + engine.stays + engine.total
    where = "this machine's GPU" if device_bytes else "a GPU (there is none here)"
    what = "colocated engine per rank" if config.is_colocated else "engine per GPU"
    no_room = no_room_training = cut = ""
    if engine.kv_cache < engine.kv_one_sequence:
        no_room = ": DOES NOT FIT, there is no room for one sequence"
    if trains_on_gpu() and training > planned:
        no_room_training = f": DOES NOT FIT, the GPU has {size_text(planned)}"
    if engine.kv_cache != engine.kv_wanted:
        cut = f" of {size_text(engine.kv_wanted)} for inference.max_sequences"
    engine_state = "asleep" if level else "stays"
    in_host_memory = f", {size_text(engine.weights)} of weights in host memory meanwhile" if level == 1 else ""
    optimizer_place = "in host memory" if on_host else "stays"
    return [
        f"{what}: {size_text(engine.total)}{no_room}",
        f"  weights: {size_text(engine.weights)}",
        f"  kv_cache: {size_text(engine.kv_cache)}{cut}",
        f"  work: {size_text(engine.work)}",
        f"  graphs: {size_text(engine.graphs)}",
        f"beside both, always: {size_text(engine.staging)} of staging, {size_text(engine.overhead)} of contexts, "
        "communicators and fragments (assumed, not measured)",
        f"while training: {size_text(training)}{no_room_training}, the engine {engine_state}"
        f" (sleep_level = {level}{in_host_memory})",
        f"while generating: {size_text(generating)}, the optimizer's state {optimizer_place}",
        f"gpu_memory_utilization: {engine.utilization(planned):.3f} on {where} of {planned / GIB:.0f} GiB",
    ]


def _actors(config: JobConfig, ranks: int) -> str:
    inference = config.inference
    joining = ", and those that join by themselves" if inference.discover else ""
    if config.rollout.replay:
        return f"none, rollouts are replayed from {config.rollout.replay}"
    if not config.has_engines:
        return "none, demonstrations are trained on"
    if config.is_colocated:
        size = inference.engine.tensor_parallel_size
        replicas = max(1, ranks // size)
        return f"{replicas} × {inference.backend} (tensor parallel {size}, {inference.dtype}) on the ranks"
    if inference.servers:
        return f"{len(inference.servers)} running already: {', '.join(inference.servers)}{joining}"
    if inference.num_actors == 0:
        return f"none at first{joining}"
    update = "no step waits for them" if config.grpo.async_weight_update else "every step waits for them"
    where = " on the ranks' GPUs" if config.shares_devices else ""
    return f"{inference.num_actors} × {inference.backend} ({inference.dtype}){where}, {update}{joining}"


def _connections(config: JobConfig) -> list[str]:
    count = connections(config)
    if not count:
        return []
    joining = ", and as many for each further one that joins" if config.inference.discover else ""
    return [
        f"connections: rank 0 has at most {count:,} with actors{joining}, and some {OTHER_DESCRIPTORS} other files; a "
        f"process may have {possible_descriptors():,} here"
    ]


def plan_servers(config: JobConfig, gpus: int) -> tuple[int, list[str]]:
    """Plan the servers of a node with `gpus` GPUs.

    Returns:
        (GPUs per server, options of its agent without host and port).

    Raises:
        UserError: the backend has no servers, it is not installed, or the model does not fit the GPUs.
    """
    args = read_shape(config)
    engine = engine_of(config)
    share = tensor_parallel_size(config, args, gpus, device_bytes_of_driver())
    config.inference.engine.tensor_parallel_size = share
    return share, engine.node_settings(config)


def tensor_parallel_size(config: JobConfig, args: ModelArgs, gpus: int, device_bytes: int | None) -> int:
    """Return the number of GPUs per server: tensor_parallel_size if that is above 1.

    Otherwise it is the smallest number that holds the weights, or the largest if the GPUs' memory is unknown. Heads and
    the node's GPUs must divide evenly.

    Raises:
        UserError: there is no such number.
    """
    wanted = config.inference.engine.tensor_parallel_size
    heads, kv_heads = args.num_attention_heads, args.num_key_value_heads
    even = []
    for size in range(1, gpus + 1):
        divides = gpus % size == 0 and heads % size == 0
        # Several GPUs may hold copies of one key-value head.
        if divides and (kv_heads % size == 0 or size % kv_heads == 0):
            even.append(size)
    shape = f"{heads} heads and {kv_heads} key-value heads on {gpus} GPUs a node"
    if wanted > 1:
        if wanted not in even:
            key = config.inference.engine_key("tensor_parallel_size")
            raise UserError(f"{key} = {wanted}: {shape} can be shared by {even} GPUs")
        return wanted
    if device_bytes is None:
        return even[-1]
    weights = args.num_parameters() * (2 if config.inference.dtype == "bfloat16" else 4)
    for size in even:
        if weights / size <= WEIGHTS_SHARE * device_bytes:
            return size
    raise UserError(
        f"the model's {weights / 2**30:.0f} GiB in inference.dtype = {config.inference.dtype} do not fit: {shape} can "
        f"be shared by {even} GPUs of {device_bytes / 2**30:.0f} GiB, of which weights may take {WEIGHTS_SHARE:.0%}"
    )
