"""The command of the package: see its docstring."""

from __future__ import annotations

import os
import sys

# Before torch is imported: each process of a benchmark has one thread, so that they do not slow each other down.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

from benchmarks.weight_sync.harness import main

if __name__ == "__main__":
    main(sys.argv[1:])
