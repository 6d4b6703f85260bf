"""The journal of a run: every batch that was handed out and every publish or skip decision, as JSON lines.

A batch is compressed within its line, so lines can be counted and cut without reading any batch.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from torchtitan.errors import UserError
from torchtitan.inference.types import Branch, Completion, Given, Segment
from torchtitan.rollout.types import Batch, Group, Sample
from torchtitan.utils.json_lines import JsonLines

FORMAT = 3
JOURNAL_NAME = "journal.jsonl"
# Batches that must be trained on again because ranks were lost afterwards.
KEPT_NAME = "journal-kept.jsonl"
# Higher levels save a fifth of the bytes, and take eight times as long on the thread that makes the rollouts.
ZLIB_LEVEL = 1


def encode_batch(batch: Batch) -> bytes:
    """Encode a batch as one line of JSON, without its newline, for the journal, checkpoints and the other ranks.

    Token ids and log-probs are base64 of little-endian arrays; log-probs are stored exactly.

    Raises:
        ValueError: a group has no samples.
    """
    return json.dumps(batch_to_json(batch), separators=(",", ":")).encode()


def decode_batch(data: bytes) -> Batch:
    """Invert encode_batch. Raises ValueError on anything else."""
    return batch_from_json(json.loads(data))


def batch_to_json(batch: Batch) -> dict[str, Any]:
    # A group's samples share a prompt, so each given segment is written only once.
    given: dict[tuple[int, ...], int] = {}
    groups: list[tuple[int, list[dict[str, Any]]]] = []
    for group in batch.groups:
        if not group.samples:
            raise ValueError(f"group {group.prompt_index} is empty")
        groups.append((group.prompt_index, [_sample_to_json(sample, given) for sample in group.samples]))
    return {
        "format": FORMAT,
        "version": batch.version,
        "statistics": batch.statistics,
        "groups": groups,
        "sources": [group.source for group in batch.groups],
        "from_pass": [group.from_pass for group in batch.groups],
        "given": [_pack(tokens) for tokens in given],
    }


def batch_from_json(data: dict[str, Any]) -> Batch:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError("not a recorded batch of this format")
    given = [_unpack(text) for text in data["given"]]
    # Earlier journals and checkpoints do not say which groups are from a curriculum's pass.
    from_pass = data.get("from_pass", [False] * len(data["groups"]))
    groups: list[Group] = []
    for (index, written), source, is_from_pass in zip(data["groups"], data["sources"], from_pass, strict=True):
        samples = [_sample_from_json(sample, given) for sample in written]
        groups.append(Group(index, samples, source, is_from_pass))
    return Batch(data["version"], groups, data["statistics"])


def _sample_to_json(sample: Sample, given: dict[tuple[int, ...], int]) -> dict[str, Any]:
    return {**vars(sample), "branches": [_branch_to_json(branch, given) for branch in sample.branches]}


def _sample_from_json(data: dict[str, Any], given: list[list[int]]) -> Sample:
    return Sample(**{**data, "branches": [_branch_from_json(branch, given) for branch in data["branches"]]})


def _branch_to_json(branch: Branch, given: dict[tuple[int, ...], int]) -> list[int | dict[str, Any]]:
    return [_segment_to_json(segment, given) for segment in branch.segments]


def _branch_from_json(data: list[int | dict[str, Any]], given: list[list[int]]) -> Branch:
    return Branch([_segment_from_json(segment, given) for segment in data])


def _segment_to_json(segment: Segment, given: dict[tuple[int, ...], int]) -> int | dict[str, Any]:
    """Return the index of a given segment in `given`, or a sampled segment as an object."""
    if isinstance(segment, Given):
        return given.setdefault(tuple(segment.token_ids), len(given))
    fields = {name: value for name, value in segment.to_json().items() if value is not None}
    fields["token_ids"] = _pack(segment.token_ids)
    fields["log_probs"] = _pack_floats(segment.log_probs)
    if segment.kept_token_ids is not None:
        lengths = [len(ids) for ids in segment.kept_token_ids]
        fields["kept_token_ids"] = [lengths, _pack(list(itertools.chain(*segment.kept_token_ids)))]
    if segment.teacher_log_probs is not None:
        fields["teacher_log_probs"] = _pack_floats(segment.teacher_log_probs)
    return fields


def _segment_from_json(data: int | dict[str, Any], given: list[list[int]]) -> Segment:
    if isinstance(data, int):
        return Given(list(given[data]))
    kept, taught = data.get("kept_token_ids"), data.get("teacher_log_probs")
    if kept is not None:
        ids = iter(_unpack(kept[1]))
        kept = [list(itertools.islice(ids, length)) for length in kept[0]]
    packed = {"token_ids": _unpack(data["token_ids"]), "log_probs": _unpack_floats(data["log_probs"])}
    taught = None if taught is None else _unpack_floats(taught)
    for name, values in (("sampling", packed["log_probs"]), ("teacher", taught)):
        if values is not None and len(values) != len(packed["token_ids"]):
            raise ValueError(f"{len(values)} log-probs ({name}) of {len(packed['token_ids'])} tokens")
    return Completion.from_json({**data, **packed, "kept_token_ids": kept, "teacher_log_probs": taught})


def _pack(values: Sequence[int]) -> str:
    return base64.b64encode(numpy.asarray(values, dtype="<i4").tobytes()).decode()


def _unpack(text: str, dtype: str = "<i4") -> list[Any]:
    return numpy.frombuffer(base64.b64decode(text, validate=True), dtype=dtype).tolist()


def _pack_floats(values: Sequence[float]) -> list[str]:
    """Pack as float32, which holds engines' values exactly; values with more precision are packed as float64."""
    wide = numpy.asarray(values, dtype="<f8")
    with numpy.errstate(over="ignore"):
        narrow = wide.astype("<f4")
    chosen = narrow if numpy.array_equal(narrow.astype("<f8"), wide) else wide
    return [chosen.dtype.str, base64.b64encode(chosen.tobytes()).decode()]


def _unpack_floats(data: list[str]) -> list[float]:
    dtype, text = data
    if dtype not in ("<f4", "<f8"):
        raise ValueError(f"log-probs of an unknown type {dtype!r}")
    return _unpack(text, dtype)


class Journal:
    """Appends to {run_dir}/journal.jsonl. Safe to call from any thread.

    Every record is passed to the operating system immediately, so that it survives a kill of the process. A partial
    last line is truncated when a run resumes.
    """

    def __init__(self, run_dir: str | Path, max_bytes: int = 0, needed_from: Callable[[], float] = lambda: math.inf):
        """With max_bytes, the oldest records are dropped when the file is larger, down to half of it; but no batch from
        version `needed_from()` on, which the ranks would train on again after a restart."""
        self.path = Path(run_dir) / JOURNAL_NAME
        self._max_bytes, self._needed_from = max_bytes, needed_from
        self._drop_at = max_bytes
        self._lock = threading.Lock()
        self._file = JsonLines(self.path, separators=(",", ":"))
        self.path.touch()

    def append_batch(self, batch: Batch) -> None:
        """Record a batch that is handed out."""
        data = base64.b64encode(zlib.compress(encode_batch(batch), ZLIB_LEVEL)).decode()
        self._append({"record": "batch", "version": batch.version, "zlib": data})

    def append_decision(self, version: int, published: bool) -> None:
        """Record whether a snapshot of `version` was taken for publication, or the version was skipped. A later record
        of the same version takes its place: it was published after all, or a newer one has overtaken it."""
        self._append({"record": "decision", "version": version, "published": published})

    def append_restart(self, version: int, fields: Mapping[str, Any]) -> None:
        """Record that the ranks were restarted at `version`, and what was lost."""
        self._append({"record": "restart", "version": version, **fields})

    def set_aside(self, step: int) -> tuple[int, ReplaySource]:
        """Truncate like resume_at, but keep the batches from `step` on in a second file.

        Batches stay in that file if an earlier start of the same launch kept them and did not hand them out again.

        Returns:
            (the version that the trainer had reached, the batches).
        """
        kept_path = self.path.with_name(KEPT_NAME)
        places: dict[int, tuple[Path, int]] = {}
        reached = step
        for path in (kept_path, self.path):
            start = 0
            for end, record in read_records(path) if path.is_file() else ():
                if record["record"] == "batch" and record["version"] >= step:
                    places[record["version"]] = path, start
                elif record["record"] == "decision":
                    reached = max(reached, record["version"])
                start = end
        new_path = kept_path.with_suffix(".tmp")
        with new_path.open("wb") as file:
            for _, (path, start) in sorted(places.items()):
                with path.open("rb") as source:
                    source.seek(start)
                    file.write(source.readline())
        new_path.replace(kept_path)
        self._cut_at(step)
        return reached, ReplaySource(self.path.parent, self, KEPT_NAME)

    def resume_at(self, step: int) -> None:
        """Remove all records after the checkpoint of `step`: batches of version >= step, including those kept to be
        trained on again, and decisions on later versions.

        Records of a killed run beyond its last checkpoint are not part of the resumed run.
        """
        self.path.with_name(KEPT_NAME).unlink(missing_ok=True)
        self._cut_at(step)

    def _cut_at(self, step: int) -> None:
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
            if self._max_bytes and self.path.stat().st_size > self._drop_at:
                self._drop_oldest()
            self._file.write(record)

    def _drop_oldest(self) -> None:
        size, needed, first = self.path.stat().st_size, self._needed_from(), 0
        for end, record in read_records(self.path):
            if size - first <= self._max_bytes // 2 or (record["record"] == "batch" and record["version"] >= needed):
                break
            first = end
        temporary = self.path.with_suffix(".tmp")
        with self.path.open("rb") as source, temporary.open("wb") as target:
            source.seek(first)
            shutil.copyfileobj(source, target)
        self._file.close()
        temporary.replace(self.path)
        # What is needed may be more than the bound: look again only when a good deal has been added.
        self._drop_at = max(self._max_bytes, (size - first) * 5 // 4)


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each record of a journal with the file offset after it; a half-written last line is left out.

    Raises:
        UserError: a complete line is damaged.
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
                raise UserError(
                    f"{path}, line {number}: not a record of a run ({error!r}). Delete that line to go on without it"
                ) from error
            yield offset, record


def batch_of(path: Path, record: Mapping[str, Any]) -> Batch:
    """Return the batch of a record of the journal `path`. Raises UserError if it is damaged."""
    version = record["version"]
    try:
        batch = decode_batch(zlib.decompress(base64.b64decode(record["zlib"], validate=True)))
    except (ValueError, TypeError, KeyError, zlib.error) as error:
        raise UserError(f"{path} is damaged: the batch of version {version} cannot be read ({error!r})") from error
    if batch.version != version:
        raise UserError(f"{path} is damaged: a line of version {version} holds the batch of version {batch.version}")
    return batch


class ReplaySource:
    """Hands out the batches of a recorded run, as RolloutFlow hands out generated ones."""

    def __init__(self, run_dir: str | Path, journal: Journal | None = None, name: str = JOURNAL_NAME):
        """Batches that are handed out are recorded in `journal` again, so that a replay can be replayed.

        Raises UserError if the folder has no journal, or if its journal is `journal` itself.
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
        """The versions that have a batch, in order."""
        return sorted(self._offsets)

    def next_batch(self, version: int) -> Batch:
        """Hand out the batch that the recorded run trained on at `version`, including its statistics.

        Raises:
            UserError: the journal has no batch of this version.
        """
        if version not in self._offsets:
            there = f"versions {self.versions[0]} to {self.versions[-1]}" if self._offsets else "no batch at all"
            advice = f"set training.steps to at most {version}"
            if self._offsets and version < self.versions[0]:
                advice = "older ones were dropped there (rollout.journal_max_mb), so the run cannot be replayed"
            raise UserError(
                f"rollout.replay: {self.path} holds {there}, but a batch for version {version} is needed: {advice}"
            )
        batch = self.read_batch(version)
        if self._journal is not None:
            self._journal.append_batch(batch)
        batch.forget_actors()
        return batch

    def read_batch(self, version: int) -> Batch:
        """Return the batch of one of `versions` without handing it out. Raises UserError if it is damaged."""
        with self.path.open("rb") as file:
            file.seek(self._offsets[version])
            return batch_of(self.path, json.loads(file.readline()))
