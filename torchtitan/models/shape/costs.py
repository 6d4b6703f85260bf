"""Estimates what training costs: one rank's memory, from the configuration alone, and operations. Without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan.config.gpu_defaults import trains_on_gpu
from torchtitan.config.job_config import JobConfig
from torchtitan.config.optimizer_step import keeps_unsharded_params
from torchtitan.config.teachers import held_references, keeps_initial_adapters
from torchtitan.config.transports import TRANSPORTS
from torchtitan.models.shape.checkpoint_shape import (
    QUANTIZED_BITS,
    quantized_projections,
    read_teacher_shape,
    trained_parameters,
)
from torchtitan.models.shape.delta_args import CHUNK
from torchtitan.models.shape.model_args import ModelArgs

GPU_HEAD_BYTES = 1 << 30
LARGEST_HEAD_BYTES = 36 << 20
LEAST_HEAD_BYTES = 8 << 20
# Of SmolLM2 it is 108 MiB: with all columns in a tile, no logits are computed twice, which is 6 % of a step.
LARGEST_CONVERTED_BYTES = 128 << 20
BYTES = {"float32": 4, "bfloat16": 2}
# Bytes that deadlines take for granted an actor can write, at 0.5 GB/s, in the time in which one core quantises an
# element: 8 ns were measured, and other cores are slower.
WRITTEN_WHILE_QUANTIZED = 8
MUON_BUCKET_BYTES = 256 << 20
# With activation_checkpoint.mode = selective, every layer of so many is checkpointed.
SELECTED = 2
"""Of the matrices that a rank orthogonalises at a time"""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one trainer rank.

    Parameters, gradients and the two AdamW moments are exact up to rounding: the rank's share (parameters / shards /
    tensor-parallel degree; norms, which tensor parallelism replicates, are ignored) in training.dtype. Muon has one
    moment of all but embeddings and head; a moment of AdamW8bit takes 8.125 bits per element. Adapters are fp32, and
    only they and lora.modules_to_save have gradients and moments; with lora.base_bits = 4 a projection takes 4.25 bits
    per weight. A reference policy takes the same share of the model again (in host memory if offloaded), unless it is
    the trained policy without its adapters, or with a copy of those that it began with, which counts as parameters. The
    rest is a rough estimate:

    - gathered, activations, logits, unreduced: their values at the moment when their sum is largest. The candidates
      are: in an optimizer step, what Muon takes (`muon_bytes`) and state that comes from host memory; in the head, the
      root (embedding and head) and one layer are gathered in mixed_precision_param; in a layer's backward, the root,
      that layer and the next; at the end of the backward, the root alone. Of a layer's experts, those of one rank of
      expert_parallel_degree count; of quantised projections, the largest one also counts in the type that it is
      computed in. What a rank holds alone is gathered of all layers (keeps_unsharded_params). On one rank, an offloaded
      reference is copied to the device in the same units.
    - activations: for each of the T tokens that a full micro-batch computes (common prefixes count once), a layer keeps
      its residual stream, normed inputs and projection outputs for the backward: about 5 hidden + 3 query + 4 key/value
      + 4 intermediate elements (in a mixture, those of the token's experts, and its dispatched and combined rows),
      shared among the tensor-parallel ranks. In place of query and key/value, a Gated DeltaNet layer keeps about 8
      times the width of its convolution, and of each head, in fp32, 4 values, 5 keys, 5 rows of a chunk's products and
      twice its share of a chunk's state; layers count with their mean. A checkpointed layer keeps 1 hidden instead (op:
      and what attention returned), and one such layer, the largest, holds everything, and on a GPU two more states.
    - logits: of at most as many trained tokens: default_head_budget, or less if a micro-batch's logits are smaller;
      twice that on a GPU. They are divided among the tensor-parallel ranks.
    - unreduced: gradients that FSDP2 has not reduced yet. In the head: the fp32 sum of its weight's gradient, and its
      rounded copy. In a layer: that copy, the layer's gradients, and those being sent in mixed_precision_reduce. At the
      end: the same for the root.
    - slots: weight_sync.num_slots copies of what the rank sends (its share of the weights or of the adapters) in
      inference.dtype, and one more for deltas; none if the engines are colocated.
    - checkpoint: the copy that an asynchronous checkpoint is written from: what is trained, its moments, and a
      reference that changes.
    """

    parameters: int
    gradients: int
    optimizer: int
    reference: int
    gathered: int
    activations: int
    logits: int
    unreduced: int
    slots: int
    checkpoint: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def version_bytes(config: JobConfig, args: ModelArgs) -> int:
    """Return the bytes of one version as the actors receive it: all weights, or only the adapters."""
    return sum(trained_parameters(config, args)) * BYTES[config.inference.dtype]


def applied_bytes(config: JobConfig, args: ModelArgs) -> int:
    """Return the bytes of weights that an actor may have to write for a version, by which its deadline is set: with
    adapters, all that they are merged into, and what could be written while it quantises their base."""
    written = max(version_bytes(config, args), args.num_parameters() * BYTES[config.inference.dtype])
    quantized, _largest = _quantized_elements(config, args)
    return written + quantized * WRITTEN_WHILE_QUANTIZED


def estimate_memory(config: JobConfig, args: ModelArgs, ranks: int) -> MemoryEstimate:
    """Estimate one rank's memory; MemoryEstimate explains how."""
    training, parallelism = config.training, config.parallelism
    tensor = parallelism.tensor_parallel_degree
    sharing = parallelism.shard_degree(ranks) * parallelism.context_parallel_degree * tensor
    master, computed = BYTES[training.dtype], BYTES[training.mixed_precision_param]
    full, adapters = trained_parameters(config, args)
    trained = -(-(full + adapters) // sharing)
    # modules_to_save are fp32, like adapters.
    trained_bytes = trained * (BYTES["float32"] if config.lora.rank else master)
    quantized, largest = _quantized_elements(config, args)
    base = (args.num_parameters() - quantized) * master + int(quantized * QUANTIZED_BITS / 8)
    reference = -(-_references_bytes(config, args, base) // sharing)
    optimizer = int(2 * trained_bytes * _state_share(config, args))
    # Without FSDP2, parameters are used in place and gradients accumulate in place.
    types = {training.mixed_precision_param, training.mixed_precision_reduce, training.dtype}
    fsdp = ranks > 1 or len(types) > 1 or (reference > 0 and reference_on_host(config))
    root, shared, alone = _gathered_bytes(config, args, ranks) if fsdp else (0, 0, 0)
    stays = root + args.num_hidden_layers * alone
    kept_bytes, layer_bytes = _activation_bytes(config, args)
    # Adapters' gradients are negligible here.
    trains, sent = fsdp and not config.lora.rank, BYTES[training.mixed_precision_reduce]
    head = args.vocab_size * args.hidden_size // tensor * trains
    in_layer = head * computed + (shared + alone + shared * sent // computed) * trains
    moments = (
        # gathered, activations, logits, unreduced
        (muon_bytes(config, args, ranks) + optimizer * (training.enable_cpu_offload == "optimizer"), 0, 0, 0),
        (stays + shared, kept_bytes, _logits_bytes(config, args), head * (BYTES["float32"] + computed)),
        (stays + 2 * shared, kept_bytes + layer_bytes, 0, in_layer),
        (stays, 0, 0, root * (computed + sent) // computed * trains),
    )
    gathered, activations, logits, unreduced = max(moments, key=sum)
    slots = 0 if config.is_colocated else config.weight_sync.slots_per_rank
    saves = config.checkpoint.enable and config.checkpoint.async_mode == "async"
    return MemoryEstimate(
        parameters=-(-(base + (1 + keeps_initial_adapters(config)) * adapters * BYTES["float32"]) // sharing),
        gradients=trained_bytes,
        optimizer=optimizer,
        reference=reference,
        gathered=gathered + largest * computed,
        activations=activations,
        logits=logits,
        unreduced=unreduced,
        slots=slots * trained * BYTES[config.inference.dtype],
        checkpoint=saves * (trained_bytes + optimizer + (reference if config.grpo.reference_ema_decay else 0)),
    )


def _quantized_elements(config: JobConfig, args: ModelArgs) -> tuple[int, int]:
    """Elements of all quantised projections, and of the largest one."""
    sizes = {name: rows * columns for name, (rows, columns) in quantized_projections(config, args).items()}
    return sum(args.layers_with(name) * size for name, size in sizes.items()), max(sizes.values(), default=0)


def _references_bytes(config: JobConfig, args: ModelArgs, base: int) -> int:
    """Weights of all references and teachers that the ranks hold, beside a policy whose frozen ones take `base`."""
    size = 0
    for own_config in held_references(config).values():
        if config.job.stage == "distill" and own_config.distill.teacher:
            teacher = read_teacher_shape(own_config)
            size += teacher.num_parameters() * BYTES[config.training.dtype]
        elif not config.lora.trains_only_adapters:
            adapters = trained_parameters(config, args)[1] if config.lora.adapter_path else 0
            size += base + adapters * BYTES["float32"]
    return size


def _gathered_bytes(config: JobConfig, args: ModelArgs, ranks: int) -> tuple[int, int, int]:
    """What FSDP2 gathers: embedding and head; of a layer, what a rank shares with others; what it holds alone."""
    tensor, spread = config.parallelism.tensor_parallel_degree, config.parallelism.expert_parallel_degree
    computed = BYTES[config.training.mixed_precision_param]
    root = args.vocab_size * args.hidden_size * (1 if args.tie_word_embeddings else 2)
    experts = 0
    if args.experts is not None:
        experts = args.experts.count * 3 * args.hidden_size * args.experts.intermediate_size
    quantized = _quantized_elements(config, args)[0] // args.num_hidden_layers
    dense = (args.num_parameters() - root) // args.num_hidden_layers - experts - quantized
    held = dense * computed + int(quantized * QUANTIZED_BITS / 8)
    shared = alone = 0
    for part, over in (held // tensor, tensor), (experts * computed // spread, spread):
        if keeps_unsharded_params(config) and over == ranks:
            alone += part
        else:
            shared += part
    return root * computed // tensor, shared, alone


def _activation_bytes(config: JobConfig, args: ModelArgs) -> tuple[int, int]:
    """What all layers keep of a full micro-batch for the backward, and what one holds that computes it again."""
    computed = BYTES[config.training.mixed_precision_param]
    wide = args.intermediate_size
    if args.experts is not None:
        # A token has one row per chosen expert, both when dispatched and when combined.
        wide = args.experts.active_size + args.experts.per_token * args.hidden_size // 2
    kept = 5 * args.hidden_size + 4 * wide
    query, key_value = args.num_attention_heads * args.head_dim, args.num_key_value_heads * args.head_dim
    attention = largest = 3 * query + 4 * key_value
    if (delta := args.delta) is not None:
        per_head = 4 * delta.value_dim + 5 * delta.key_dim + 5 * CHUNK + 2 * delta.key_dim * delta.value_dim // CHUNK
        recurrent = 8 * delta.channels + delta.value_heads * per_head * BYTES["float32"] // computed
        attention += (recurrent - attention) * len(delta.layers) // args.num_hidden_layers
        # What a GPU's scan joins in pairs (linear_scan.py): two matrices of a chunk.
        scanned = 2 * delta.key_dim * delta.value_dim // CHUNK if trains_on_gpu() else 0
        largest = max(largest, recurrent + delta.value_heads * scanned * BYTES["float32"] // computed)
    checkpointed = recomputed_layers(config, args)
    per_token = (args.num_hidden_layers - checkpointed) * (kept + attention) + checkpointed * args.hidden_size
    if config.activation_checkpoint.mode == "op":
        # What attention returned, and each head's fp32 sum.
        of_op = args.num_attention_heads * (args.head_dim + BYTES["float32"] // computed)
        per_token += of_op * (args.num_hidden_layers - len(args.delta_layers))
    bytes_per_element = _computed_tokens(config) * computed
    tensor = config.parallelism.tensor_parallel_degree
    layer_bytes = bytes_per_element * (kept + largest) // tensor if checkpointed else 0
    return bytes_per_element * per_token // tensor, layer_bytes


def _computed_tokens(config: JobConfig) -> int:
    """Tokens of a full micro-batch that a rank computes."""
    return -(-config.training.tokens_per_micro_batch // config.parallelism.context_parallel_degree)


def _logits_bytes(config: JobConfig, args: ModelArgs) -> int:
    tokens, tensor = _computed_tokens(config), config.parallelism.tensor_parallel_degree
    everything = 4 * tokens * args.vocab_size * 4 // tensor
    gpu = trains_on_gpu()
    budget = default_head_budget(tokens, args.vocab_size, args.hidden_size, on_gpu=gpu)
    return min(everything, budget // tensor * (2 if gpu else 1))


def _by_muon(config: JobConfig, args: ModelArgs) -> int:
    """Trained elements that Muon updates; lora.modules_to_save are embedding and head, as a rule."""
    full, adapters = trained_parameters(config, args)
    root = args.vocab_size * args.hidden_size * (1 if args.tie_word_embeddings else 2)
    if config.optimizer.name != "Muon":
        return 0
    return full + adapters - min(full, root)


def _state_share(config: JobConfig, args: ModelArgs) -> float:
    """The optimizer's state, divided by two moments in the parameters' own type."""
    if config.optimizer.name == "AdamW8bit":
        # A block of 256 elements has a scale in fp32.
        return (1 + 4 / 256) / BYTES["float32" if config.lora.rank else config.training.dtype]
    return 1 - _by_muon(config, args) / max(1, sum(trained_parameters(config, args))) / 2


def muon_bytes(config: JobConfig, args: ModelArgs, ranks: int) -> int:
    """What orthogonalising takes on a rank at a time: nine times its matrices in bf16 (benchmarks/optimizer_step.py),
    which are its share of all, at most MUON_BUCKET_BYTES or else one matrix."""
    elements = _by_muon(config, args)
    largest_matrix = 0
    if elements and not config.lora.rank:
        largest_matrix = max(rows * columns for rows, columns in args.projection_shapes().values())
    share = min(MUON_BUCKET_BYTES, elements * BYTES["bfloat16"] // ranks)
    return 9 * max(share, largest_matrix * BYTES["bfloat16"])


def recomputed_layers(config: JobConfig, args: ModelArgs) -> int:
    """How many layers compute their activations again in the backward."""
    layers = args.num_hidden_layers
    return {"none": 0, "selective": -(-layers // SELECTED)}.get(config.activation_checkpoint.mode, layers)


def scored_passes(config: JobConfig) -> int:
    """Forward passes that only score: of the old log-probs, and of a reference."""
    return int(config.grpo.recompute_old_log_probs) + (config.grpo.kl_coefficient > 0)


def reference_on_host(config: JobConfig) -> bool:
    """Whether a second policy, which is used once in a batch, is in host memory."""
    return config.training.enable_cpu_offload is not False


def parts_on_host(config: JobConfig) -> set[str]:
    """Return the parts of an estimate that lie in host memory."""
    offloaded = {True: {"parameters", "gradients", "optimizer"}, "optimizer": {"optimizer"}}
    trained = offloaded.get(config.training.enable_cpu_offload, set())
    reference = {"reference"} if reference_on_host(config) else set()
    slots = set() if TRANSPORTS[config.weight_sync.transport].on_device and trains_on_gpu() else {"slots"}
    return trained | reference | slots | {"checkpoint"}


def on_device(config: JobConfig, memory: MemoryEstimate) -> int:
    """Return the bytes of the estimate that lie in device memory."""
    return memory.total - sum(getattr(memory, part) for part in parts_on_host(config))


def default_head_budget(rows: int, vocabulary: int, hidden: int, converts: bool = False, on_gpu: bool = False) -> int:
    """Return how many bytes of logits [rows, vocabulary] to hold at a time. A GPU reads and writes the fp32 sum of the
    weight's gradient once per tile, so its tiles are large. A CPU gets an eighth of the fp32 gradients of the hidden
    states [rows, hidden] and the weight [vocabulary, hidden], which are needed anyway, but at least 8 and at most 36
    MiB. It gets 36 MiB if all logits then fit, so that none is computed twice. If the tile must also hold a converted
    weight (converts), it gets as much, and the whole weight on top if that takes at most 128 MiB."""
    if on_gpu:
        return GPU_HEAD_BYTES
    if converts:
        weight = 4 * vocabulary * hidden
        return LARGEST_HEAD_BYTES + (weight if weight <= LARGEST_CONVERTED_BYTES else 0)
    if 4 * rows * vocabulary <= LARGEST_HEAD_BYTES:
        return LARGEST_HEAD_BYTES
    return min(LARGEST_HEAD_BYTES, max(LEAST_HEAD_BYTES, 4 * hidden * (rows + vocabulary) // 8))


def kv_elements(args: ModelArgs, parts: int = 1) -> int:
    """Return what a layer's attention keeps of a token in an engine, on one of `parts` tensor-parallel GPUs: key and
    value; of latent attention what they are made of (as vLLM and SGLang do), whole on every one."""
    if args.latent is not None:
        return args.latent.keys + args.latent.rope_dim
    return 2 * max(1, args.num_key_value_heads // parts) * args.head_dim


@dataclass(frozen=True)
class Passes:
    """How many times a batch passes through the policy."""

    trained: int
    """Forward and backward passes"""
    scored: int = 0
    """Forward passes alone, with the head: recomputed and reference log-probs"""
    updated: Sequence[str] | None = None
    """Modules whose weights have gradients; None: all of them (operations for gradients of adapters are not counted)"""


def model_flops(
    args: ModelArgs, lengths: Sequence[int], completions: int, passes: Passes, starts: Sequence[int] | None = None
) -> float:
    """Return the operations that the model itself needs for a batch (Chowdhery et al. 2022, appendix B): two per weight
    and token in the forward and four in the backward, causal attention over each sequence (in a layer with a window,
    within that; in Gated DeltaNet, three products of the state with a vector per token), and the head over completion
    tokens. Recomputation that saves memory does not count, nor do gradients of frozen weights.

    lengths: input tokens of each sequence; completions: sampled tokens of all sequences together. starts: where the
    lengths are of runs (models.attention.PackedLayout), the position of each one's first token.
    """
    query_and_value = args.num_attention_heads * (args.head_dim + args.value_dim)
    by_weights = {name: count * sum(lengths) for name, count in args.weights_per_token().items()}
    # A tied head shares the embedding's weight, which is trained under the embedding's name.
    head = "embed_tokens" if args.tie_word_embeddings else "lm_head"
    by_weights[head] = args.vocab_size * args.hidden_size * completions
    forward = sum(by_weights.values())
    gradients = sum(by_weights[name] for name in by_weights if passes.updated is None or name in passes.updated)
    attending = set(range(args.num_hidden_layers)) - set(args.delta_layers)
    windows = Counter(args.window(layer) for layer in attending)
    pairs = sum(
        layers * (_attended(start + length, window) - _attended(start, window))
        for window, layers in windows.items()
        for length, start in zip(lengths, starts or [0] * len(lengths), strict=True)
    )
    attention = 2 * query_and_value * pairs
    if (delta := args.delta) is not None:
        # A token reads the state with its key and its query, and writes to it.
        products = 3 * delta.value_heads * delta.key_dim * delta.value_dim
        attention += 2 * len(delta.layers) * products * sum(lengths)
    # The backward computes the gradients of a weight's input and of the weight.
    products = forward * (passes.scored + 2 * passes.trained) + gradients * passes.trained
    return 2.0 * products + attention * (passes.scored + 3 * passes.trained)


def _attended(length: int, window: int) -> int:
    """Pairs of tokens of a sequence of which one attends to the other, within a window (0: none)."""
    seen = min(window or length, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def throughput(flops: float, seconds: float, ranks: int, peak: float | None) -> dict[str, float]:
    """Return tflops_per_rank over the seconds of training, and mfu if the device's peak [operations/s] is known."""
    if seconds <= 0:
        return {}
    per_rank = flops / seconds / ranks
    return {"tflops_per_rank": per_rank / 1e12} | ({} if peak is None else {"mfu": per_rank / peak})
