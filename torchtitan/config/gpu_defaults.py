"""What a run takes where its ranks have GPUs: values of keys that are not set. No torch here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

from torchtitan.config.engines import engine_specs
from torchtitan.config.job_config import JobConfig
from torchtitan.utils.machine import count_gpus, gpus_of_driver, hides_gpus

ON_GPU: Mapping[str, Any] = {
    # Products in bfloat16 are some 16 times as fast as in float32, and only they have the varlen flash attention.
    "training.mixed_precision_param": "bfloat16",
    # A rank writes its part for a minute or more; a copy of it to pinned memory takes seconds.
    "checkpoint.async_mode": "async",
}

ENGINE_ON_GPU: Mapping[str, Any] = {"inference.dtype": "bfloat16"}


def device_problem() -> str:
    """What is wrong with TORCHTITAN_DEVICE; empty if nothing is."""
    wanted = os.environ.get("TORCHTITAN_DEVICE", "")
    return "" if wanted in ("", "cpu", "cuda") else f"TORCHTITAN_DEVICE={wanted!r}: allowed are cpu and cuda"


def trains_on_gpu() -> bool:
    """Whether the ranks of a run that starts here have GPUs, before torch is asked; TORCHTITAN_DEVICE decides first."""
    wanted = os.environ.get("TORCHTITAN_DEVICE")
    if wanted:
        return wanted == "cuda"
    # Device files alone prove nothing where the driver can be asked.
    listed = gpus_of_driver() if shutil.which("nvidia-smi") else count_gpus()
    return listed > 0 and not hides_gpus()


def device_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values by `table.key` to take where `given` has none; for a CPU the tables' own defaults are meant."""
    if not trains_on_gpu():
        return {}
    defaults = dict(ON_GPU)
    spec = engine_specs().get(given.get("inference.backend", JobConfig().inference.backend))
    if spec is None or spec.on_gpus:
        defaults |= ENGINE_ON_GPU
    return {key: value for key, value in defaults.items() if key not in given}
