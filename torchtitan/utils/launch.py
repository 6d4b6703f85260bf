"""Starts the ranks of a run, with torchrun's options and without its tracebacks.

    python -m torchtitan.utils.launch <torchrun's arguments>

On one machine it needs no torch (utils/local_ranks.py). For several machines, and for options that only torchrun has,
it is torchrun (utils/elastic_launch.py). Either way the exit code is that of the rank that failed first, a signal ends
in 128 + its number once the ranks have gone, and SIGUSR1 is passed on to the ranks. The ranks of one machine meet at
its loopback address, so its host name need not resolve.

With `--max-restarts N` all ranks are started again up to N times after one was killed or broke off. The run knows by
LAUNCH_VARIABLE that it has been started before, and goes on where it was (trainer/run_dir.py).
"""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":
    # Ctrl-C while the rest is imported, or before there is a run that answers it.
    signal.signal(signal.SIGINT, lambda *_: sys.exit(128 + signal.SIGINT))
    # Threads and ranks inherit this: a request for an export waits until somebody takes it, and ends nobody.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

from torchtitan.errors import another_package

if problem := another_package():
    sys.exit(problem)

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from torchtitan.utils.child_process import LAUNCH_VARIABLE, LAUNCHER_VARIABLE
from torchtitan.utils.local_ranks import Launch, LocalRanks, pass_on


def main(arguments: Sequence[str]) -> int:
    """Start the ranks that these arguments say, and return the exit code when they have ended."""
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    launch = read_launch(arguments)
    if launch is None:
        from torchtitan.utils import elastic_launch

        return elastic_launch.main(list(arguments))
    with tempfile.TemporaryDirectory(prefix="launch_", ignore_cleanup_errors=True) as folder:
        # The link to the run's folder goes with this one; of a launch that a person has named it stays.
        os.environ.setdefault(LAUNCH_VARIABLE, f"{folder}/run")
        ranks = LocalRanks(launch, Path(folder))
        pass_on(ranks.running)
        return ranks.run()


class _Others(Exception):
    """There are options that only torchrun understands."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Others(message)


def read_launch(arguments: Sequence[str]) -> Launch | None:
    """Return what is started on one machine; None: torchrun has to read these arguments, and may refuse them."""
    if any(name.startswith("PET_") for name in os.environ):
        return None  # torchrun's options, too
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--standalone", action="store_true")
    parser.add_argument("--nnodes", choices=("1", "1:1"), default="1")
    for name, default in (("nproc-per-node", 1), ("max-restarts", 0)):
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", type=int, default=default)
    parser.add_argument("--local-ranks-filter", "--local_ranks_filter", default="")
    parser.add_argument("--role", default="default")
    parser.add_argument("--tee", choices=("0", "3"), default="0")
    parser.add_argument("--redirects", choices=("0",))
    parser.add_argument("-m", "--module", action="store_true")
    parser.add_argument("--no-python", "--no_python", action="store_true")
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    try:
        parsed = parser.parse_args(arguments)
        shown = [int(rank) for rank in parsed.local_ranks_filter.split(",") if rank]
    except (_Others, ValueError):
        return None
    ranks = parsed.nproc_per_node
    if ranks < 1 or parsed.max_restarts < 0 or (parsed.module and parsed.no_python):
        return None
    command = [parsed.program, *parsed.arguments]
    if not parsed.no_python:
        # Its output comes at once.
        command = [sys.executable, "-u", *(["-m"] if parsed.module else []), *command]
    return Launch(ranks, parsed.max_restarts, shown or range(ranks), parsed.tee == "3", parsed.role, command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
