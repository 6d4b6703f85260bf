"""Tensors of a checkpoint that are not trained, on their way into an export: linked, or copied byte for byte in small
pieces, so that they never lie in a process's memory as a whole. Does not import torch.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.models.shape.checkpoint_files import tensor_files
from torchtitan.models.shape.checkpoint_shape import read_shape

# Bytes that are copied at a time.
PIECE = 16 << 20
# Readers may map a file's tensors into memory, aligned as this many bytes.
ALIGNMENT = 8


@dataclass(frozen=True)
class UntrainedFile:
    """Tensors of one safetensors file that exports keep."""

    path: Path
    names: tuple[str, ...]
    whole: bool
    """The file holds nothing else"""
    data_bytes: int


def prediction_heads(config: JobConfig) -> str:
    """Return what to say of heads of multi-token prediction, which are not trained; empty for a checkpoint without.
    Raises UserError."""
    directory = Path(config.model.hf_assets_path)
    if not config.model.hf_assets_path or not any(directory.glob("*.safetensors")):
        return ""
    if not any(map(read_shape(config).is_prediction_layer, tensor_files(directory))):
        return ""
    return (
        f"the heads of multi-token prediction in {directory} are not trained: exports keep them as they are, and they "
        "fit the policy less with every step, so that an engine that drafts with them accepts fewer tokens"
    )


def find_untrained(directory: Path, is_untrained: Callable[[str], bool]) -> list[UntrainedFile]:
    """Return the tensors with such names in a checkpoint directory, by file. Raises UserError."""
    by_path: dict[Path, list[str]] = {}
    for name, path in tensor_files(directory).items():
        by_path.setdefault(path, []).append(name)
    found = []
    for path, names in sorted(by_path.items()):
        if kept := tuple(name for name in names if is_untrained(name)):
            with path.open("rb") as file:
                entries, _ = _read_header(file)
            sizes = [end - begin for begin, end in (entries[name]["data_offsets"] for name in kept)]
            found.append(UntrainedFile(path, kept, len(kept) == len(names), sum(sizes)))
    return found


def write_untrained(kept: UntrainedFile, folder: Path, name: str) -> None:
    """Make folder/name a safetensors file of these tensors: a hard link if they are all of their file, and the file
    system has such links. Raises OSError; UserError for a file that has become shorter."""
    target = folder / name
    if not kept.whole:
        _copy_tensors(kept, target)
        return
    source = kept.path.resolve()
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links: an ordinary copy says what else is wrong
        shutil.copyfile(source, target)


def _read_header(file: BinaryIO) -> tuple[dict[str, dict[str, list[int]]], int]:
    """Return the entries of a safetensors file, and where its data begins."""
    size = int.from_bytes(file.read(8), "little")
    return json.loads(file.read(size)), 8 + size


def _copy_tensors(kept: UntrainedFile, target: Path) -> None:
    with kept.path.open("rb") as source, target.open("wb") as copy:
        entries, start = _read_header(source)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name in kept.names:
            begin, end = entries[name]["data_offsets"]
            header[name] = {**entries[name], "data_offsets": [position, position + end - begin]}
            position += end - begin
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        copy.write(len(text).to_bytes(8, "little") + text)
        for name in kept.names:
            begin, end = entries[name]["data_offsets"]
            source.seek(start + begin)
            _copy_bytes(source, copy, end - begin, kept.path)


def _copy_bytes(source: BinaryIO, copy: BinaryIO, count: int, path: Path) -> None:
    while count:
        piece = source.read(min(count, PIECE))
        if not piece:
            raise UserError(f"{path}: the file ends within a tensor: it has changed since the run began")
        copy.write(piece)
        count -= len(piece)
