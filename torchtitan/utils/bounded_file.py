"""JSON lines of which only the newest are kept: what a process notes about itself without end."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

logger = logging.getLogger(__name__)

MOST_BYTES = 4 * 2**20


class BoundedFile:
    """Appends rows to a file of at most `most_bytes`; a full one loses its older half in one rename.

    A file that cannot be written costs its notes, nothing else: the error is logged once and later rows are dropped.
    """

    def __init__(self, path: str | Path, most_bytes: int = MOST_BYTES):
        self.path, self.most_bytes = Path(path), most_bytes
        self._file: BinaryIO | None = None
        self._size = 0
        self._failed = False

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row; other processes can read it at once."""
        if self._failed:
            return
        line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._open()
            elif self._size + len(line) > self.most_bytes:
                self._drop_older_half()
            assert self._file is not None
            self._file.write(line)
            self._size += len(line)
        except OSError as error:
            self._failed = True
            logger.warning("%s is not written any more: %s", self.path, error)

    def close(self) -> None:
        """May be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        self._file = self.path.open("ab", buffering=0)
        self._size = self._file.tell()
        if self._size and not self.path.read_bytes().endswith(b"\n"):
            self._size += self._file.write(b"\n")  # a kill cut the last line off

    def _drop_older_half(self) -> None:
        kept = self.path.read_bytes()[-(self.most_bytes // 2) :].partition(b"\n")[2]
        temporary = self.path.with_name(self.path.name + ".tmp")
        temporary.write_bytes(kept)
        self.close()
        os.replace(temporary, self.path)
        self._open()
