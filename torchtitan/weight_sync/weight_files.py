"""A version as safetensors files in a folder: what the disk transport writes, and how anybody reads it.

    weights/latest                    -> the newest version's folder (a symbolic link, replaced in one step)
    weights/<epoch>/version-00000012/
        model.safetensors             one rank: plain full tensors, by their Hugging Face names
        rank-00003.safetensors        several ranks: each one's shards; where they belong is in the file's metadata
        rank-00003.json               size and checksums of that file
        manifest.json                 written last: epoch, version, digest, and what the files are

    read_weights("weights/latest")    all ranks' files, checked and put together (needs torch)

Files hold the elements of a slot without its padding. No torch is imported but by read_weights.
"""

from __future__ import annotations

import contextlib
import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from torchtitan.errors import UserError
from torchtitan.weight_sync.layout_tables import Box, ParameterEntry, ParameterTable, ShardEntry, ShardTable
from torchtitan.weight_sync.manifest import DTYPE_BYTES, Layout, LayoutError, RankLayout, check_coverage, content_digest

if TYPE_CHECKING:
    import torch

MANIFEST = "manifest.json"
LATEST = "latest"
FORMAT = 1
_DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
# How often a version that is deleted while it is read is looked up anew.
_READ_ATTEMPTS = 5
_HASH_BYTES = 1 << 24


def file_name(rank: int, ranks: int) -> str:
    """Of a rank's tensors. A single rank's file is what Hugging Face calls it."""
    return "model.safetensors" if ranks == 1 else f"rank-{rank:05d}.safetensors"


def version_folder(epoch: str, version: int) -> str:
    """Of a version, in the weights folder."""
    return f"{epoch}/version-{version:08d}"


def version_of(folder: Path) -> int | None:
    """The version of such a folder, of any epoch (run_dir.mint_epoch); None for what a job has not made."""
    found = re.fullmatch(r"e\d+-\w+/version-(\d{8,})", f"{folder.parent.name}/{folder.name}")
    return None if found is None else int(found[1])


class PackedRank:
    """Where one rank's slot lies in its file: the same shards in the same order, without the gaps between them."""

    def __init__(self, layout: Layout, index: int):
        """`index`: the rank's place in `layout`."""
        self._layout, self._rank = layout, layout.ranks[index]
        entries = [layout.parameters[shard.parameter] for shard in self._rank.shards]
        self._names = [entry.name for entry in entries]
        if len(set(self._names)) < len(self._names):
            raise ValueError("a rank sends two shards of one parameter: a file cannot hold both under one name")
        sizes = [
            shard.elements * DTYPE_BYTES[entry.dtype] for shard, entry in zip(self._rank.shards, entries, strict=True)
        ]
        self._slot_start = np.array([shard.byte_offset for shard in self._rank.shards], np.int64)
        self._slot_end = self._slot_start + np.array(sizes, np.int64)
        self._file_start = np.concatenate(([0], np.cumsum(np.array(sizes, np.int64)))).astype(np.int64)
        if np.any(self._slot_start[1:] < self._slot_end[:-1]):
            raise ValueError("a rank's shards are not in the order of their bytes")

    @property
    def data_bytes(self) -> int:
        """Of the file, without its header."""
        return int(self._file_start[-1])

    def header(self, metadata: dict[str, str]) -> bytes:
        """The file's beginning. `metadata` joins what says where the shards belong."""
        tensors: dict[str, Any] = {}
        offsets, shapes = {}, {}
        for name, shard, start, end in zip(
            self._names, self._rank.shards, self._file_start[:-1].tolist(), self._file_start[1:].tolist(), strict=True
        ):
            entry = self._layout.parameters[shard.parameter]
            kind = _DTYPE_NAMES[entry.dtype]
            tensors[name] = {"dtype": kind, "shape": list(shard.shape), "data_offsets": [start, end]}
            offsets[name], shapes[name] = list(shard.offset), list(entry.shape)
        about = {"format": "pt", **metadata, "offsets": json.dumps(offsets), "shapes": json.dumps(shapes)}
        text = json.dumps({"__metadata__": about, **tensors}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    def bucket(self, index: int) -> tuple[int, list[tuple[int, int]]]:
        """(offset of a bucket's bytes behind the header, their ranges in the bucket): contiguous in the file."""
        start = index * self._layout.bucket_bytes
        end = min(start + self._layout.bucket_bytes, self._rank.slot_bytes)
        first = int(np.searchsorted(self._slot_end, start, "right"))
        last = int(np.searchsorted(self._slot_start, end, "left"))
        offset = int(self._file_start[min(first, len(self._file_start) - 1)])
        ranges = []
        for shard in range(first, last):
            low, high = max(int(self._slot_start[shard]), start), min(int(self._slot_end[shard]), end)
            if low < high:
                ranges.append((low - start, high - start))
        if ranges:
            offset += max(0, start - int(self._slot_start[first]))
        return offset, ranges


@dataclass
class Weights:
    """A version as read_weights found it. tensors: name -> full tensor, in the dtype of the actors."""

    epoch: str
    version: int
    digest: str
    tensors: dict[str, torch.Tensor]


def read_weights(folder: str | Path) -> Weights:
    """Read a version's folder, or `latest`: all ranks' shards, put together.

    Every file's size and checksum is compared with the manifest, and that every element is there exactly once. Raises
    UserError where something does not fit, or there is no version.
    """
    gone: OSError | None = None
    for _ in range(_READ_ATTEMPTS):
        try:
            # Resolved once, so that all files are of one version; a newer one may delete it meanwhile.
            return _read(Path(folder).resolve(strict=True))
        except FileNotFoundError as error:
            gone = error
    raise UserError(f"there is no whole version in {folder}: {gone}") from gone


def _read(folder: Path) -> Weights:
    import torch
    from safetensors import SafetensorError, safe_open

    manifest = _manifest(folder)
    parameters: dict[str, ParameterEntry] = {}
    places: list[dict[str, Box]] = []
    tensors: dict[str, torch.Tensor] = {}
    with contextlib.ExitStack() as opened:
        contents = []
        for file in manifest["files"]:
            path = folder / file["file"]
            if path.stat().st_size != file["bytes"] or file_checksum(path) != file["xxh3_128"]:
                raise UserError(f"{path} is not the file that {MANIFEST} describes: truncated or corrupt")
            try:
                contents.append(opened.enter_context(safe_open(path, "pt")))
                places.append(_places(contents[-1], parameters))
            except (SafetensorError, KeyError, TypeError, ValueError) as error:
                raise UserError(f"{path}: {error!r}") from error
        # Before anything is allocated or put together.
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
    return Weights(manifest["epoch"], manifest["version"], manifest["digest"], tensors)


def _places(content: Any, parameters: dict[str, ParameterEntry]) -> dict[str, Box]:
    """Where the shards of an open file belong, by name; adds their parameters to those of other files."""
    about = content.metadata()
    if about is None or not {"offsets", "shapes"} <= about.keys():
        raise ValueError("its metadata does not say where its tensors belong")
    offsets, shapes = json.loads(about["offsets"]), json.loads(about["shapes"])
    dtypes = {kind: dtype for dtype, kind in _DTYPE_NAMES.items()}
    boxes = {}
    for name in content.keys():  # noqa: SIM118 not a dict
        shard = content.get_slice(name)
        entry = ParameterEntry(name, dtypes[shard.get_dtype()], tuple(map(int, shapes[name])))
        if parameters.setdefault(name, entry) != entry:
            raise ValueError(f"{name} has another dtype or shape in another file")
        boxes[name] = Box(tuple(map(int, offsets[name])), tuple(shard.get_shape()))
    return boxes


def _layout(parameters: dict[str, ParameterEntry], places: list[dict[str, Box]]) -> Layout:
    """What the files hold, as a layout of as many ranks."""
    numbers = {name: number for number, name in enumerate(parameters)}
    ranks = []
    for boxes in places:
        end, shards = 0, []
        for name, box in boxes.items():
            shards.append(ShardEntry(numbers[name], box.offset, box.shape, end))
            end += box.elements * DTYPE_BYTES[parameters[name].dtype]
        ranks.append(RankLayout(end, ShardTable.of(shards)))
    return Layout(max(1, *(rank.slot_bytes for rank in ranks)), ParameterTable.of(parameters.values()), tuple(ranks))


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        checksums = [file["bucket_checksums"] for file in manifest["files"]]
        if manifest["format"] != FORMAT or len(checksums) != manifest["ranks"]:
            raise ValueError("of another format, or not of all ranks")
        if not checksums:
            raise ValueError("of no rank")
        for file in manifest["files"]:
            if Path(file["file"]).name != file["file"] or file["file"] in ("", ".."):
                raise ValueError(f"{file['file']!r} is not a file of this folder")
        absent = {"epoch", "version"} - manifest.keys() or {"bytes", "xxh3_128"} - set.intersection(
            *(set(file) for file in manifest["files"])
        )
        if absent:
            raise ValueError(f"without {', '.join(sorted(absent))}")
        if content_digest(manifest["layout_id"], checksums) != manifest["digest"]:
            raise ValueError("its digest is not that of its checksums")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / MANIFEST}: {error!r}") from error
    return manifest


def file_checksum(path: Path) -> str:
    """xxh3-128 of a whole file."""
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_HASH_BYTES):
            hasher.update(block)
    return hasher.hexdigest()
