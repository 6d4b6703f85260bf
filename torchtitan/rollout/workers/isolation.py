"""Isolation of the processes that run other people's code (Linux).

An isolated process sees no other process and no network but a loopback of its own. It can write to /tmp and /dev/shm
alone, which are in memory, bounded, and end with it. Everything else is read-only, and some of it is empty: the run's
folder, most of the home folder (seen_files.py), and /run with the sockets of system servers.

bubblewrap does all of it. Without bubblewrap, unshare from util-linux creates the namespaces, and this file runs inside
them to do the rest; therefore it must not import our other modules at the top.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SCRATCH_BYTES = 1 << 30
MESSAGE_QUEUES = 16
PROBE_TIMEOUT_S = 20.0
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
NAMES = {"bwrap": "bubblewrap", "unshare": "user namespaces"}
# From linux/fcntl.h, linux/mount.h and linux/sockios.h; the number of the system call is the same on all machines.
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY, MS_REMOUNT, MS_RDONLY, MS_BIND, MS_REC = -100, 0x8000, 1, 32, 1, 4096, 16384
SYS_MOUNT_SETATTR, SIOCSIFFLAGS, IFF_UP = 442, 0x8914, 1


@dataclass(frozen=True)
class Isolation:
    """What isolates a process: `tool` is bwrap or unshare; with `network` it has the machine's network."""

    tool: str
    network: bool

    @property
    def name(self) -> str:
        return f"{NAMES[self.tool]}, {'with' if self.network else 'no'} network"

    def command(self, visible: Iterable[str | Path] = (), hidden: Iterable[Path] = ()) -> list[str]:
        """Return the words to put in front of a process's command.

        visible: what it may read even if it lies in /tmp or in a hidden folder; hidden: folders that look empty.
        """
        from torchtitan.rollout.workers.seen_files import mounts_over

        # What the resolver of names reads may lie in /run.
        resolver = [os.path.realpath("/etc/resolv.conf")] if self.network else []
        mounts = mounts_over([*visible, *resolver], hidden)
        if self.tool == "unshare":
            net = [] if self.network else ["--net"]
            inner_command = [
                sys.executable,
                "-IS",
                str(Path(__file__).resolve()),
                json.dumps([bool(net), SCRATCH_BYTES, mounts]),
            ]
            return ["unshare", "--user", "--map-root-user", "--mount", "--ipc", "--pid", "--fork", "--kill-child",
                    *net, *inner_command]  # fmt: skip
        words = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
        for kind, source, target in mounts:
            if kind in ("scratch", "empty"):
                words += ["--size", str(SCRATCH_BYTES), "--tmpfs", target]
            else:
                words += ["--ro-bind", source, target]
        for target in ["/dev", *(target for kind, _, target in mounts if kind == "empty")]:
            words += ["--remount-ro", target]
        network = ["--share-net"] if self.network else []
        return [*words, "--unshare-all", *network, "--die-with-parent", "--cap-drop", "ALL", "--"]


@functools.cache
def problem_of(tool: str) -> str:
    """Return why a program cannot isolate processes here; empty if it can."""
    if shutil.which(tool) is None:
        return f"{tool} is not installed"
    command = [*Isolation(tool, network=False).command(), "true"]
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"{tool} did not answer within {PROBE_TIMEOUT_S:g} s"
    if probe.returncode == 0:
        return ""
    return f"{tool}: {(probe.stderr.strip() or f'exit code {probe.returncode}').splitlines()[-1]}"


def find_isolation(isolate: bool | str, network: bool) -> tuple[Isolation | None, str]:
    """Return the isolation for a table's `isolate` and `network`, None for none, and what to tell people about it.

    Raises UserError if `isolate` is True and this system cannot do it.
    """
    from torchtitan.errors import UserError

    if isolate is False:
        return None, "not isolated: isolate = false"
    for tool in NAMES:
        if not problem_of(tool):
            found = Isolation(tool, network)
            return found, f"isolated ({found.name})"
    reasons = "; ".join(problem_of(tool) for tool in NAMES)
    problem = f"this system cannot isolate a process ({reasons}): install bubblewrap, or allow user namespaces"
    if isolate is True:
        raise UserError(problem)
    return None, f"not isolated: {problem}"


class MountAttributes(ctypes.Structure):
    """struct mount_attr."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def main() -> None:
    """Inside the new namespaces, mount what shall be seen and execute the given command. A second user namespace
    removes the right to undo this."""
    own_network, scratch_bytes, mounts = json.loads(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(source: str, target: str, kind: bytes | None, flags: int, data: bytes | None = None) -> None:
        if libc.mount(source.encode(), target.encode(), kind, flags, data):
            sys.exit(f"{target}: {os.strerror(ctypes.get_errno())}")

    wanted = MountAttributes(attr_set=MOUNT_ATTR_RDONLY)
    size = ctypes.c_size_t(ctypes.sizeof(wanted))
    if libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, ctypes.byref(wanted), size):
        sys.exit(f"mount_setattr: {os.strerror(ctypes.get_errno())}")
    if own_network:
        with socket.socket() as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", IFF_UP))
    # They are opened before something is mounted over them.
    devices = [("show", f"/dev/{name}", f"/dev/{name}") for name in DEVICES if os.path.exists(f"/dev/{name}")]
    mounts = [("empty", "", "/dev"), *devices, *mounts]
    opened = [os.open(source, os.O_PATH) if source else None for _, source, _ in mounts]
    mount("proc", "/proc", b"proc", 0)
    # Shared memory and message queues of System V outlive their makers, and no limit of a process counts them. Where
    # these cannot be written, the worker refuses shared memory to itself (restrictions.py).
    for name, value in (("shmall", scratch_bytes // os.sysconf("SC_PAGESIZE")), ("msgmni", MESSAGE_QUEUES)):
        with contextlib.suppress(OSError), open(f"/proc/sys/kernel/{name}", "w", encoding="ascii") as file:
            file.write(str(value))
    limit = f"size={scratch_bytes},mode=0755".encode()
    for (_, _, target), source in zip(mounts, opened, strict=True):
        if source is None:
            with contextlib.suppress(FileExistsError):
                os.makedirs(target)
            mount("tmpfs", target, b"tmpfs", 0, limit)
            continue
        # What lies in a new folder has no place there yet.
        if not os.path.exists(target):
            if os.path.isdir(f"/proc/self/fd/{source}"):
                os.makedirs(target)
            else:
                os.makedirs(os.path.dirname(target), exist_ok=True)
                open(target, "x").close()
        mount(f"/proc/self/fd/{source}", target, None, MS_BIND | MS_REC)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"/dev/{name}")
    for kind, _, target in mounts:
        if kind == "empty":
            mount("tmpfs", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY)
    for source in opened:
        if source is not None:
            os.close(source)
    os.execvp("unshare", ["unshare", "--user", "--map-current-user", "--", *sys.argv[2:]])


if __name__ == "__main__":
    main()
