"""What TRL's sides of the benchmarks have in common: GRPO as ours computes it by default, on one thread."""

from __future__ import annotations

from typing import Any

import torch
from trl import GRPOConfig


def grpo_config(options: dict[str, Any], **overrides: Any) -> GRPOConfig:
    """`options`: seed, generations, new_tokens and learning_rate; `own`: further ones of GRPOConfig."""
    torch.set_num_threads(1)
    return GRPOConfig(
        use_cpu=True,
        bf16=False,
        seed=options["seed"],
        num_generations=options["generations"],
        max_completion_length=options["new_tokens"],
        learning_rate=options["learning_rate"],
        adam_beta2=0.95,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        temperature=1.0,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **overrides,
    )
