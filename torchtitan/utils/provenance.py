"""What a run was made with, for its record: versions, commit, machine and command line."""

from __future__ import annotations

import platform
import shlex
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torchtitan

GIT_TIMEOUT_S = 10.0


def provenance() -> dict[str, str]:
    """Return the program's version and commit, those of Python and torch, the host and the command line.

    The commit ends in "-dirty" if files were changed since; it is empty outside of a checkout.
    """
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    return {
        "program": f"{torchtitan.DISTRIBUTION} {torchtitan.__version__}",
        "commit": _commit(Path(torchtitan.__file__).resolve().parents[1]),
        "torch": torch,
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "command": shlex.join(sys.orig_argv),
    }


def _commit(root: Path) -> str:
    # Without this look, an installed package would take the commit of a checkout that it lies in.
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, or the folder is another user's
        return ""
    return done.stdout.strip()
