"""Processes without a network, without a view of other processes, and with files that they can only read (Linux).

bubblewrap does all of it. Where it is not installed, util-linux' unshare makes the namespaces and read_only.py does
the rest inside of them.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path

from torchtitan.errors import UserError

# The only folder that an isolated process can write to: its own, in memory, gone with it.
WRITABLE = "/dev/shm"
PROBE_TIMEOUT_S = 20.0
# /run holds the sockets of the system's servers, which read-only files would still lead to.
BUBBLEWRAP = (
    "bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/run", "--unshare-all",
    "--die-with-parent", "--cap-drop", "ALL", "--setenv", "TMPDIR", WRITABLE, "--",
)  # fmt: skip
NAMESPACES = (
    "unshare", "--user", "--map-root-user", "--mount", "--net", "--ipc", "--pid", "--fork", "--kill-child",
    sys.executable, "-IS", str(Path(__file__).with_name("read_only.py").resolve()),
)  # fmt: skip


@functools.cache
def isolation_command() -> tuple[str, ...]:
    """The words in front of a command that isolate it. Raises UserError where this system has no way to do so."""
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
        f"this system cannot isolate a process ({'; '.join(reasons)}): install bubblewrap, or have unprivileged user "
        "namespaces allowed"
    )
