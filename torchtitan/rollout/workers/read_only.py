"""Run by isolation.py in namespaces of its own: makes all files read-only, and becomes the command that it is given.

It imports nothing of ours. A second user namespace takes away the right to undo what was done.
"""

import ctypes
import os
import sys

WRITABLE = "/dev/shm"
# Mounted anew. /run holds the sockets of the system's servers, which read-only files would still lead to.
FRESH = ((WRITABLE, b"tmpfs"), ("/run", b"tmpfs"), ("/proc", b"proc"))
# From linux/fcntl.h and linux/mount.h; the number of the system call is the same on all machines.
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = -100, 0x8000, 1
SYS_MOUNT_SETATTR = 442


class MountAttributes(ctypes.Structure):
    """struct mount_attr."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def main() -> None:
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
