"""A control group of the kernel for one worker and all that it starts (Linux): memory, processes, share of processors.

What a worker takes is then bounded at once, whatever it does with it (unmapped files in memory, shared memory that
nobody is attached to), where the watch in process.py looks twice a second. It can be had where we may make groups: with
version 2 in a subtree that is delegated to us (a scope or service of the user's systemd), with either version as root.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from torchtitan.rollout.workers import usage

PREFIX = "torchtitan-"
# Threads count as well, and a worker of agents has thousands of them.
MAX_TASKS = 16384
# Version 2 gives a group 100 unless told otherwise, version 1 gives 1024.
WEIGHT, SHARES = 50, 512
PROBE_TIMEOUT_S = 10.0
# Puts the shell into groups and becomes the command that follows: none of its children is outside of them.
ENTER = 'while [ "$1" != -- ]; do echo 0 > "$1"/cgroup.procs || exit 125; shift; done; shift; exec "$@"'
_numbers = itertools.count()


class ControlGroup:
    """The folders of a group: one with version 2, one for each controller with version 1."""

    def __init__(self, folders: list[Path]):
        self._folders = folders

    def command(self) -> list[str]:
        """Return the words to put in front of a command that shall run in the group."""
        return ["/bin/sh", "-c", ENTER, "sh", *map(str, self._folders), "--"]

    @property
    def shares_processors(self) -> bool:
        """Whether the group as a whole has a share of the processors, however many threads it has."""
        return any((folder / name).exists() for folder in self._folders for name in ("cpu.weight", "cpu.shares"))

    @property
    def killed_for_memory(self) -> int:
        """How many of its processes the kernel has ended because the group had all of its memory."""
        for folder in self._folders:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError):
                    fields = dict(line.split() for line in (folder / name).read_text(encoding="ascii").splitlines())
                    return int(fields.get("oom_kill", 0))
        return 0

    def kill(self) -> None:
        """Kill all of its processes, also those that their starters have left."""
        for folder in self._folders:
            try:
                (folder / "cgroup.kill").write_text("1", encoding="ascii")
            except OSError:  # version 1, or a kernel before 5.14
                with contextlib.suppress(OSError):
                    usage.kill(map(int, (folder / "cgroup.procs").read_text(encoding="ascii").split()))

    def remove(self) -> bool:
        """Remove the group; return False while one of its processes has not ended yet."""
        removed = True
        for folder in self._folders:
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                removed = False
        return removed


def make_control_group(memory_bytes: int) -> ControlGroup | None:
    """Return a new group whose processes may take `memory_bytes` together; None where none can be had."""
    if not _parents():
        return None
    name = f"{PREFIX}{os.getpid()}-{next(_numbers)}"
    try:
        return _make(_parents(), name, memory_bytes)
    except OSError:
        return None


def _make(parents: tuple[Path, ...], name: str, memory_bytes: int) -> ControlGroup:
    folders: list[Path] = []
    try:
        for parent in parents:
            folder = parent / name
            folder.mkdir()
            folders.append(folder)
            for file, value in _limits(folder, memory_bytes).items():
                (folder / file).write_text(str(value), encoding="ascii")
    except OSError:
        ControlGroup(folders).remove()
        raise
    return ControlGroup(folders)


def _limits(folder: Path, memory_bytes: int) -> dict[str, int]:
    """Return what is written into the files of a new group, of which each controller brings its own."""
    wanted = {
        "memory.max": memory_bytes, "memory.swap.max": 0, "memory.limit_in_bytes": memory_bytes,
        "pids.max": MAX_TASKS, "cpu.weight": WEIGHT, "cpu.shares": SHARES,
    }  # fmt: skip
    return {file: value for file, value in wanted.items() if (folder / file).exists()}


@functools.cache
def _parents() -> tuple[Path, ...]:
    """Return the folders in which groups can be made, tried with a program; none where that is not possible."""
    for parents in candidates(our_groups()):
        _remove_abandoned(parents)
        name = f"{PREFIX}{os.getpid()}-probe"
        try:
            probe = _make(parents, name, 1 << 28)
        except OSError:
            continue
        try:
            done = subprocess.run([*probe.command(), "true"], capture_output=True, timeout=PROBE_TIMEOUT_S)
            if done.returncode == 0:
                return parents
        except (OSError, subprocess.TimeoutExpired):
            continue
        finally:
            probe.remove()
    return ()


def candidates(own_groups: Mapping[str, tuple[Path, Path]]) -> list[tuple[Path, ...]]:
    """Return where groups might be made, the best first: above us with version 2, below us with version 1."""
    found: list[tuple[Path, ...]] = []
    if "" in own_groups:
        group, top = own_groups[""]
        # A group that has processes may not share out its controllers, so ours may not, but one above it may.
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError):
                shared_out = (folder / "cgroup.subtree_control").read_text(encoding="ascii").split()
                if {"memory", "pids"} <= set(shared_out):
                    found.append((folder,))
            if folder == top:
                break
    if "memory" in own_groups:
        # Controllers may be mounted together.
        found.append(
            tuple(dict.fromkeys(own_groups[name][0] for name in ("memory", "pids", "cpu") if name in own_groups))
        )
    return found


def our_groups(of_process: Path = Path("/proc/self")) -> dict[str, tuple[Path, Path]]:
    """Return, for each controller of version 1, and "" for version 2, the folder of our group and the mount's own."""
    try:
        groups = (of_process / "cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
        mounts = (of_process / "mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    group_of: dict[str, str] = {}
    for line in groups:
        _, controllers, path = line.split(":", 2)
        group_of |= dict.fromkeys(controllers.split(","), path)
    found: dict[str, tuple[Path, Path]] = {}
    for line in mounts:
        left, _, right = line.partition(" - ")
        root, mounted = left.split()[3:5]
        kind, _, options = right.split(" ")[:3]  # the source may be empty
        for controller in {"cgroup2": [""], "cgroup": options.split(",")}.get(kind, []):
            if controller in group_of:
                found[controller] = (_folder_of(group_of[controller], root, Path(mounted)), Path(mounted))
    return found


def _folder_of(group: str, root: str, mounted: Path) -> Path:
    """Return the folder of a group in a mount that shows the groups below `root`."""
    with contextlib.suppress(ValueError):
        folder = mounted / Path(group).relative_to(root)
        if folder.is_dir():
            return folder
    return mounted


def _remove_abandoned(parents: tuple[Path, ...]) -> None:
    """Remove groups of processes that have ended without doing so."""
    for parent in parents:
        for folder in parent.glob(f"{PREFIX}*"):
            owner = folder.name.removeprefix(PREFIX).partition("-")[0]
            if owner.isdigit() and not Path("/proc", owner).exists():
                with contextlib.suppress(OSError):
                    folder.rmdir()
