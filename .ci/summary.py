"""Prints what the parts of `.ci/run` ended with: a line each for people, then one JSON object for a program.

    .ci/summary.py FOLDER NAME=EXIT_CODE=SECONDS …

FOLDER holds NAME.json of every part that came as far as its tests (pytest's `--summary`). Ends with 1 if a part failed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def summary_of(folder: Path, part: str) -> dict[str, Any]:
    name, code, seconds = part.split("=")
    file = folder / f"{name}.json"
    tests = json.loads(file.read_text()) if file.exists() else {}
    return tests | {"part": name, "exit_code": int(code), "seconds": int(seconds), "tests_ran": file.exists()}


def line_of(summary: dict[str, Any]) -> str:
    words = [f"{count} {outcome}" for outcome, count in summary.get("outcomes", {}).items()]
    words += [f"{count} not run ({option})" for option, count in summary.get("not_run", {}).items()]
    for engine, outcomes in summary.get("engines", {}).items():
        words += [f"{engine} NOT EXERCISED"] if set(outcomes) == {"skipped"} else []
    words += [f"{len(summary['too_long'])} take too long"] if summary.get("too_long") else []
    words += [f"{summary['processor_s']:.0f} processor seconds"] if summary["tests_ran"] else ["ended before its tests"]
    result = "passed" if summary["exit_code"] == 0 else f"FAILED with {summary['exit_code']}"
    return f"[ci] {summary['part']} {result} in {summary['seconds']} s: {', '.join(words)}"


def main(folder: str, *parts: str) -> int:
    summaries = [summary_of(Path(folder), part) for part in parts]
    for summary in summaries:
        print(line_of(summary))
    failed = any(summary["exit_code"] for summary in summaries)
    print(json.dumps({"passed": not failed, "parts": summaries}))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
