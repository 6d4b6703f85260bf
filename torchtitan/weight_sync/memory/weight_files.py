"""A version as safetensors files in a folder, as the disk transport writes it.

    weights/latest                    -> the newest version's folder (a symbolic link, replaced atomically)
    weights/<epoch>/version-00000012/
        model.safetensors             one rank: plain full tensors under their Hugging Face names
        rank-00003.safetensors        several ranks: the shards of one; its metadata says where they belong
        manifest.json                 written last: epoch, version, digests, and a description of each file

The data in a rank's file are the bytes of its slot. examples/version_folder.py reads all this. No torch.
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

from torchtitan.weight_sync.memory.manifest import Layout

MANIFEST = "manifest.json"
FORMAT = 3
DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


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
        about = {"dtype": DTYPE_NAMES[entry.dtype], "shape": shard.shape}
        tensors[entry.name] = {**about, "data_offsets": [shard.byte_offset, shard.byte_end]}
        offsets[entry.name], shapes[entry.name] = shard.offset, entry.shape
    belongs = {"format": "pt", **metadata, "offsets": json.dumps(offsets), "shapes": json.dumps(shapes)}
    text = json.dumps({"__metadata__": belongs, **tensors}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
