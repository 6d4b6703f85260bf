"""How long a step will take on GPUs, roughly and at most, from the configuration alone. No torch here."""

from __future__ import annotations

from torchtitan.config.derived import global_batch_size, is_colocated, shares_devices
from torchtitan.config.job_config import JobConfig
from torchtitan.models.memory import BYTES
from torchtitan.models.model_args import ModelArgs

# Of an H100 (SXM): dense bf16 operations and bytes of memory per second, by its data sheet, and what is often reached.
OPERATIONS, REACHED_OPERATIONS = 989e12, 0.4
BANDWIDTH, REACHED_BANDWIDTH = 3.35e12, 0.6


def training_seconds(config: JobConfig, args: ModelArgs, ranks: int) -> float:
    """Seconds that `ranks` H100s train on a batch whose sequences are all of the largest length.

    Operations as in trainer/throughput.py (two per weight and token forward, four backward), and those of layers that
    are computed again for the backward.
    """
    sequences, length = global_batch_size(config, ranks), config.training.seq_len
    share = config.rollout.max_completion_tokens / length
    layers = sum(args.weights_per_token().values())
    attention = args.num_hidden_layers * args.num_attention_heads * args.head_dim * length
    head = args.vocab_size * args.hidden_size * min(1.0, share)
    checkpoint = config.activation_checkpoint
    again = {"none": 0.0, "selective": 1 / checkpoint.selective_ac_option, "full": 1.0}[checkpoint.mode]
    grpo = config.grpo
    scored = grpo.recompute_old_log_probs + (grpo.kl_coefficient > 0)
    forward = 2.0 * sequences * length
    passes = scored + grpo.num_iterations * 3
    operations = forward * ((layers + attention) * (passes + grpo.num_iterations * again) + head * passes)
    return operations / (ranks * OPERATIONS * REACHED_OPERATIONS)


def generation_seconds(config: JobConfig, args: ModelArgs, ranks: int) -> float | None:
    """Seconds in which the engines sample a batch of completions of the largest length on H100s; None where the run
    does not start them.

    A step of decoding reads the weights once, and the keys and values of all running sequences.
    """
    inference = config.inference
    if config.rollout.replay or inference.servers or inference.backend == "embedded":
        return None
    size, longest = inference.tensor_parallel_size, config.rollout.max_completion_tokens
    engines = max(1, ranks // size) if is_colocated(config) else inference.num_actors
    each = -(-global_batch_size(config, ranks) // engines)
    rounds, running = -(-each // inference.max_sequences), min(each, inference.max_sequences)
    width = BYTES[inference.dtype]
    per_token = 2 * args.num_hidden_layers * args.num_key_value_heads * args.head_dim * width
    prompt = config.training.seq_len - longest
    read = args.num_parameters() * width + running * per_token * (prompt + longest / 2)
    return rounds * longest * read / (size * BANDWIDTH * REACHED_BANDWIDTH)


def describe_step_time(config: JobConfig, args: ModelArgs, ranks: int) -> list[str]:
    """What the plan says of it."""
    training, generation = training_seconds(config, args, ranks), generation_seconds(config, args, ranks)
    assumed = (
        f"sequences of full length, {ranks} ranks on H100s at {REACHED_OPERATIONS:.0%} of their peak, "
        f"{REACHED_BANDWIDTH:.0%} of their bandwidth"
    )
    if generation is None:
        return [f"step time at most: training {training:,.1f} s ({assumed})"]
    in_turn = is_colocated(config) or shares_devices(config) or not config.grpo.async_weight_update
    both = training + generation if in_turn else max(training, generation)
    parts = f"training {training:,.1f} s and generation {generation:,.1f} s"
    parts += " one after the other" if in_turn else " at the same time"
    return [f"step time at most: {both:,.1f} s, {parts} ({assumed})"]
