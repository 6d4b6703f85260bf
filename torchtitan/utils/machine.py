"""This process on its machine: cores, memory and GPUs, what happens to memory that is freed, the end. No torch here."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import gc
import ipaddress
import logging
import math
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil

DEVICES = Path("/dev")
PROC, CONTROL_GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Files of a control group of version 2 and of version 1: limit, use, and the line of memory.stat with cached files.
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"
# As many descriptors as a server needs. Some programs look at every descriptor that their limit allows.
DESCRIPTORS = 65536
# Errors of a process, or of a whole machine, that has as many files and connections open as it may.
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4


def usable_cores() -> list[int]:
    """Numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def possible_descriptors() -> int:
    """Return how many files and connections a process may have open after raise_descriptor_limit()."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (now, most):
        return DESCRIPTORS
    return max(now, min(most, DESCRIPTORS))


def raise_descriptor_limit() -> None:
    """Allow this process, and the processes that it starts from here on, as many descriptors as the system does, up to
    DESCRIPTORS."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = possible_descriptors()
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def describe_lack_of_descriptors(error: OSError) -> str:
    """Return what an error of NO_DESCRIPTOR means, for people."""
    if error.errno == errno.ENFILE:
        return "this machine has as many files and connections open as its kernel allows (sysctl fs.file-max)"
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"this process has as many files and connections open as it may ({limit}): raise the hard limit (ulimit -Hn) "
        "of the shell, container or service that starts the run"
    )


@dataclass(frozen=True)
class HostMemory:
    """Memory of this machine, or of the control group that this process runs in where that has less."""

    limit: int
    """Bytes that all processes there can have together"""
    available: int
    """Of these, the bytes that are free now or can be freed at once"""
    source: str
    """What sets the limit"""


def host_memory() -> HostMemory:
    """Return the memory that this process may use: the least of the machine's and its control groups'."""
    machine = psutil.virtual_memory()
    limit, available, source = machine.total, machine.available, "its memory"
    for folder in _control_groups("memory"):
        for limit_file, usage_file, cache in _MEMORY_FILES:
            numbers = [*_numbers(folder / limit_file), *_numbers(folder / usage_file)]
            if len(numbers) == 2 and numbers[0] < limit:
                limit, source = numbers[0], str(folder / limit_file)
            if len(numbers) == 2:
                available = max(0, min(available, numbers[0] - numbers[1] + _reclaimable(folder, cache)))
    return HostMemory(limit, available, source)


def count_cores() -> int:
    """Return how many cores this process may keep busy: those that it may run on, or a control group's quota."""
    cores = float(len(usable_cores()))
    for folder in _control_groups("cpu"):
        numbers = _numbers(folder / "cpu.max") or [
            *_numbers(folder / "cpu.cfs_quota_us"), *_numbers(folder / "cpu.cfs_period_us")
        ]  # fmt: skip
        if len(numbers) == 2 and numbers[0] > 0 < numbers[1]:
            cores = min(cores, numbers[0] / numbers[1])
    return max(1, math.ceil(cores))


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Import large libraries inside: that leaves next to no garbage, and looking for it takes a tenth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def sleep_between_regions() -> None:
    """Have the threads of torch's OpenMP sleep at the end of a parallel region on CPUs, unless the user has said what
    they do. It is read once, when torch is imported, here and in the processes that inherit it.

    They would spin for some 20 ms, on cores that the threads they wait for may need (docs/measurements.md).
    """
    if os.environ.get("TORCHTITAN_DEVICE") == "cpu" or not has_gpu():
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def machine_cores() -> int:
    """Return how many cores the machine has, also those that this process may not use."""
    return os.cpu_count() or 1


def _control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of the control groups, of version 1 or 2, that this process is in, from the inside out.

    Inside a container the path may be that of the host, of which only the outermost folder, its own, is there.
    """
    try:
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = CONTROL_GROUPS / controllers
        folder = root / path.strip("/")
        for ancestor in (folder, *folder.parents):
            yield ancestor
            if ancestor == root:
                break


def _reclaimable(folder: Path, cache: str) -> int:
    """Return the bytes of cached files that count as used, but are given up when memory is needed."""
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == cache:
                return int(value)
    return 0


def _numbers(path: Path) -> list[int]:
    """Return the numbers in a control group's file; none where there is no file, or it says max."""
    try:
        return [int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []


def bfloat16_flags() -> list[str]:
    """Return which of the instructions for products in bfloat16 this processor has, as Linux calls them."""
    try:
        text = (PROC / "cpuinfo").read_text()
    except OSError:  # not Linux
        return []
    words = {word for line in text.splitlines() if line.startswith("flags") for word in line.split()}
    return [flag for flag in ("avx512_bf16", "amx_bf16") if flag in words]


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


@functools.cache
def ask_driver(*arguments: str) -> tuple[str, ...]:
    """The lines that nvidia-smi answers with; none where there is no such program, or it fails. It is asked once: it
    may take seconds, and one that hangs takes twenty."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(done.stdout.splitlines())


def driver_version() -> str:
    """The version of the NVIDIA driver, such as 580.65.06; empty where there is none."""
    return next(iter(ask_driver("--query-gpu=driver_version", "--format=csv,noheader")), "").strip()


def wheel_version(python: str, name: str) -> str | None:
    """Return the version of a wheel in an interpreter's environment; None if there is none. name: its pattern, as
    folders in site-packages spell it."""
    # Do not resolve the link: its target lies outside the environment.
    folder = Path(python).absolute().parent.parent
    for place in sorted(folder.glob("lib/python3*/site-packages/*.dist-info")):
        if found := re.fullmatch(rf"{name}-(.+)\.dist-info", place.name):
            return found[1]
    return None


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
