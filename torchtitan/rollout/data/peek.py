"""The columns of a dataset that a look at its beginning shows, before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

from torchtitan.rollout.data.prompts import BUILT_IN

# Of a file that are looked at; it may have gigabytes.
BYTES = 8 << 20


def peek_columns(dataset: str, of_all_rows: bool = False) -> set[str] | None:
    """Return the columns of the first rows of a dataset; None where only loading it would tell: it is no built-in task
    and no .jsonl file, or this file's beginning is malformed.

    of_all_rows: None, too, if the file goes on, because a row there may have other columns.
    """
    found: set[str] = set()
    if dataset in BUILT_IN:
        found.update(*BUILT_IN[dataset]())
    elif dataset.endswith(".jsonl") and Path(dataset).is_file():  # no pipe, which would wait for a writer
        try:
            with Path(dataset).open("rb") as file:
                for line in file:
                    if file.tell() > BYTES:
                        return None if of_all_rows else found or None
                    if line.strip():
                        found.update(json.loads(line))
        except (OSError, ValueError, RecursionError, TypeError):
            return None
    return found or None
