"""Check a configuration without starting anything: exit code 0, or 2 with all problems in one message.

    python -m torchtitan.preflight --job.config_file train_configs/debug_cpu.toml --training.steps 10
    python -m torchtitan.preflight --dry-run …          also prints the plan
    python -m torchtitan.preflight --servers 8 …        prints how an inference node with 8 GPUs serves this run, one
                                                        item per line: engine, GPUs per server, options of its agent

The number of ranks is read from WORLD_SIZE.
"""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":
    # Handle Ctrl-C during the imports below, without a traceback.
    signal.signal(signal.SIGINT, lambda *_: sys.exit(128 + signal.SIGINT))

from torchtitan.errors import another_package

if problem := another_package():
    sys.exit(problem)

from torchtitan.config.reading import read_command_line
from torchtitan.errors import UserError
from torchtitan.preflight.dry_run import describe_dry_run
from torchtitan.preflight.plan import plan_servers
from torchtitan.preflight.validate import validated
from torchtitan.utils.logs import print_page
from torchtitan.utils.ranks import world_size


def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    gpus = 0
    if argv and argv[0] == "--servers":
        gpus = int(argv[1]) if argv[1:] and argv[1].isdigit() else 0
        if not gpus:
            print("error: --servers needs the number of a node's GPUs, 1 or more", file=sys.stderr)
            return 2
    draft, dry_run = read_command_line(argv[2 if gpus else 0 :])
    try:
        config = validated(draft, planning=bool(gpus) or dry_run)
        if dry_run:
            print_page(describe_dry_run(draft, config, world_size()))
        elif gpus:
            share, options = plan_servers(config, gpus)
            print(config.inference.backend, share, *options, sep="\n")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
