"""What a step costs: traces of torch's profiler, and the operations of a batch's training as a share of the peak."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from torchtitan.config.job_config import Profiling
from torchtitan.models.model_args import ModelArgs
from torchtitan.rollout.types import Sample


@contextlib.contextmanager
def profile(config: Profiling, run_dir: Path, rank: int) -> Iterator[torch.profiler.profile | None]:
    """Every profile_freq steps, record one step (after one to warm up) into {folder}/step-N/rank-R.json.

    None where nothing is recorded. The files open in Perfetto and chrome://tracing.
    """
    if not config.enable_profiling:
        yield None
        return
    folder = run_dir / config.save_traces_folder

    def save(profiler: torch.profiler.profile) -> None:
        target = folder / f"step-{profiler.step_num}"
        target.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(target / f"rank-{rank}.json"))

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    schedule = torch.profiler.schedule(wait=max(config.profile_freq - 2, 0), warmup=1, active=1)
    with torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=save) as profiler:
        yield profiler


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
