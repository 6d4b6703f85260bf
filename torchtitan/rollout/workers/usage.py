"""What a process and all that it has started take of the machine, as /proc shows it (Linux; elsewhere nothing is seen).

Only the standard library is imported: an agent's worker may run in an environment of its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Iterable
from pathlib import Path

# The kernel gives a thread 1.25 times less of a processor for each unit of nice, of which there are at most 19.
WEIGHT_OF_A_NICE, MOST_NICE = 1.25, 19
AUTOGROUPS = Path("/proc/sys/kernel/sched_autogroup_enabled")


def descendants(pid: int, at_most: int) -> list[int]:
    """Return a process and those that descend from it; not many more than `at_most` of them."""
    found = [pid]
    for process in found:  # it grows
        with contextlib.suppress(OSError):  # the process has ended, or there is no /proc
            for thread in os.listdir(f"/proc/{process}/task"):
                children = Path(f"/proc/{process}/task/{thread}/children").read_text(encoding="ascii")
                found += [int(child) for child in children.split()]
        if len(found) > at_most:
            break
    return found


def exceeds(pids: Iterable[int], limit_bytes: int) -> bool:
    """Return whether processes together have more memory than a limit: their own, shared, swapped, and in files that
    are in memory alone (memfd), whether mapped or not."""
    pids = list(pids)
    files = _memory_files(pids)
    if _resident(pids, "status", "RssAnon:", "RssShmem:", "VmSwap:", files) <= limit_bytes:
        return False
    # What several processes share was counted for each. Counting it once takes longer.
    return _resident(pids, "smaps_rollup", "Pss_Anon:", "Pss_Shmem:", "SwapPss:", files) > limit_bytes


def _resident(pids: list[int], file: str, private: str, shared: str, swapped: str, memory_files: int) -> int:
    sizes = {private: 0, shared: 0, swapped: 0}
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/{file}").read_text(encoding="utf-8", errors="replace").splitlines():
                name, *values = line.split()
                if name in sizes:
                    sizes[name] += int(values[0]) << 10
    # A file in memory that is mapped counts as shared memory already.
    return sizes[private] + sizes[swapped] + max(sizes[shared], memory_files)


def _memory_files(pids: list[int]) -> int:
    """Return the bytes of the files in memory that processes hold open, each counted once."""
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(entry.path).startswith("/memfd:"):
                        about = os.stat(entry.path)
                        sizes[about.st_dev, about.st_ino] = about.st_blocks * 512
    return sum(sizes.values())


def put_behind(pids: Iterable[int], allowed: int) -> None:
    """Lower the priority of the threads that run at this moment if they are more than `allowed`, so that together they
    weigh no more than `allowed` threads of the trainer.

    A priority stays low once it has been lowered: only root may raise it again.
    """
    running = [(pid, thread) for pid in pids for thread in _running_threads(pid)]
    nice = 0
    if len(running) > allowed:
        nice = min(MOST_NICE, math.ceil(math.log(len(running) / allowed, WEIGHT_OF_A_NICE)))
    for _, thread in running:
        with contextlib.suppress(OSError):  # it has ended
            if os.getpriority(os.PRIO_PROCESS, thread) < nice:
                os.setpriority(os.PRIO_PROCESS, thread, nice)
    if nice and _autogroups_are_on():
        # There, a thread's priority counts within its session only, and each session has one of its own.
        for pid in {pid for pid, _ in running}:
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/autogroup").write_text(str(nice), encoding="ascii")


def _running_threads(pid: int) -> list[int]:
    running = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                if _stat(f"/proc/{pid}/task/{thread}/stat")[0] == "R":
                    running.append(int(thread))
    return running


def _autogroups_are_on() -> bool:
    with contextlib.suppress(OSError):
        return AUTOGROUPS.read_text(encoding="ascii").strip() == "1"
    return False


def end_before_us(pids: Iterable[int]) -> None:
    """Make the kernel choose these processes first when memory runs out: they may have undone that for themselves."""
    for pid in pids:
        score = Path(f"/proc/{pid}/oom_score_adj")
        with contextlib.suppress(OSError):
            if score.read_text(encoding="ascii").strip() != "1000":
                score.write_text("1000", encoding="ascii")


def session_of(pid: int) -> int | None:
    """Return the session that a process belongs to, None where it has ended."""
    with contextlib.suppress(OSError):
        return int(_stat(f"/proc/{pid}/stat")[3])
    return None


def _stat(path: str) -> list[str]:
    """Return the fields of a `stat` file from the state on (proc(5)): the name before them may hold anything."""
    return Path(path).read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or it is not ours
            os.kill(pid, signal.SIGKILL)
