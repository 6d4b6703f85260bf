"""Learning rate over the batches of a run: linear warmup, then constant, linear or cosine decay."""

from __future__ import annotations

import math
from typing import Any

import torch

from torchtitan.config.job_config import LRScheduler as LRSchedulerConfig


def lr_factor(batch: int, config: LRSchedulerConfig, total_batches: int) -> float:
    """Share of the peak rate that batch number `batch` (from 0) trains with.

    Warmup over w batches: (batch + 1) / (w + 1), so that no batch trains with rate 0. Then, with
    p = (batch − w) / (total_batches − w) and m = min_lr_factor: 1, or 1 − (1 − m)·p, or m + (1 − m)·(1 + cos πp) / 2.
    """
    if batch < config.warmup_steps:
        return (batch + 1) / (config.warmup_steps + 1)
    if config.decay_type == "constant":
        return 1.0
    progress = min(1.0, (batch - config.warmup_steps) / max(1, total_batches - config.warmup_steps))
    shape = 1 - progress if config.decay_type == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.min_lr_factor + (1 - config.min_lr_factor) * shape


class BatchLRScheduler:
    """Sets the rate of all parameter groups; step() once per trained batch, however many optimizer steps it took.

    The peak of each is the rate that the optimizer has now; total_batches is training.steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: LRSchedulerConfig, total_batches: int):
        self._optimizer = optimizer
        self._config = config
        self._total_batches = total_batches
        self._peaks = [float(group["lr"]) for group in optimizer.param_groups]
        self._batch = 0
        self._apply()

    def step(self) -> None:
        """Go on to the next batch."""
        self._batch += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        """Rate of the batch that is trained now, per parameter group."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self._batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a batch; the shape and the peak are those of the present configuration."""
        self._batch = int(state["batch"])
        self._apply()

    def _apply(self) -> None:
        factor = lr_factor(self._batch, self._config, self._total_batches)
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor
