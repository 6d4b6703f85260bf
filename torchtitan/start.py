"""What ./run_grpo.sh runs: checks the configuration in this process, then starts the ranks (utils/launch.py).

    python -m torchtitan.start <torchrun's arguments> -- --job.config_file x.toml --training.steps 10

With --dry-run or --help nothing is started. Exit code 2: the configuration is wrong. No torch here: checked by every
rank first, a mistake would be said by each.
"""

from __future__ import annotations

import gc
import signal
import sys

if __name__ == "__main__":
    # Imports and checks leave next to no garbage, and looking for it takes a tenth of their time.
    gc.disable()
    # As in utils/launch.py, before anything else is imported.
    signal.signal(signal.SIGINT, lambda *_: sys.exit(128 + signal.SIGINT))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

from torchtitan.errors import another_package

if problem := another_package():
    sys.exit(problem)

import os
from collections.abc import Sequence
from pathlib import Path

from torchtitan.config.job_config import value_at
from torchtitan.config.reading import read_command_line
from torchtitan.errors import UserError
from torchtitan.utils.logs import print_page

PROGRAM = "torchtitan.grpo_train"


def main(arguments: Sequence[str]) -> int:
    """Check, and start the ranks; returns the exit code. Arguments before `--` are the launcher's."""
    between = list(arguments).index("--")
    for_launcher, for_ranks = list(arguments[:between]), list(arguments[between + 1 :])
    # --help ends here, before what checks and starts the rest is imported.
    draft, dry_run = read_command_line(for_ranks)
    from torchtitan.utils import launch

    started = launch.read_launch([*for_launcher, PROGRAM])
    if started is None:
        print("error: torchtitan.start starts the ranks of one machine; for several, see docs/gpu.md", file=sys.stderr)
        return 2
    # The ranks get their own from the launcher.
    os.environ["WORLD_SIZE"] = str(started.ranks)
    try:
        from torchtitan.preflight.hub import is_snapshot
        from torchtitan.preflight.validate import MODEL, TEACHER, validated

        config = validated(draft, planning=dry_run)
        if dry_run:
            from torchtitan.preflight.dry_run import describe_dry_run

            print_page(describe_dry_run(draft, config, started.ranks))
            return 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        del os.environ["WORLD_SIZE"]
    gc.enable()
    # The ranks get the folders of models of the Hub: they need not look names up again.
    for key in (MODEL, TEACHER):
        folder = str(value_at(config, key))
        if is_snapshot(Path(folder)):
            for_ranks.append(f"--{key}={folder}")
    print(f"[run] {started.ranks} rank(s), {config.job.config_file}", file=sys.stderr, flush=True)
    return launch.main([*for_launcher, "-m", PROGRAM, *for_ranks])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
