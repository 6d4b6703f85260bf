"""Floating point operations of a batch's training, and what share of the device's peak they make (MFU)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan.models.model_args import ModelArgs
from torchtitan.rollout.types import Sample


@dataclass(frozen=True)
class Passes:
    """How often a batch goes through the policy."""

    trained: int
    """Forward and backward"""
    scored: int = 0
    """Forward alone, with the head: recomputed and reference log-probs"""
    updated: Sequence[str] | None = None
    """Modules whose weights have gradients; None: all of them (adapters have, too; their operations are not counted)"""


def model_flops(args: ModelArgs, samples: Sequence[Sample], passes: Passes) -> float:
    """What the model itself needs for a batch (Chowdhery et al. 2022, appendix B): two operations per weight and token
    forward and four backward, causal attention over each sequence, the head over completion tokens. What is computed
    twice to save memory does not count, nor do gradients of weights that stay as they are."""
    query_and_value = args.num_attention_heads * (args.head_dim + args.value_dim)
    # The last token of a sequence is predicted, and goes in nowhere.
    lengths = [len(branch) - 1 for sample in samples for branch in sample.branches]
    completions = sum(len(sample.completion_ids) for sample in samples)
    by_weights = {name: count * sum(lengths) for name, count in args.weights_per_token().items()}
    # A tied head's weight is the embedding's, and trained under that name.
    head = "embed_tokens" if args.tie_word_embeddings else "lm_head"
    by_weights[head] = args.vocab_size * args.hidden_size * completions
    forward = sum(by_weights.values())
    gradients = sum(by_weights[name] for name in by_weights if passes.updated is None or name in passes.updated)
    attention = args.num_hidden_layers * query_and_value * sum(length**2 for length in lengths)
    # Backward are the gradients of what goes into a weight, and those of the weight.
    products = forward * (passes.scored + 2 * passes.trained) + gradients * passes.trained
    return 2.0 * products + attention * (passes.scored + 3 * passes.trained)


def throughput(flops: float, seconds: float, ranks: int, peak: float | None) -> dict[str, float]:
    """tflops_per_rank of the training's seconds, and mfu where the device's peak [operations per second] is known."""
    if seconds <= 0:
        return {}
    per_rank = flops / seconds / ranks
    return {"tflops_per_rank": per_rank / 1e12} | ({} if peak is None else {"mfu": per_rank / peak})
