"""Isolation of processes (Linux): no network, no view of other processes, and read-only files.

bubblewrap does all of it. Without bubblewrap, unshare from util-linux creates the namespaces, and this file runs inside
them to do the rest; therefore it must not import our other modules at the top.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

# The only folder that an isolated process can write to; it is private, in memory, and disappears with the process.
WRITABLE = "/dev/shm"
PROBE_TIMEOUT_S = 20.0
# Hide /run: it has the sockets of system servers, which remain usable on a read-only file system.
BUBBLEWRAP = (
    "bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/run", "--unshare-all",
    "--die-with-parent", "--cap-drop", "ALL", "--setenv", "TMPDIR", WRITABLE, "--",
)  # fmt: skip
NAMESPACES = (
    "unshare", "--user", "--map-root-user", "--mount", "--net", "--ipc", "--pid", "--fork", "--kill-child",
    sys.executable, "-IS", str(Path(__file__).resolve()),
)  # fmt: skip
# Fresh mounts in these namespaces.
FRESH = ((WRITABLE, b"tmpfs"), ("/run", b"tmpfs"), ("/proc", b"proc"))
# From linux/fcntl.h and linux/mount.h; the number of the system call is the same on all machines.
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = -100, 0x8000, 1
SYS_MOUNT_SETATTR = 442


@functools.cache
def isolation_command() -> tuple[str, ...]:
    """Return the command prefix that isolates a process. Raises UserError if this system cannot do so."""
    from torchtitan.errors import UserError

    reasons = []
    for words in (BUBBLEWRAP, NAMESPACES):
        if shutil.which(words[0]) is None:
            reasons.append(f"{words[0]} is not installed")
            continue
        try:
            probe = subprocess.run([*words, "true"], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            reasons.append(f"{words[0]} did not answer within {PROBE_TIMEOUT_S:g} s")
            continue
        if probe.returncode == 0:
            return words
        reasons.append(f"{words[0]}: {(probe.stderr.strip() or f'exit code {probe.returncode}').splitlines()[-1]}")
    raise UserError(
        f"this system cannot isolate a process ({'; '.join(reasons)}): install bubblewrap, or allow unprivileged user "
        "namespaces"
    )


class MountAttributes(ctypes.Structure):
    """struct mount_attr."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def main() -> None:
    """Inside the new namespaces, make all files read-only and execute the given command. A second user namespace
    removes the right to undo this."""
    libc = ctypes.CDLL(None, use_errno=True)
    wanted = MountAttributes(attr_set=MOUNT_ATTR_RDONLY)
    size = ctypes.c_size_t(ctypes.sizeof(wanted))
    if libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, ctypes.byref(wanted), size):
        sys.exit(f"mount_setattr: {os.strerror(ctypes.get_errno())}")
    for folder, kind in FRESH:
        if libc.mount(kind, folder.encode(), kind, 0, None):
            sys.exit(f"{folder}: {os.strerror(ctypes.get_errno())}")
    os.environ["TMPDIR"] = WRITABLE
    os.execvp("unshare", ["unshare", "--user", "--map-current-user", "--", *sys.argv[1:]])


if __name__ == "__main__":
    main()
