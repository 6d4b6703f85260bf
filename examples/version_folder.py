"""Reads a version that the disk transport has written: read_weights("weights/latest") verifies and assembles the files
of all ranks, which weight_sync/memory/weight_files.py describes. For programs that serve or evaluate weights without
taking part in the synchronisation."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from torchtitan.distributed.boxes import Box
from torchtitan.errors import UserError
from torchtitan.utils.files import file_checksum
from torchtitan.weight_sync.memory.layout_tables import ParameterEntry, ParameterTable, ShardTable
from torchtitan.weight_sync.memory.manifest import Layout, LayoutError, Manifest, check_coverage
from torchtitan.weight_sync.memory.weight_files import DTYPE_NAMES, FORMAT, MANIFEST

# How often to resolve the folder again if its version is deleted while it is read.
_READ_ATTEMPTS = 5


@dataclass
class Weights:
    """A version as read by read_weights. tensors: name -> full tensor, in the actors' dtype."""

    epoch: str
    version: int
    digest: str
    tensors: dict[str, torch.Tensor]


def read_weights(folder: str | Path) -> Weights:
    """Read a version's folder, or `latest`, and assemble all ranks' shards.

    Checks every file's size and checksum against the manifest, and that every element occurs exactly once. Raises
    UserError if a check fails or there is no version.
    """
    gone: OSError | None = None
    for _ in range(_READ_ATTEMPTS):
        try:
            # Resolved once, so that all files are of one version; a newer version may delete that one meanwhile.
            return _read(Path(folder).resolve(strict=True))
        except FileNotFoundError as error:
            gone = error
    raise UserError(f"there is no whole version in {folder}: {gone}") from gone


def _read(folder: Path) -> Weights:
    manifest, files = _manifest(folder)
    parameters: dict[str, ParameterEntry] = {}
    places: list[dict[str, Box]] = []
    tensors: dict[str, torch.Tensor] = {}
    with contextlib.ExitStack() as opened:
        contents = []
        for file in files:
            path = folder / file["file"]
            if path.stat().st_size != file["bytes"] or file_checksum(path) != file["xxh3_128"]:
                raise UserError(f"{path} is not the file that {MANIFEST} describes: truncated or corrupt")
            try:
                contents.append(opened.enter_context(safe_open(path, "pt")))
                places.append(_places(contents[-1], parameters))
            except (SafetensorError, KeyError, TypeError, ValueError) as error:
                raise UserError(f"{path}: {error!r}") from error
        # Check before anything is allocated or assembled.
        try:
            check_coverage(_layout(parameters, places))
        except LayoutError as error:
            raise UserError(f"{folder}: the ranks' files do not hold every element exactly once: {error}") from error
        for content, boxes in zip(contents, places, strict=True):
            for name, box in boxes.items():
                shard = content.get_tensor(name)
                if name not in tensors:
                    tensors[name] = torch.empty(parameters[name].shape, dtype=shard.dtype)
                within = (slice(low, low + size) for low, size in zip(box.offset, box.shape, strict=True))
                tensors[name][tuple(within)] = shard
    return Weights(manifest.epoch, manifest.version, manifest.digest, tensors)


def _places(content: Any, parameters: dict[str, ParameterEntry]) -> dict[str, Box]:
    """Return by name where the shards of an open file belong. Adds their parameters to `parameters`."""
    about = content.metadata()
    if about is None or not {"offsets", "shapes"} <= about.keys():
        raise ValueError("its metadata does not say where its tensors belong")
    offsets, shapes = json.loads(about["offsets"]), json.loads(about["shapes"])
    dtypes = {kind: dtype for dtype, kind in DTYPE_NAMES.items()}
    boxes = {}
    for name in content.keys():  # noqa: SIM118 not a dict
        shard = content.get_slice(name)
        entry = ParameterEntry(name, dtypes[shard.get_dtype()], tuple(map(int, shapes[name])))
        if parameters.setdefault(name, entry) != entry:
            raise ValueError(f"{name} has another dtype or shape in another file")
        boxes[name] = Box(tuple(map(int, offsets[name])), tuple(shard.get_shape()))
    return boxes


def _layout(parameters: dict[str, ParameterEntry], places: list[dict[str, Box]]) -> Layout:
    """Return what the files hold, as a layout with one rank per file."""
    numbers, table = {name: number for number, name in enumerate(parameters)}, ParameterTable.of(parameters.values())
    ranks = [ShardTable.of(table, ((numbers[name], box) for name, box in boxes.items())) for boxes in places]
    return Layout(max(1, *(rank.slot_bytes for rank in ranks)), table, tuple(ranks))


def _manifest(folder: Path) -> tuple[Manifest, list[dict[str, Any]]]:
    """Return the manifest, and its description of the files."""
    try:
        data = json.loads((folder / MANIFEST).read_text())
        manifest, files = Manifest.from_json(data), data["files"]
        if data["format"] != FORMAT or not 0 < len(files) == len(manifest.table_digests):
            raise ValueError("of another format, or not of all ranks")
        for file in files:
            if absent := {"file", "bytes", "xxh3_128"} - file.keys():
                raise ValueError(f"without {', '.join(sorted(absent))}")
            if Path(file["file"]).name != file["file"] or file["file"] in ("", ".."):
                raise ValueError(f"{file['file']!r} is not a file of this folder")
    except (ValueError, KeyError, TypeError, AttributeError, LayoutError) as error:
        raise UserError(f"{folder / MANIFEST}: {error!r}") from error
    return manifest, files
