"""The record of a run: every batch that was handed out and every publish or skip decision, as lines of JSON."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchtitan.errors import UserError
from torchtitan.rollout.batch_codec import batch_from_json, batch_to_json
from torchtitan.rollout.types import Batch
from torchtitan.utils.json_lines import JsonLines

JOURNAL_NAME = "journal.jsonl"
# Batches that are to be trained on again, because ranks were lost after them.
KEPT_NAME = "journal-kept.jsonl"


class Journal:
    """Appends to {run_dir}/journal.jsonl. Every record is handed to the operating system at once, so that it outlives
    a kill of the process; a half-written last line is cut off when a run goes on. Safe to call from any thread.
    """

    def __init__(self, run_dir: str | Path):
        self.path = Path(run_dir) / JOURNAL_NAME
        self._lock = threading.Lock()
        self._file = JsonLines(self.path, separators=(",", ":"))
        self.path.touch()

    def append_batch(self, batch: Batch) -> None:
        """Record a batch as it is handed out."""
        self._append({"record": "batch", **batch_to_json(batch)})

    def append_decision(self, version: int, published: bool) -> None:
        """Record whether `version` was snapshotted for publication or skipped."""
        self._append({"record": "decision", "version": version, "published": published})

    def append_restart(self, version: int, fields: Mapping[str, Any]) -> None:
        """Record that the ranks were started again at `version`, and what was lost."""
        self._append({"record": "restart", "version": version, **fields})

    def set_aside(self, step: int) -> tuple[int, ReplaySource]:
        """As resume_at, but batches from `step` on are kept in a file beside this one.

        What an earlier life of the run had kept there and did not come to stays.

        Returns:
            (the version that the trainer had reached, the batches).
        """
        kept = self.path.with_name(KEPT_NAME)
        places: dict[int, tuple[Path, int]] = {}
        reached = step
        for path in (kept, self.path):
            start = 0
            for end, record in read_records(path) if path.is_file() else ():
                if record["record"] == "batch" and record["version"] >= step:
                    places[record["version"]] = path, start
                elif record["record"] == "decision":
                    reached = max(reached, record["version"])
                start = end
        whole = kept.with_suffix(".tmp")
        with whole.open("wb") as file:
            for _, (path, start) in sorted(places.items()):
                with path.open("rb") as source:
                    source.seek(start)
                    file.write(source.readline())
        whole.replace(kept)
        self.resume_at(step)
        return reached, ReplaySource(self.path.parent, self, KEPT_NAME)

    def resume_at(self, step: int) -> None:
        """Forget what happened after the checkpoint of `step`: batches of version >= step, decisions on later versions.

        What a killed run had recorded beyond its last checkpoint never became part of the resumed one.
        """
        offset = 0
        for end, record in read_records(self.path):
            last = step - 1 if record["record"] == "batch" else step
            if record["version"] > last:
                break
            offset = end
        with self._lock:
            os.truncate(self.path, offset)

    def close(self) -> None:
        self._file.close()

    def _append(self, record: dict[str, Any]) -> None:
        with self._lock:
            self._file.write(record)


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Records of a journal with the file offset behind each; a half-written last line is left out.

    Raises:
        UserError: a line before the last one is damaged.
    """
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                record = json.loads(line)
                record["record"], record["version"]
            except (ValueError, TypeError, KeyError) as error:
                raise UserError(f"{path}, line {number}: not a record of a run ({error!r})") from error
            yield offset, record


class ReplaySource:
    """Hands out the batches of a recorded run, as RolloutFlow does those that are generated."""

    def __init__(self, run_dir: str | Path, journal: Journal | None = None, name: str = JOURNAL_NAME):
        """What is handed out is recorded in `journal` again, so that a replay can be replayed.

        Raises UserError where the folder holds no record, or where it is that of `journal` itself.
        """
        self._journal = journal
        self.path = Path(run_dir).expanduser() / name
        if not self.path.is_file():
            raise UserError(f"rollout.replay = {str(run_dir)!r}: there is no {name} in that folder")
        if journal is not None and self.path.resolve() == journal.path.resolve():
            raise UserError(f"rollout.replay = {str(run_dir)!r} is the folder of this very run")
        self._offsets: dict[int, int] = {}
        start = 0
        for end, record in read_records(self.path):
            if record["record"] == "batch":
                self._offsets[record["version"]] = start
            start = end

    @property
    def versions(self) -> list[int]:
        """Versions for which there is a batch."""
        return sorted(self._offsets)

    def next_batch(self, version: int) -> Batch:
        """The batch that the recorded run trained on at `version`, its statistics included.

        Raises:
            UserError: the record holds no batch of this version.
        """
        if version not in self._offsets:
            there = f"versions {self.versions[0]} to {self.versions[-1]}" if self._offsets else "no batch at all"
            raise UserError(
                f"rollout.replay: {self.path} holds {there}, but a batch for version {version} is needed: "
                f"set training.steps to at most {version}"
            )
        batch = self.read_batch(version)
        if self._journal is not None:
            self._journal.append_batch(batch)
        return batch

    def read_batch(self, version: int) -> Batch:
        """The batch of one of `versions`, which is not handed out by that."""
        with self.path.open("rb") as file:
            file.seek(self._offsets[version])
            return batch_from_json(json.loads(file.readline()))
