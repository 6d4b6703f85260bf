"""Whether this machine has NVIDIA GPUs, as their driver shows them: no torch, which would take seconds."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

DEVICES = Path("/dev")
VARIABLE = "CUDA_VISIBLE_DEVICES"


def count_gpus() -> int:
    """How many this machine shows, whoever may use them (in WSL, which has one file for all of them, none)."""
    return len(list(DEVICES.glob("nvidia[0-9]*")))


def has_gpu() -> bool:
    """Whether there is one that processes may use."""
    return os.environ.get(VARIABLE) != "" and (count_gpus() > 0 or (DEVICES / "dxg").exists() or _driver_lists_gpus())


@functools.cache
def _driver_lists_gpus() -> bool:
    # Containers exist that show the driver's program and name their device files otherwise.
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.startswith("GPU ")
