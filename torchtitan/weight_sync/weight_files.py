"""A version as safetensors files in a folder: what the disk transport writes, and how anybody reads it.

    weights/latest                    -> the newest version's folder (a symbolic link, replaced in one step)
    weights/<epoch>/version-00000012/
        model.safetensors             one rank: plain full tensors, by their Hugging Face names
        rank-00003.safetensors        several ranks: each one's shards; where they belong is in the file's metadata
        manifest.json                 written last: epoch, version, checksums, digest, and what the files are

    read_weights("weights/latest")    all ranks' files, checked and put together (needs torch)

The data of a rank's file are the bytes of its slot. No torch is imported but by read_weights.
"""

from __future__ import annotations

import contextlib
import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from torchtitan.errors import UserError
from torchtitan.weight_sync.layout_tables import Box, ParameterEntry, ParameterTable, ShardTable
from torchtitan.weight_sync.manifest import Layout, LayoutError, Manifest, check_coverage

if TYPE_CHECKING:
    import torch

MANIFEST = "manifest.json"
LATEST = "latest"
FORMAT = 2
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


def file_header(layout: Layout, metadata: dict[str, str]) -> bytes:
    """The beginning of a rank's file, behind which its slot follows. layout: this rank's alone; `metadata` joins what
    says where the shards belong."""
    tensors: dict[str, Any] = {}
    offsets, shapes = {}, {}
    for shard in layout.ranks[0]:
        entry = layout.parameters[shard.parameter]
        about = {"dtype": _DTYPE_NAMES[entry.dtype], "shape": shard.shape}
        tensors[entry.name] = {**about, "data_offsets": [shard.byte_offset, shard.byte_end]}
        offsets[entry.name], shapes[entry.name] = shard.offset, entry.shape
    belongs = {"format": "pt", **metadata, "offsets": json.dumps(offsets), "shapes": json.dumps(shapes)}
    text = json.dumps({"__metadata__": belongs, **tensors}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


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
    return Weights(manifest.epoch, manifest.version, manifest.digest, tensors)


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
    numbers, table = {name: number for number, name in enumerate(parameters)}, ParameterTable.of(parameters.values())
    ranks = [ShardTable.of(table, ((numbers[name], box) for name, box in boxes.items())) for boxes in places]
    return Layout(max(1, *(rank.slot_bytes for rank in ranks)), table, tuple(ranks))


def _manifest(folder: Path) -> tuple[Manifest, list[dict[str, Any]]]:
    """What it says of the version and of its files."""
    try:
        data = json.loads((folder / MANIFEST).read_text())
        manifest, files = Manifest.from_json(data), data["files"]
        if data["format"] != FORMAT or not 0 < len(files) == len(manifest.checksums):
            raise ValueError("of another format, or not of all ranks")
        for file in files:
            if absent := {"file", "bytes", "xxh3_128"} - file.keys():
                raise ValueError(f"without {', '.join(sorted(absent))}")
            if Path(file["file"]).name != file["file"] or file["file"] in ("", ".."):
                raise ValueError(f"{file['file']!r} is not a file of this folder")
    except (ValueError, KeyError, TypeError, AttributeError, LayoutError) as error:
        raise UserError(f"{folder / MANIFEST}: {error!r}") from error
    return manifest, files


def file_checksum(path: Path) -> str:
    """xxh3-128 of a whole file."""
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_HASH_BYTES):
            hasher.update(block)
    return hasher.hexdigest()
