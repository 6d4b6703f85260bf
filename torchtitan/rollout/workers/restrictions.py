"""What a worker gives up before it runs other people's code (Linux): keyrings and system calls.

A user namespace takes nothing of this away: the kernel's keyrings (Kerberos tickets, keys of file systems) belong to
the user, and calls that trace, observe or program other processes reach whatever the user may reach. Namespaces, mounts
and forks stay allowed, since agents isolate their own programs with them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

# From linux/prctl.h, linux/seccomp.h, linux/audit.h, linux/filter.h and linux/keyctl.h.
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO = 0x7FFF0000, 0x00050000
KEYCTL_JOIN_SESSION_KEYRING = 1
# Instructions of the filter's machine: load a word of the call's data, compare it with a constant, return.
LOAD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
# Where a call's data (struct seccomp_data) has the number of the call and the machine's type.
NUMBER_AT, MACHINE_AT = 0, 4
# Calls of the x32 interface have numbers from here on.
X32_CALLS = 0x40000000
SHARED_MEMORY_PAGES = Path("/proc/sys/kernel/shmall")


@dataclass(frozen=True)
class Machine:
    """The numbers that the kernel gives to a machine's type (AUDIT_ARCH_…) and to its system calls."""

    audit: int
    keyctl: int
    refused: tuple[int, ...]
    """add_key, request_key, keyctl, ptrace, process_vm_readv, process_vm_writev, bpf, perf_event_open, userfaultfd"""
    shmget: int


MACHINES = {
    "x86_64": Machine(0xC000003E, 250, (248, 249, 250, 101, 310, 311, 321, 298, 323), 29),
    "aarch64": Machine(0xC00000B7, 219, (217, 218, 219, 117, 270, 271, 280, 241, 282), 194),
}


def restrict(shared_memory_bytes: int) -> str:
    """Take a session keyring of our own, and refuse system calls to this process and all that it starts.

    They then fail with "operation not permitted". Shared memory of System V is refused unless this process's kernel
    namespace bounds all of it by `shared_memory_bytes`, since it outlives whoever made it.

    Returns:
        What could not be done and why; empty if all was done.
    """
    machine = MACHINES.get(platform.machine()) if sys.platform == "linux" else None
    if machine is None or struct.calcsize("P") != 8:
        return f"no filter of system calls is known for {platform.system()} on {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    # Before the filter, which refuses it. It fails where a container's filter refuses it already.
    libc.syscall(machine.keyctl, KEYCTL_JOIN_SESSION_KEYRING, None)
    refused = list(machine.refused)
    if not _shared_memory_is_bounded(shared_memory_bytes):
        refused.append(machine.shmget)
    program = _filter(machine, refused)
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
    # Without this an ordinary user may set no filter; a program with a set-user-id bit then gains nothing by it.
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return f"no_new_privs: {os.strerror(ctypes.get_errno())}"
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0):
        return f"seccomp: {os.strerror(ctypes.get_errno())}"
    return ""


def _shared_memory_is_bounded(limit_bytes: int) -> bool:
    try:
        pages = int(SHARED_MEMORY_PAGES.read_text(encoding="ascii"))
    except OSError:
        return False
    return pages * resource.getpagesize() <= limit_bytes


def _filter(machine: Machine, refused: list[int]) -> bytes:
    """Return the filter's program: struct sock_filter (code, jumps if true and false, value) each."""

    def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    refuse = instruction(RETURN, SECCOMP_RET_ERRNO | errno.EPERM)
    # Calls of another machine's type, such as those of a 32-bit program, have other numbers: all are refused.
    program = [
        instruction(LOAD, MACHINE_AT),
        instruction(JUMP_IF_EQUAL, machine.audit, if_true=1),
        refuse,
        instruction(LOAD, NUMBER_AT),
        instruction(JUMP_IF_AT_LEAST, X32_CALLS, if_false=1),
        refuse,
    ]
    for number in refused:
        program += [instruction(JUMP_IF_EQUAL, number, if_false=1), refuse]
    program.append(instruction(RETURN, SECCOMP_RET_ALLOW))
    return b"".join(program)
