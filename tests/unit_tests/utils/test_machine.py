"""What malloc does with memory that is freed, counted in page faults of a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from tests.patience import PATIENCE_S

FAULTS = """
import ctypes, resource, sys, torch
from tests.patience import PATIENCE_S
from torchtitan.utils.machine import keep_freed_memory
kept, block_bytes = sys.argv[1], int(sys.argv[2])
pages = block_bytes // resource.getpagesize()
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # no huge pages: each page is a fault
if kept != "nothing":
    keep_freed_memory(large=kept == "all")

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for turn in range(24):
    before = faults()
    block = torch.ones(block_bytes, dtype=torch.uint8)
    print((faults() - before) / pages)
    del block
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
@pytest.mark.parametrize(
    ("kept", "megabytes", "again"), [("all", 64, False), ("some", 64, True), ("some", 16, False), ("nothing", 64, True)]
)
def test_freed_memory_is_reused_without_page_faults(kept: str, megabytes: int, again: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, kept, str(megabytes << 20)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    shares = [float(line) for line in done.stdout.split()]
    assert len(shares) == 24 and shares[0] > 0.9
    # Aligned blocks do not fit into the place of one alone that is as large (before glibc 2.38): it takes some turns.
    assert (shares[-1] > 0.9) == again and (shares[-1] < 0.1) != again, shares


def test_descriptor_limit_is_raised_as_far_as_it_may() -> None:
    code = (
        "import resource as r; from torchtitan.utils.machine import raise_descriptor_limit as up\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (128, 700)); up(); print(r.getrlimit(r.RLIMIT_NOFILE)); up()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "(700, 700)\n"
