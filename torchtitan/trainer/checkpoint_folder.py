"""Checkpoints as folders: which are whole, how one becomes whole, which are removed. No torch here.

`step-N` holds a marker file and is whole; anything else is the remains of a save that was interrupted. A save writes
`step-N.tmp`, puts the marker in last and renames the folder, so that no reader ever takes a half for a whole.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MARKER = "complete.json"
FORMAT = 1
_WHOLE_NAME = re.compile(r"step-(\d+)")
_LEFTOVER_NAME = re.compile(r"step-\d+(\.tmp|\.removed)?")


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def whole_steps(folder: Path) -> list[int]:
    """Steps of the whole checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [(_WHOLE_NAME.fullmatch(entry.name), entry) for entry in folder.iterdir()]
    return sorted(int(match[1]) for match, entry in found if match and (entry / MARKER).is_file())


def begin(folder: Path, step: int) -> Path:
    """The empty folder that a save of this step writes into."""
    path = folder / f"step-{step}.tmp"
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    return path


def write_file(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def finish(folder: Path, step: int, facts: dict[str, Any]) -> Path:
    """Make the folder of begin() whole: marker, then rename, each on the disk before the next."""
    temporary, final = folder / f"step-{step}.tmp", checkpoint_path(folder, step)
    write_file(temporary / MARKER, json.dumps({"format": FORMAT, "step": step, **facts}).encode())
    _sync(temporary)
    if final.exists():  # without a marker: whole ones are not saved again
        shutil.rmtree(final)
    temporary.rename(final)
    _sync(folder)
    return final


def remove_incomplete(folder: Path) -> None:
    """Delete what interrupted saves and deletions left behind."""
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        if _LEFTOVER_NAME.fullmatch(entry.name) and not (
            _WHOLE_NAME.fullmatch(entry.name) and (entry / MARKER).is_file()
        ):
            logger.info("removing the incomplete checkpoint %s", entry)
            shutil.rmtree(entry)


def prune(folder: Path, keep_latest_k: int) -> None:
    """Delete all but the newest whole checkpoints; 0 keeps all. The last whole one always stays."""
    for step in whole_steps(folder)[:-keep_latest_k] if keep_latest_k > 0 else []:
        removed = folder / f"step-{step}.removed"
        checkpoint_path(folder, step).rename(removed)  # never a whole-looking half while files go
        shutil.rmtree(removed)


def set_aside_after(folder: Path, step: int) -> None:
    """Rename the checkpoints after `step`, to which a run goes back: nothing may load them any more."""
    for later in whole_steps(folder):
        if later > step:
            target = folder / f"abandoned-step-{later}"
            number = 1
            while target.exists():
                number += 1
                target = folder / f"abandoned-step-{later}-{number}"
            checkpoint_path(folder, later).rename(target)
            logger.info("step %d is being resumed: the later checkpoint of step %d is now %s", step, later, target)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
