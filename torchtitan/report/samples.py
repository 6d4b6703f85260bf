"""Samples of the first, a middle and the last step of completions.jsonl, for a look at what was learned.

However long the file is, only its beginning, a part in its middle and its end are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torchtitan.report.metrics import COMPLETIONS_FILE
from torchtitan.utils.json_lines import JsonTail, line_start, read_lines, rows_in

# Of a step; a step's first rows are of different groups.
SAMPLES = 6
# So much is read in each of the three places. A step of long conversations may take more; then fewer are shown.
PART_BYTES = 2 * 2**20
# Longer texts are cut there, and say so.
MAX_CHARACTERS = 1500
MAX_SEGMENTS = 30

Row = Mapping[str, Any]


def read_samples(run_dir: Path) -> list[dict[str, Any]]:
    """Return {"step": …, "rows": […]} of up to three steps, in order; nothing without completions."""
    path = run_dir / COMPLETIONS_FILE
    if not path.is_file():
        return []
    if path.stat().st_size <= PART_BYTES:
        parts = _parts_of(_rows_from(path, 0))
    else:
        parts = [_first_step(_rows_from(path, 0)), _middle_step(path), _last_step(path)]
    steps = {part[0]["step"]: part for part in parts if part}
    return [{"step": step, "rows": [_shown(row) for row in steps[step][:SAMPLES]]} for step in sorted(steps)]


def _rows_from(path: Path, place: int) -> list[Row]:
    lines, _ = read_lines(path, place, PART_BYTES)
    return _with_steps(rows_in(path, lines))


def _with_steps(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if isinstance(row.get("step"), int)]


def _parts_of(rows: list[Row]) -> list[list[Row]]:
    """Return the rows of the first, the middle and the last step of all that there are."""
    steps: dict[int, list[Row]] = {}
    for row in rows:
        steps.setdefault(row["step"], []).append(row)
    known = sorted(steps)
    return [steps[known[place]] for place in (0, len(known) // 2, -1)] if known else []


def _first_step(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["step"] == rows[0]["step"]]


def _middle_step(path: Path) -> list[Row]:
    """Return the rows of the first step that begins in the second half of the file, or of the step that goes on
    there."""
    rows = _rows_from(path, line_start(path, path.stat().st_size // 2))
    later_steps = [row for row in rows if row["step"] != rows[0]["step"]]
    return _first_step(later_steps or rows)


def _last_step(path: Path) -> list[Row]:
    rows = _with_steps(JsonTail(path, PART_BYTES).read())
    return [row for row in rows if row["step"] == rows[-1]["step"]]


def _shown(row: Row) -> dict[str, Any]:
    """Return what is shown of a row, within bounds."""
    extra, rewards = row.get("extra"), row.get("rewards")
    extra = extra if isinstance(extra, dict) else {}
    shown = {name: row.get(name) for name in ("reward", "advantage", "tokens", "finish_reason", "source")}
    shown["prompt"] = _cut_front(str(row.get("prompt", "")))
    shown["completion"] = _cut(str(row.get("completion", "")))
    shown["reference"] = [[name, _cut(str(value))] for name, value in list(extra.items())[:5]]
    shown["rewards"] = list(rewards.items())[:10] if isinstance(rewards, dict) else []
    if row.get("segments"):
        shown["segments"] = [
            {"text": _cut(str(segment.get("text", ""))), "sampled": "tokens" in segment}
            for segment in row["segments"][:MAX_SEGMENTS]
        ]
    return shown


def _cut(text: str) -> str:
    left_out = len(text) - MAX_CHARACTERS
    return text if left_out <= 0 else f"{text[:MAX_CHARACTERS]} … ({left_out} more characters)"


def _cut_front(text: str) -> str:
    """Prompts of one task begin alike, so their ends are shown."""
    left_out = len(text) - MAX_CHARACTERS
    return text if left_out <= 0 else f"({left_out} characters before) … {text[-MAX_CHARACTERS:]}"
