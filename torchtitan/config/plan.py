"""What a job will do, from its configuration alone: ranks, mesh, actors, tokens, bytes. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan.config.fields import config_to_toml
from torchtitan.config.inference import shares_devices
from torchtitan.config.job_config import JobConfig
from torchtitan.config.lora import QUANTIZED_BITS, quantized_projections, trained_parameters, trains_only_adapters
from torchtitan.config.model_shape import read_shape
from torchtitan.config.validate import global_batch_size, world_size
from torchtitan.inference.colocated.memory import GIB, EngineMemory, device_bytes_of_driver, engine_memory
from torchtitan.models.head_budget import default_budget
from torchtitan.models.model_args import ModelArgs

__all__ = ["MemoryEstimate", "Plan", "describe_plan", "make_plan", "world_size"]

BYTES = {"float32": 4, "bfloat16": 2}
# Where there is no GPU to ask, a run whose engines share devices with it is planned for one of this size.
PLANNED_DEVICE = 80 * GIB


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one trainer rank.

    Parameters, gradients and the two AdamW moments are exact but for rounding: the rank's share (parameters / shards /
    tensor-parallel degree; norms, which tensor parallelism replicates, are ignored) in training.dtype. Adapters are
    fp32, and only they and lora.modules_to_save have gradients and moments; with lora.base_bits = 4 a projection takes
    4.25 bits per weight. A reference policy that is not the trained one without its adapters takes the same share of
    the model once more, in host memory where it is offloaded. The rest is rough:

    - gathered: FSDP2 holds two units at a time (the one computing, the one prefetched) in mixed_precision_param; the
      largest unit is a layer, or the root with embedding and head. Of quantised projections also the largest one as
      it is computed with, on one rank too. An offloaded reference comes to the device in such units on one rank, too.
    - activations: T tokens of a full micro-batch; a layer keeps per token its residual stream, normed inputs and
      projection outputs for the backward, about 5 hidden + 3 query + 4 key/value + 4 intermediate elements, shared
      among the tensor-parallel ranks. Checkpointed layers keep 1 hidden instead and one of them at a time is whole.
    - logits: model.logprob_head_budget_mb, or less where a micro-batch's fit. With model.logprob_head full, T ×
      vocabulary in fp32, four such tensors alive at the peak, over the tensor-parallel ranks.
    - slots: weight_sync.num_slots copies of what the rank sends, its share of the weights or of the adapters, in
      inference.dtype, and one more for deltas; none where the engines are colocated.
    """

    parameters: int
    gradients: int
    optimizer: int
    reference: int
    gathered: int
    activations: int
    logits: int
    slots: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())


@dataclass(frozen=True)
class Plan:
    """The figures of a job. Those that need the model's shape are None while that is not known."""

    ranks: int
    replicate: int
    shard: int
    tensor: int
    batch: int
    """Completions per batch"""
    groups: int
    max_tokens: int
    """Upper bound of prompt and completion tokens per batch"""
    max_generated_tokens: int
    parameters: int | None = None
    version_bytes: int | None = None
    """Bytes of one version as the actors get it: all weights, or adapters"""
    memory: MemoryEstimate | None = None


def make_plan(config: JobConfig, ranks: int) -> Plan:
    """The figures of `config` on that many ranks.

    Raises:
        UserError: the model's shape cannot be read.
    """
    parallelism = config.parallelism
    replicate, tensor = parallelism.data_parallel_replicate_degree, parallelism.tensor_parallel_degree
    shard = parallelism.data_parallel_shard_degree
    if shard == -1:
        shard = max(1, ranks // (replicate * tensor))
    batch = global_batch_size(config, ranks)
    args = read_shape(config)
    parameters = None if args is None else args.num_parameters()
    return Plan(
        ranks=ranks,
        replicate=replicate,
        shard=shard,
        tensor=tensor,
        batch=batch,
        groups=batch // config.grpo.group_size,
        max_tokens=batch * config.training.seq_len,
        max_generated_tokens=batch * config.rollout.max_completion_tokens,
        parameters=parameters,
        version_bytes=None if args is None else sum(trained_parameters(config, args)) * BYTES[config.inference.dtype],
        memory=None if args is None else estimate_memory(config, args, shard, tensor, ranks),
    )


def estimate_memory(config: JobConfig, args: ModelArgs, shard: int, tensor: int, ranks: int) -> MemoryEstimate:
    """See MemoryEstimate for the reasoning."""
    training = config.training
    master, computed = BYTES[training.dtype], BYTES[training.mixed_precision_param]
    own, adapters = trained_parameters(config, args)
    trained = -(-(own + adapters) // (shard * tensor))
    # What is trained beside adapters is fp32, too.
    trained_bytes = trained * (BYTES["float32"] if config.lora.rank else master)
    quantized = [rows * columns for rows, columns in quantized_projections(config, args).values()]
    plain = args.num_parameters() - args.num_hidden_layers * sum(quantized)
    base = plain * master + int(args.num_hidden_layers * sum(quantized) * QUANTIZED_BITS / 8)
    query = args.num_attention_heads * args.head_dim
    key_value = args.num_key_value_heads * args.head_dim
    root = args.vocab_size * args.hidden_size * (1 if args.tie_word_embeddings else 2)
    layer = (args.num_parameters() - root) // args.num_hidden_layers
    kept = 5 * args.hidden_size + 3 * query + 4 * key_value + 4 * args.intermediate_size
    whole, checkpointed = _layers_by_checkpointing(config, args.num_hidden_layers)
    per_token = whole * kept + checkpointed * args.hidden_size + (kept if checkpointed else 0)
    tokens, head = training.tokens_per_micro_batch, config.model
    budget = (head.logprob_head_budget_mb << 20) or default_budget(tokens, args.vocab_size, args.hidden_size)
    all_logits = 4 * tokens * args.vocab_size * 4 // tensor
    reference = 0
    if config.grpo.kl_coefficient > 0 and not trains_only_adapters(config):
        reference = -(-base // (shard * tensor))
    # Without FSDP2 (one rank) parameters are used where they lie.
    fsdp = ranks > 1 or (reference > 0 and _reference_on_host(config))
    held = (layer - sum(quantized)) * computed + int(sum(quantized) * QUANTIZED_BITS / 8)
    gathered = 2 * max(root * computed, held) // tensor if fsdp else 0
    gathered += max(quantized, default=0) * computed
    whole_gradients = 0
    if ranks > 1 and config.parallelism.fsdp_reduce_gradients == "optimizer_step":
        whole_gradients = (own + adapters) // tensor * BYTES[training.mixed_precision_reduce]
    return MemoryEstimate(
        parameters=-(-(base + adapters * BYTES["float32"]) // (shard * tensor)),
        gradients=trained_bytes + whole_gradients,
        optimizer=2 * trained_bytes,
        reference=reference,
        gathered=gathered,
        activations=tokens * per_token * computed // tensor,
        logits=all_logits if head.logprob_head == "full" else min(all_logits, budget),
        slots=0 if _colocated(config) else config.weight_sync.slots_per_rank * trained * BYTES[config.inference.dtype],
    )


def colocated_memory(config: JobConfig, ranks: int, device_bytes: int | None) -> EngineMemory | None:
    """The engine on a rank's device, colocated or a server that sleeps while the trainer trains; None while the model's
    shape is not known. device_bytes: None on a CPU.

    With a sleeping engine the trainer's activations and gradients are gone while the KV cache is there.
    """
    plan, args = make_plan(config, ranks), read_shape(config)
    if plan.memory is None or args is None:
        return None
    return engine_memory(config, args, device_bytes, _beside_generation(config, plan.memory))


def _beside_generation(config: JobConfig, memory: MemoryEstimate) -> int:
    """Bytes that the trainer keeps on its device while the engine's KV cache is there."""
    kept = memory.total - _on_host(config, memory) - memory.optimizer
    if config.inference.sleep_level:
        kept = memory.parameters + (0 if _reference_on_host(config) else memory.reference)
    return kept + (0 if config.inference.offload_optimizer else memory.optimizer)


def _reference_on_host(config: JobConfig) -> bool:
    return config.grpo.reference_cpu_offload or config.training.enable_cpu_offload


def _on_host(config: JobConfig, memory: MemoryEstimate) -> int:
    """Bytes of the estimate that are no device's."""
    return memory.slots + (memory.reference if _reference_on_host(config) else 0)


def _colocated(config: JobConfig) -> bool:
    return config.inference.mode == "colocate" and not config.rollout.replay


def _layers_by_checkpointing(config: JobConfig, layers: int) -> tuple[int, int]:
    """(layers that keep their activations, layers that recompute them)."""
    mode, every = config.activation_checkpoint.mode, config.activation_checkpoint.selective_ac_option
    checkpointed = {"none": 0, "selective": layers // every, "full": layers}[mode]
    return layers - checkpointed, checkpointed


def describe_plan(config: JobConfig, world_size: int) -> str:
    """The resolved configuration as TOML, and under it the plan as TOML comments: the whole loads as a config file.

    Raises:
        UserError: the model's shape cannot be read.
    """
    plan = make_plan(config, world_size)
    lines = [
        f"ranks: {plan.ranks}",
        f"mesh: {plan.replicate} replicate × {plan.shard} shard × {plan.tensor} tensor parallel",
        f"actors: {_actors(config, world_size)}",
        f"batch: {plan.groups} groups × {config.grpo.group_size} = {plan.batch} completions, "
        f"{config.grpo.num_iterations * config.grpo.num_minibatches} optimizer step(s)",
        f"tokens per step: at most {plan.max_tokens:,}, of which at most {plan.max_generated_tokens:,} are generated",
    ]
    if plan.parameters is None or plan.version_bytes is None or plan.memory is None:
        lines.append(f"model: not known before {config.model.hf_assets_path} is made; no byte figures")
    else:
        memory = plan.memory
        lines += [
            f"model: {plan.parameters:,} parameters",
            f"bytes per weight version: {plan.version_bytes:,} ({_size(plan.version_bytes)}, {config.inference.dtype})",
            *_slots(config, memory),
            f"memory estimate per rank: {_size(memory.total)}",
            *(f"  {part}: {_size(size)}{_where(config, part)}" for part, size in vars(memory).items()),
        ]
        if _colocated(config) or shares_devices(config):
            lines += _describe_shared(config, world_size, memory)
    return config_to_toml(config) + "\n# Plan\n" + "\n".join(f"# {line}" for line in lines)


def _where(config: JobConfig, part: str) -> str:
    return " of host memory" if part == "reference" and _reference_on_host(config) else ""


def _slots(config: JobConfig, memory: MemoryEstimate) -> list[str]:
    if _colocated(config):
        return []
    return [f"slots per rank: {config.weight_sync.slots_per_rank}, together {_size(memory.slots)} of shared memory"]


def _describe_shared(config: JobConfig, ranks: int, memory: MemoryEstimate) -> list[str]:
    """The engine beside the trainer: what it takes, and what that makes of a device in the two halves of a step."""
    device_bytes = device_bytes_of_driver()
    planned = device_bytes or PLANNED_DEVICE
    engine = colocated_memory(config, ranks, planned if device_bytes or config.inference.sleep_level else None)
    assert engine is not None
    inference = config.inference
    beside = _beside_generation(config, memory)
    training = memory.total - _on_host(config, memory) + (0 if inference.sleep_level else engine.total)
    where = "this machine's GPU" if device_bytes else "a GPU (there is none here)"
    fits = "" if engine.kv_cache >= engine.kv_one_sequence else ": DOES NOT FIT, not one sequence has room"
    cut = "" if engine.kv_cache == engine.kv_wanted else f" of {_size(engine.kv_wanted)} for inference.max_sequences"
    asleep = {0: "", 1: f", {_size(engine.weights)} of weights in host memory meanwhile", 2: ""}
    return [
        f"{'colocated engine per rank' if _colocated(config) else 'engine per GPU'}: {_size(engine.total)}{fits}",
        f"  weights: {_size(engine.weights)}",
        f"  kv_cache: {_size(engine.kv_cache)}{cut}",
        f"  work: {_size(engine.work)}",
        f"while training: {_size(training)}, the engine {'asleep' if inference.sleep_level else 'stays'}"
        f" (inference.sleep_level = {inference.sleep_level}{asleep[inference.sleep_level]})",
        f"while generating: {_size(beside + engine.total)}, the optimizer's state "
        f"{'in host memory' if inference.offload_optimizer else 'stays'}",
        f"gpu_memory_utilization: {engine.utilization(planned):.3f} on {where} of {planned / GIB:.0f} GiB",
    ]


def _actors(config: JobConfig, ranks: int) -> str:
    inference = config.inference
    if config.rollout.replay:
        return f"none, rollouts are replayed from {config.rollout.replay}"
    if _colocated(config):
        size = inference.tensor_parallel_size
        replicas = max(1, ranks // size)
        return f"{replicas} × {inference.backend} (colocate, tensor parallel {size}, {inference.dtype}) on the ranks"
    if inference.servers:
        return f"{len(inference.servers)} running already: {', '.join(inference.servers)}"
    update = "no step waits for them" if config.grpo.async_weight_update else "every step waits for them"
    where = " on the ranks' GPUs" if shares_devices(config) else ""
    return f"{inference.num_actors} × {inference.backend} ({inference.mode}, {inference.dtype}){where}, {update}"


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.2f} GiB"
