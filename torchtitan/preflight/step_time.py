"""The plan's lines about time: a step at the limit of the hardware, where it goes, and what others have published.

No run reaches it: sequences differ in length, kernels wait for each other, and the shares of the peaks that are assumed
are those of good kernels. No torch here.
"""

from __future__ import annotations

from torchtitan.config.job_config import JobConfig
from torchtitan.config.source_configs import longest_completion
from torchtitan.models.shape.costs import BYTES, kv_elements, version_bytes
from torchtitan.models.shape.model_args import ModelArgs
from torchtitan.preflight.roofline import training_time
from torchtitan.utils.cards import H100, Card, driver_card

# The share of a card's memory bandwidth that decoding reaches.
REACHED_BANDWIDTH = 0.6
# Bytes per second of 100 Gbit/s.
LINK = 12.5e9
# Tokens per second and GPU over whole GRPO steps on H100s, by the model's number of parameters.
NEMO = "NeMo RL 0.4, docs.nvidia.com/nemo/rl/latest/about/performance-summary.html"
PUBLISHED = {
    8_030_261_248: f"1,562 to 2,161 on 16 GPUs, sequences of about 1,100 tokens ({NEMO})",
    30_532_122_624: f"864 to 925 on 32 GPUs, sequences of about 3,200 tokens ({NEMO})",
}


def generation_seconds(config: JobConfig, args: ModelArgs, ranks: int, card: Card) -> float | None:
    """Return the seconds in which such cards sample a batch of completions of the maximum length.

    Returns None if the run starts no engine that computes on GPUs. A decode step reads the weights once, and what is
    kept of all running sequences.
    """
    inference = config.inference
    if config.rollout.replay or inference.servers or not config.inference.spec.on_gpus:
        return None
    size, longest = inference.engine.tensor_parallel_size, longest_completion(config)
    engines = max(1, ranks // size) if config.is_colocated else max(1, inference.num_actors)
    per_engine = -(-config.training.global_batch_size // engines)
    rounds, running = -(-per_engine // inference.max_sequences), min(per_engine, inference.max_sequences)
    width = BYTES[inference.dtype]
    # The mean over a completion of what is before its tokens.
    before = config.training.seq_len - longest / 2
    read = (args.num_parameters() + running * _kept_elements(args, before)) * width
    return rounds * longest * read / (size * card.bandwidth * REACHED_BANDWIDTH)


def _kept_elements(args: ModelArgs, tokens: float) -> float:
    """What an engine has of a sequence of so many tokens, and reads for the next one: keys and values, of a layer with
    a window those within it, and the states of Gated DeltaNet."""
    attending = set(range(args.num_hidden_layers)) - set(args.delta_layers)
    seen = sum(min(args.window(layer) or tokens, tokens) for layer in attending)
    states = 0
    if (delta := args.delta) is not None:
        states = len(delta.layers) * delta.value_heads * delta.key_dim * delta.value_dim
    return kv_elements(args) * seen + states


def describe_step_time(config: JobConfig, args: ModelArgs, ranks: int) -> list[str]:
    """Return the plan's lines about the time of a step."""
    name, found = driver_card()
    card = found or H100
    training, generation = training_time(config, args, ranks, card), generation_seconds(config, args, ranks, card)
    in_turn = config.is_colocated or config.shares_devices or not config.grpo.async_weight_update
    step, parts = training.total, f"training {training.total:,.1f} s"
    if generation is not None:
        step = step + generation if in_turn else max(step, generation)
        parts += f" and generation {generation:,.1f} s {'one after the other' if in_turn else 'at the same time'}"
    gpus = ranks
    if generation is not None and not (config.is_colocated or config.shares_devices):
        gpus += config.started_actors * config.inference.engine.tensor_parallel_size
    tokens = config.training.global_batch_size * config.training.seq_len / (step * gpus)
    lines = [
        f"step at the hardware's limit: {step:,.1f} s, {parts}: {tokens:,.0f} tokens/s/GPU ({_assumed(name, found)}, "
        "sequences of full length)"
    ]
    longest = dict(training.seconds)
    split = ", ".join(f"{part} {seconds:,.1f} s" for part, seconds in longest.items())
    hidden = f"; {training.hidden:,.1f} s of messages are hidden" if training.hidden else ""
    lines.append(f"  training: MFU {training.mfu():.2f}: {split}{hidden}")
    if longest["messages"] > 0.05 * training.total:
        lines.append(f"  with all messages hidden behind computation, its MFU were {training.mfu(True):.2f}")
    if generation is not None:
        longest["generation"] = generation
    if config.has_engines and not config.is_colocated:
        longest["a version to an actor"] = version_bytes(config, args) / LINK
        lines.append(f"  a version to an actor: {longest['a version to an actor']:,.1f} s over 100 Gbit/s")
    lines.append(f"  what takes longest: {max(longest, key=longest.__getitem__)}")
    if published := PUBLISHED.get(args.num_parameters()):
        lines.append(f"  published for this model, in tokens/s/GPU: {published}")
    return lines


def _assumed(name: str, found: Card | None) -> str:
    if found is not None:
        return f"{name}, data sheet"
    return f"as if on H100s: {name} is not in utils/cards.py" if name else "as if on H100s: there is no GPU here"
