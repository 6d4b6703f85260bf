"""Defaults that depend on what a run trains on, a GPU or a CPU: all of them are here. No torch here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

from torchtitan.config.job_config import JobConfig
from torchtitan.utils.machine import count_gpus, gpus_of_driver, hides_gpus

ON_GPU: Mapping[str, Any] = {
    # Products in bfloat16 are some 16 times as fast as in float32, and only they have the varlen flash attention.
    "training.mixed_precision_param": "bfloat16",
    # Each tile of logits costs a sweep over the fp32 sum of the head's gradient.
    "model.logprob_head_budget_mb": 1024,
}
ENGINE_ON_GPU: Mapping[str, Any] = {"inference.dtype": "bfloat16"}


def trains_on_gpu() -> bool:
    """Whether the ranks of a run that starts here have GPUs, before torch is asked; TORCHTITAN_DEVICE decides first."""
    wanted = os.environ.get("TORCHTITAN_DEVICE")
    if wanted:
        return wanted == "cuda"
    # Device files alone prove nothing where the driver can be asked.
    listed = gpus_of_driver() if shutil.which("nvidia-smi") else count_gpus()
    return listed > 0 and not hides_gpus()


def device_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values by `table.key` to take where `given` has none: nothing for a CPU, whose defaults are those of the tables.

    The embedded engine computes on the CPU whatever the trainer has.
    """
    if not trains_on_gpu():
        return {}
    defaults = dict(ON_GPU)
    if given.get("inference.backend", JobConfig().inference.backend) != "embedded":
        defaults |= ENGINE_ON_GPU
    return {key: value for key, value in defaults.items() if key not in given}


def without_masters(config: JobConfig) -> str | None:
    """What to say of a run whose master weights are rounded to bfloat16; None where they are not."""
    if config.training.dtype != "bfloat16" or config.lora.rank:
        return None
    return (
        'training.dtype = "bfloat16" has no float32 master weights: an update below 1/256 of a weight is lost, as most '
        f'are with optimizer.lr = {config.optimizer.lr:g}. Take training.mixed_precision_param = "bfloat16" instead'
    )
