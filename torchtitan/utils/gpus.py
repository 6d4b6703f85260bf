"""Whether this machine has NVIDIA GPUs, by their driver's device files: no torch, which would take seconds."""

from __future__ import annotations

import os
from pathlib import Path

DEVICES = Path("/dev")
VARIABLE = "CUDA_VISIBLE_DEVICES"


def count_gpus() -> int:
    """How many this machine shows, whoever may use them (in WSL, which has one file for all of them, none)."""
    return len(list(DEVICES.glob("nvidia[0-9]*")))


def has_gpu() -> bool:
    """Whether there is one that processes may use."""
    return os.environ.get(VARIABLE) != "" and (count_gpus() > 0 or (DEVICES / "dxg").exists())
