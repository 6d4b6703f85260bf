"""The CPU cores of this process. No torch here."""

from __future__ import annotations

import os


def usable_cores() -> list[int]:
    """Numbers of the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
