"""Where the seconds of a training step go, by the roofline of a card: what each part computes, reads and sends.

The counts are those of the trainer's own operators, without compilation (a test compares them with a traced step). The
recurrence of a Gated DeltaNet is counted as attention. A part takes as long as its operations or its bytes do (Williams
et al. 2009), at the shares of the card's peaks (data sheets, see utils/cards.py) that such kernels reach on H100s.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan.config.job_config import JobConfig
from torchtitan.config.optimizer_step import keeps_unsharded_params
from torchtitan.models.shape.costs import BYTES, Passes, estimate_memory, model_flops, recomputed_layers, scored_passes
from torchtitan.models.shape.model_args import ModelArgs
from torchtitan.utils.cards import Card

# Shares of the peak that are reached by dense products, products by expert, attention, and by memory for all else.
PRODUCTS, EXPERTS, ATTENTION, MEMORY = 0.70, 0.45, 0.35, 0.776
# The same of links between the GPUs of a machine of 8, and to host memory.
LINKS, MACHINE = 0.8, 8
# Bytes per second that a GPU sends while it receives as many over 400 Gbit/s between machines.
NETWORK = 45e9
# Processor seconds of the host: to pack a token of the batch (`benchmarks/packing.py`), and to launch an operator
# (assumed; no GPU has told us yet). Launches of a layer for a micro-batch, forward and backward, as traced.
PACKING, LAUNCH = 1.7e-7, 6e-6
LAUNCHES, RECURRENT_LAUNCHES = 140, 400


@dataclass(frozen=True)
class Counts:
    """Of one rank's part of a batch: operations, and bytes of memory or of messages."""

    products: float
    experts: float
    attention: float
    elementwise: float
    """What operators that are no products read and write, with the head, copies of FSDP2 and the optimizer"""
    overlapped: float
    """Sent by FSDP2 beside the computation"""
    waited_for: float
    """Sent between operators: by tensor, context and expert parallelism"""

    def seconds(self, ranks: int, card: Card) -> dict[str, float]:
        """Seconds of each part. "messages" are those that nothing else runs beside."""
        computed = {
            "products": (self.products / PRODUCTS + self.experts / EXPERTS) / card.operations,
            "attention": self.attention / (ATTENTION * card.operations),
            "elementwise": self.elementwise / (MEMORY * card.bandwidth),
        }
        links = LINKS * card.link
        sent = self.overlapped / (links if ranks <= MACHINE else NETWORK)
        hidden = min(sent, sum(computed.values()))
        # The ranks of these dimensions are neighbours, on one machine.
        return computed | {"messages": sent - hidden + self.waited_for / links, "hidden messages": hidden}


def count(config: JobConfig, args: ModelArgs, ranks: int, tokens: float, micro_batches: float, length: int) -> Counts:
    """Count one rank's work on `tokens` tokens, all of them trained, in sequences of `length`, and an optimizer step.

    With tensor or context parallelism, the tokens are those of the whole pack, of whose work a rank does its share.
    """
    parallelism, grpo = config.parallelism, config.grpo
    tensor, context = parallelism.tensor_parallel_degree, parallelism.context_parallel_degree
    share = tokens / (tensor * context)
    recomputed = recomputed_layers(config, args) / args.num_hidden_layers
    attending = 0.0 if config.activation_checkpoint.mode == "op" else recomputed
    scored, trained = scored_passes(config), grpo.num_iterations
    forwards = trained * (1 + recomputed) + scored
    # Of adapters, neither operations, gradients nor moments are counted.
    updated = 0 if config.lora.rank else trained
    layers, by_token = args.num_hidden_layers, args.weights_per_token()
    of_experts = by_token.get("experts", 0)
    matrices = sum(by_token.values()) - of_experts
    head = args.vocab_size * args.hidden_size
    head_products = 2 * trained + updated + scored
    flops = model_flops(args, [length], 0, Passes(trained, scored))
    attended = (flops - length * model_flops(args, [1], 0, Passes(trained, scored))) / length
    width = BYTES[config.training.mixed_precision_param]
    forward, backward, exchanged = _elements_per_token(args, parallelism.expert_parallel_degree)
    elementwise = share * layers * width * (forward * forwards + backward * trained)
    # Log-softmax of fp32 logits; to train, their exponential, entropy and gradient as well.
    of_entropy = 20 * (trained + int(grpo.recompute_old_log_probs and grpo.entropy_top_share < 1))
    elementwise += share * args.vocab_size * (8 * (trained + scored) + of_entropy + 6 * trained)
    # The head's gradient is summed in fp32, rounded and scaled, and the embedding's is filled.
    elementwise += micro_batches * updated * head / tensor * (4 + 4 * width)
    # The gradient's norm and its clipping, and AdamW.
    shards = parallelism.shard_degree(ranks) * context
    elementwise += (updated > 0) * args.num_parameters() / (shards * tensor) * 40
    copied, overlapped = _by_fsdp(config, args, ranks, micro_batches)
    passes = forwards + trained
    between = share * layers * exchanged * passes
    if tensor > 1:
        between += 4 * layers * args.hidden_size * tokens / context * (tensor - 1) / tensor * passes
    if context > 1:
        between += 2 * layers * _rotated(args) * share * passes
    products = passes + updated
    # The attention of layers that are computed again counts once more.
    repeated = attending * trained / (scored + 3 * trained)
    return Counts(
        2 * share * (matrices * products + head * head_products),
        2 * share * of_experts * products,
        share * attended * (1 + repeated),
        elementwise + copied,
        overlapped,
        width * between,
    )


def _rotated(args: ModelArgs) -> int:
    return (args.num_attention_heads + args.num_key_value_heads) * args.head_dim


def _elements_per_token(args: ModelArgs, expert_parallel_degree: int) -> tuple[float, float, float]:
    """Elements that a layer's operators read and write for a token, forward and backward: norms and additions to the
    residual stream, rotations and norms of heads, and the activation. Last, those that it exchanges for experts."""
    hidden, expert = args.hidden_size, args.experts
    wide = args.intermediate_size if expert is None else expert.active_size
    forward = 10 * hidden + (7 if args.qk_norm else 5) * _rotated(args) + 5 * wide
    backward = 21 * hidden + (8 if args.qk_norm else 5) * _rotated(args) + 9 * wide
    if expert is None:
        return forward, backward, 0.0
    rows, apart = expert.per_token * hidden, expert_parallel_degree > 1
    forward += hidden + (7 if apart else 3) * rows
    backward += 2 * hidden + (15 if apart else 9) * rows
    if expert.stacked:
        # Biases, and an activation that is clamped.
        forward, backward = forward + 22 * wide, backward + 32 * wide
    # A rank's own rows leave it for no other.
    return forward, backward, 2.0 * rows * (1 - 1 / expert_parallel_degree)


def _by_fsdp(config: JobConfig, args: ModelArgs, ranks: int, micro_batches: float) -> tuple[float, float]:
    """Bytes that FSDP2 copies, and those that it sends."""
    parallelism, training, grpo = config.parallelism, config.training, config.grpo
    tensor, spread = parallelism.tensor_parallel_degree, parallelism.expert_parallel_degree
    shards = parallelism.shard_degree(ranks) * parallelism.context_parallel_degree
    master, reduced = BYTES[training.dtype], BYTES[training.mixed_precision_reduce]
    width, trained = BYTES[training.mixed_precision_param], grpo.num_iterations
    reductions = 0.0 if config.lora.rank else trained * micro_batches
    # Of the experts, those that this rank computes.
    stacks = args.module_parameters().get("experts", 0)
    root = args.vocab_size * args.hidden_size * (1 if args.tie_word_embeddings else 2) / tensor
    # The backward may still have embedding and head.
    stays = 0 if parallelism.fsdp_reshard_after_forward == "always" else root
    dense = (args.num_parameters() - stacks) / tensor
    copied = sent = 0.0
    for owned, over, kept, sharing in (
        (dense, shards, stays, ranks // tensor),
        (stacks / spread, shards * tensor / spread, 0.0, ranks // spread),
    ):
        alone = keeps_unsharded_params(config) and sharing == 1
        gathered = micro_batches * owned * scored_passes(config)
        gathered += (grpo.num_minibatches if alone else micro_batches) * (2 * owned - kept) * trained
        if over > 1:
            sent += width * gathered + reduced * owned * reductions
        if ranks == 1 and width == master:
            continue
        # A rank casts and copies its part, and copies the whole out; where it has no other, it copies all the same.
        per_element = (master + 3 * width) / over
        if over > 1:
            per_element += 2 * width
        copied += gathered * per_element
        if alone:
            # Gradients are added to the sum of them, which is copied twice.
            copied += owned * (micro_batches * (width + 2 * reduced) + grpo.num_minibatches * 3 * reduced) * trained
        else:
            # Gradients are copied for the reduction, and its result is added to those of earlier micro-batches.
            per_element = width + reduced + 3 * master / over
            if over == 1:
                per_element += 2 * reduced
            copied += owned * reductions * per_element
    return copied, sent


@dataclass(frozen=True)
class TrainingTime:
    """What training on one batch takes at least."""

    seconds: dict[str, float]
    """Of each part; they follow one another"""
    hidden: float
    """Seconds of messages beside the computation"""
    flops: float
    """Operations of the model for the batch, over all ranks"""
    peak: float
    """Operations that all ranks could do in a second"""

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def mfu(self, without_messages: bool = False) -> float:
        """The model's own operations as a fraction of what the ranks could do meanwhile. without_messages: if all of
        them were hidden behind the computation."""
        seconds = self.total - (self.seconds["messages"] if without_messages else 0.0)
        return self.flops / (seconds * self.peak)


def training_time(config: JobConfig, args: ModelArgs, ranks: int, card: Card) -> TrainingTime:
    """Estimate what `ranks` GPUs take for a batch of sequences of the maximum length, at the hardware's limit."""
    parallelism, grpo = config.parallelism, config.grpo
    sharing = parallelism.tensor_parallel_degree * parallelism.context_parallel_degree
    length, sequences = config.training.seq_len, config.training.global_batch_size
    tokens = sequences * length / (ranks / sharing)
    micro_batches = tokens / config.training.tokens_per_micro_batch
    seconds = count(config, args, ranks, tokens, micro_batches, length).seconds(ranks, card)
    hidden = seconds.pop("hidden messages")
    recurrent = len(args.delta_layers)
    launches = LAUNCHES * (args.num_hidden_layers - recurrent) + RECURRENT_LAUNCHES * recurrent
    launching = micro_batches * (grpo.num_iterations + scored_passes(config) / 3) * launches * LAUNCH
    # Launches run ahead of the GPU, so only what they take longer is waited for; a batch is packed before the first.
    seconds["host"] = PACKING * sequences * length + max(0.0, launching - sum(seconds.values()))
    if config.training.enable_cpu_offload == "optimizer":
        # It comes and goes with every optimizer step, and nothing else runs meanwhile.
        steps = grpo.num_iterations * grpo.num_minibatches
        state = estimate_memory(config, args, ranks).optimizer
        seconds["optimizer's state"] = 2 * steps * state / (LINKS * card.host)
    passes = Passes(grpo.num_iterations, scored_passes(config))
    flops = model_flops(args, [length] * sequences, length * sequences, passes)
    return TrainingTime(seconds, hidden, flops, ranks * card.operations)
