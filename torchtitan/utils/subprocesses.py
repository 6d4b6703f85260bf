"""Environment for the helper processes that a run starts."""

from __future__ import annotations

import os
from pathlib import Path

import torchtitan

# A helper process is not a rank: it must not find torchrun's rendezvous in its environment.
TORCHRUN_VARIABLES = (
    "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK",
    "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "WORLD_SIZE",
)  # fmt: skip


def helper_environment(threads: int, **extra: str) -> dict[str, str]:
    """Our environment without torchrun's variables, with this very package importable and `threads` compute threads."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in TORCHRUN_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    here = str(Path(torchtitan.__file__).parent.parent)
    existing = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{here}{os.pathsep}{existing}" if existing else here
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = str(threads)
    return {**environment, **extra}
