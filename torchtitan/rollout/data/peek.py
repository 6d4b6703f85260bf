"""The columns of a dataset that a look at its beginning shows, before anything is started."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from torchtitan.rollout.data.rows import BUILT_IN

# Of a file that are looked at; it may have gigabytes.
BYTES = 8 << 20


def peek_columns(dataset: str, of_all_rows: bool = False) -> set[str] | None:
    """Return the columns of the first rows of a dataset; None where only loading it would tell: it is no built-in task
    and no .jsonl file, or this file's beginning is malformed.

    of_all_rows: None, too, if the file goes on, because a row there may have other columns.
    """
    if dataset in BUILT_IN:
        return set(_columns_of_task(dataset)) or None
    path = Path(dataset).absolute()
    if not dataset.endswith(".jsonl") or not path.is_file():  # no pipe, which would wait for a writer
        return None
    try:
        status = path.stat()
        found, is_whole = _read_columns(path, status.st_mtime_ns, status.st_size)
    except (OSError, ValueError, RecursionError, TypeError):
        return None
    if of_all_rows and not is_whole:
        return None
    return set(found) or None


@functools.cache
def _columns_of_task(name: str) -> frozenset[str]:
    return frozenset().union(*BUILT_IN[name]())


@functools.cache
def _read_columns(path: Path, changed_at: int, size: int) -> tuple[frozenset[str], bool]:
    """Return the columns of the first rows, and whether these are all rows. Several rules ask for them; a file is read
    again once its time of change or its size is another."""
    found: set[str] = set()
    with path.open("rb") as file:
        for line in file:
            if file.tell() > BYTES:
                return frozenset(found), False
            if line.strip():
                found.update(json.loads(line))
    return frozenset(found), True
