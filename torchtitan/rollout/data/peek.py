"""The columns of a dataset that a look at its beginning shows, before anything is started."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from torchtitan.rollout.data.prompts import BUILT_IN

# Lines of a file that are looked at; it may have gigabytes.
LINES = 1000


def peek_columns(dataset: str) -> set[str] | None:
    """Return the columns of a dataset; None where only loading it would tell: it is no built-in task and no .jsonl
    file, or this file's beginning is malformed."""
    found: set[str] = set()
    if dataset in BUILT_IN:
        found.update(*itertools.islice(BUILT_IN[dataset](), LINES))
    elif dataset.endswith(".jsonl") and Path(dataset).is_file():  # no pipe, which would wait for a writer
        try:
            with Path(dataset).open("rb") as file:
                for line in itertools.islice(file, LINES):
                    if line.strip():
                        found.update(json.loads(line))
        except (OSError, ValueError, RecursionError, TypeError):
            return None
    return found or None
