"""The CPU cores of this process. No torch here."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores() -> list[int]:
    """Numbers of the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def numa_nodes() -> int:
    """Of this machine, as Linux counts them; 1 where it does not say."""
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
