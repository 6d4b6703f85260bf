"""The registry's process of the scenario `registry`: the production one, and a note of how long it announces each
version."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from torchtitan.weight_sync import main as processes
from torchtitan.weight_sync.registry.registry import Registry

VARIABLE = "BENCHMARK_NOTES"


def time_publications(path: Path) -> None:
    """Have this process's registry write a line a version: seconds of its core, and by the clock."""
    publish = Registry._publish

    def timed(self: Registry, serial: int) -> None:
        start, start_of_core = time.perf_counter(), time.thread_time()
        publish(self, serial)
        with path.open("a") as lines:
            lines.write(f"{time.thread_time() - start_of_core} {time.perf_counter() - start}\n")

    Registry._publish = timed  # type: ignore[method-assign]


if __name__ == "__main__":
    time_publications(Path(os.environ[VARIABLE]))
    sys.exit(processes.main())
