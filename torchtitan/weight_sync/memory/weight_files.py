"""A version as safetensors files in a folder: what the disk transport writes, and how other programs read it.

    weights/latest                    -> the newest version's folder (a symbolic link, replaced atomically)
    weights/<epoch>/version-00000012/
        model.safetensors             one rank: plain full tensors under their Hugging Face names
        rank-00003.safetensors        several ranks: the shards of one; its metadata says where they belong
        manifest.json                 written last: epoch, version, digests, and a description of each file

    read_weights("weights/latest")    verifies and assembles all ranks' files (needs torch)

The data in a rank's file are the bytes of its slot. Only read_weights imports torch.
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
from torchtitan.weight_sync.memory.layout_tables import Box, ParameterEntry, ParameterTable, ShardTable
from torchtitan.weight_sync.memory.manifest import Layout, LayoutError, Manifest, check_coverage

if TYPE_CHECKING:
    import torch

MANIFEST = "manifest.json"
FORMAT = 3
_DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
# How often to resolve the folder again if its version is deleted while it is read.
_READ_ATTEMPTS = 5
_HASH_BYTES = 1 << 24


def file_name(rank: int, ranks: int) -> str:
    """Return the name of a rank's file. A single rank's file has the usual name of Hugging Face checkpoints."""
    return "model.safetensors" if ranks == 1 else f"rank-{rank:05d}.safetensors"


def version_folder(epoch: str, version: int) -> str:
    """Return a version's folder inside the weights folder."""
    return f"{epoch}/version-{version:08d}"


def version_of(folder: Path) -> int | None:
    """Return the version of such a folder of any epoch (run_dir.new_epoch); None if no job has made it."""
    found = re.fullmatch(r"e\d+-\w+/version-(\d{8,})", f"{folder.parent.name}/{folder.name}")
    return None if found is None else int(found[1])


def file_header(layout: Layout, metadata: dict[str, str]) -> bytes:
    """Return the start of a rank's file, which the slot follows. layout: this rank's only; metadata: extra entries
    beside those that say where the shards belong."""
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
    """Return what the files hold, as a layout with one rank per file."""
    numbers, table = {name: number for number, name in enumerate(parameters)}, ParameterTable.of(parameters.values())
    ranks = [ShardTable.of(table, ((numbers[name], box) for name, box in boxes.items())) for boxes in places]
    return Layout(max(1, *(rank.slot_bytes for rank in ranks)), table, tuple(ranks))


def _manifest(folder: Path) -> tuple[Manifest, list[dict[str, Any]]]:
    """Return the manifest, and its description of the files."""
    try:
        data = json.loads((folder / MANIFEST).read_text())
        manifest, files = Manifest.from_json(data), data["files"]
        if data["format"] != FORMAT or not 0 < len(files) == len(manifest.sheet_digests):
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
    """Return the xxh3-128 of a whole file."""
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_HASH_BYTES):
            hasher.update(block)
    return hasher.hexdigest()
