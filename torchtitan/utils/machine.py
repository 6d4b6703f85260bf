"""This process on its machine: the cores and GPUs, what happens to memory that is freed, and the end. No torch here."""

from __future__ import annotations

import ctypes
import functools
import ipaddress
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

DEVICES = Path("/dev")
CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4


def usable_cores() -> list[int]:
    """Numbers of the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def numa_nodes() -> int:
    """Of this machine, as Linux counts them; 1 where it does not say."""
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1


def count_gpus() -> int:
    """How many this machine shows by its device files, or else by what its driver lists, hidden ones included."""
    return len(list(DEVICES.glob("nvidia[0-9]*"))) or gpus_of_driver()


def hides_gpus() -> bool:
    """Whether CUDA_VISIBLE_DEVICES shows none to this process."""
    named = os.environ.get(CUDA_VARIABLE)
    return named is not None and named.split(",")[0].strip() in ("", "-1", "NoDevFiles")


def has_gpu() -> bool:
    """Whether there is one that processes may use."""
    return not hides_gpus() and count_gpus() > 0


@functools.cache
def gpus_of_driver() -> int:
    """How many nvidia-smi lists: those that this process could open. 0 without that program."""
    return sum(line.startswith("GPU ") for line in ask_driver("-L"))


def ask_driver(*arguments: str) -> list[str]:
    """The lines that nvidia-smi answers with; none where there is no such program, or it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def keep_freed_memory(large: bool = False) -> None:
    """Have malloc keep what is freed, as torch's allocator does on a GPU: the next tensor takes it again.

    Pages that went back to the system come back zeroed, one page fault each. large: blocks of 32 MiB and more too,
    which by default come from the system and go back to it: for a process that frees and takes the same sizes again,
    for what is kept in another's place is never given back.
    """
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is None:
        return  # not glibc
    change(_M_TRIM_THRESHOLD, -1 if large else 2**31 - 1)
    if large:
        change(_M_MMAP_MAX, 0)
    else:
        change(_M_MMAP_THRESHOLD, 32 << 20)


def return_freed_memory() -> None:
    """Have malloc give all that it keeps back to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc, that is
        trim(0)


def leave(code: int) -> NoReturn:
    """End a process that has done and closed everything, without the interpreter's own teardown.

    A thread of torch that asks for the interpreter's lock during the teardown is ended by force, which can abort a
    rank whose work is done ("terminate called without an active exception").
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
