"""python -m torchtitan.report RUN_DIR: write report.html and trace.json, even if the run is active or was killed.

    python -m torchtitan.report RUN_DIR --trace-only --minutes 60
    python -m torchtitan.report --serve RUN_DIR --port 8000

A run writes both files when it ends. It also serves its own live page if metrics.live_port is set.
"""

from __future__ import annotations

import sys

from torchtitan.errors import another_package

if problem := another_package():
    sys.exit(problem)

import argparse
from collections.abc import Sequence
from pathlib import Path

from torchtitan.errors import ConfigError, UserError
from torchtitan.report.live_server import serve_run
from torchtitan.report.page import write_report
from torchtitan.report.timeline import LAST_MINUTES, write_trace


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path, help="run folder")
    parser.add_argument("--trace-only", action="store_true", help="write trace.json, not report.html")
    parser.add_argument(
        "--minutes", type=float, default=LAST_MINUTES, help="of the trace, from the end of the run back"
    )
    parser.add_argument("--serve", action="store_true", help="serve the live page of the run, until Ctrl-C")
    parser.add_argument("--port", type=int, default=0, help="of the live page on 127.0.0.1; 0 takes a free one")
    arguments = parser.parse_args(argv)
    if not arguments.minutes > 0:
        parser.error("--minutes must be greater than 0")
    if not (arguments.run_dir / "config.toml").is_file():
        folder = arguments.run_dir
        missing = f"{folder} is not a run folder: there is no config.toml in it"
        print(f"error: {missing if folder.is_dir() else f'there is no run folder {folder}'}", file=sys.stderr)
        return ConfigError.exit_code
    try:
        if arguments.serve:
            serve_run(arguments.run_dir, arguments.port)
            return 0
        if not arguments.trace_only:
            print(write_report(arguments.run_dir))
        print(write_trace(arguments.run_dir, arguments.minutes))
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
