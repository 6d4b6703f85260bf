"""python -m torchtitan.report RUN_DIR [--minutes N] [--plot FILE.png]: write a run's trace.json.

A run does it by itself when it ends; this is for one that goes on or was killed, for another window, and for a picture
of some steps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan.errors import UserError
from torchtitan.report.timeline import read_timeline
from torchtitan.report.trace import LAST_MINUTES, write_trace


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m torchtitan.report", description=__doc__)
    parser.add_argument("run_dir", help="run folder")
    parser.add_argument("--minutes", type=float, default=LAST_MINUTES, help="how much, from the end of the run back")
    parser.add_argument("--plot", type=Path, help="also draw some steps as a .svg or .png file")
    parser.add_argument("--steps", type=int, default=12, help="steps in the plot")
    parser.add_argument("--last-step", type=int, help="the last of them; the newest by default")
    arguments = parser.parse_args(argv)
    if not arguments.minutes > 0 or arguments.steps < 1:
        parser.error("--minutes must be greater than 0, --steps at least 1")
    try:
        print(write_trace(arguments.run_dir, arguments.minutes))
        if arguments.plot is not None:
            from torchtitan.report.timeline_plot import write_plot

            timeline = read_timeline(Path(arguments.run_dir))
            print(write_plot(timeline, arguments.plot, arguments.steps, arguments.last_step))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
