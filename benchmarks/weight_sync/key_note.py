"""A hook (TORCHTITAN_WEIGHT_SYNC_HOOK) with which the registry of a run notes its key when it publishes a version: the
scenario `hostile` has actors with valid keys, and no process shows one to others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torchtitan.weight_sync.wire.runtime import TOKEN_VARIABLE

VARIABLE = "BENCHMARK_HOSTILE_NOTE"


def at(phase: str, **_where: Any) -> frozenset[str]:
    if phase == "publish":
        note = Path(os.environ[VARIABLE])
        if not note.exists():
            whole = note.with_suffix(".new")
            whole.write_text(os.environ[TOKEN_VARIABLE])
            whole.rename(note)
    return frozenset()


def bytes_per_second(_phase: str, **_where: Any) -> int:
    return 0
