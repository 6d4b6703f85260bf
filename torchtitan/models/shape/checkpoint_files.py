"""The files of a checkpoint directory before anything is loaded: JSON, the names in safetensors files, digests.

Only reading tensors needs torch; their names and shapes do not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError, safe_open

from torchtitan.errors import UserError

INDEX_FILE = "model.safetensors.index.json"
# What git writes in place of a large file whose content was not fetched, see
# https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
GIT_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
# Elements that are read, widened and hashed at a time.
CHUNK = 1 << 20
# The most that the library reads as a header.
MAX_HEADER = 100_000_000
ELEMENT_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
# Types whose values float32 represents exactly.
WIDENED = ("BF16", "F16", "F32")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a checkpoint directory. Raises UserError."""
    refuse_pointer(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object")
    return value


def pointer_problem(path: Path) -> str | None:
    """Return what is wrong with a file that only names its content in Git LFS; None for other files."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(GIT_LFS_POINTER)) == GIT_LFS_POINTER
    except OSError:
        return None  # who reads it says why that fails
    if not is_pointer:
        return None
    return "it is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository, or download it again"


def refuse_pointer(path: Path) -> None:
    """Raise UserError for a file that only names its content in Git LFS."""
    if problem := pointer_problem(path):
        raise UserError(f"{path}: {problem}")


def tensor_files(directory: Path) -> dict[str, Path]:
    """Map each tensor's name to the file that holds it. Raises UserError."""
    index = directory / INDEX_FILE
    if index.is_file():
        refuse_pointer(index)
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise UserError(f"{index}: not a safetensors index ({type(error).__name__}: {error})") from error
        paths = [directory / name for name in names]
        if (alone := directory / "model.safetensors").is_file() and alone not in paths:
            # Some loaders read this file, others those of the index.
            raise UserError(f"{alone}: lies beside {INDEX_FILE}, which names others: remove what is not the model's")
    else:
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise UserError(f"{directory}: no *.safetensors files there (other weight formats are not supported)")
    files: dict[str, Path] = {}
    for path in paths:
        for name in _names_in(path):
            if files.setdefault(name, path) != path:
                raise UserError(f"{path}: has {name}, as {files[name].name} has: remove what is not the model's")
    return files


def _names_in(path: Path) -> list[str]:
    """The names of a safetensors file's tensors. Raises UserError.

    The library imports numpy to open a file, so it is asked only where the file is not plainly whole.
    """
    refuse_pointer(path)
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(size)) if size <= MAX_HEADER else None
            data_bytes = path.stat().st_size - 8 - size
    except (OSError, ValueError):
        entries = None
    if isinstance(entries, dict):
        entries.pop("__metadata__", None)
        if _fill(entries, data_bytes):
            return [*entries]
    with open_tensors(path, framework="numpy") as handle:
        return list(handle.keys())


def _fill(entries: dict[str, Any], data_bytes: int) -> bool:
    """Whether the tensors of a safetensors header lie one after another, and are all that follows it."""
    try:
        places = sorted(
            (*entry["data_offsets"], math.prod(entry["shape"]), entry["dtype"]) for entry in entries.values()
        )
        position = 0
        for begin, end, count, kind in places:
            if begin != position or end - begin != count * ELEMENT_BYTES[kind]:
                return False
            position = end
    except (TypeError, ValueError, KeyError):
        return False
    return position == data_bytes


def open_tensors(path: Path, framework: str = "pt") -> Any:
    """Memory-map a safetensors file, so that tensors are read on use. Raises UserError.

    framework: "pt" for tensors of torch; "numpy" where only names and shapes are read, which does not import torch.
    """
    refuse_pointer(path)
    try:
        return safe_open(path, framework=framework, device="cpu")
    except FileNotFoundError as error:
        raise UserError(f"{path}: file missing, though {path.parent / INDEX_FILE} names it") from error
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error})") from error


def is_redundant(name: str, tied: bool) -> bool:
    """Whether a tensor that some checkpoints carry follows from the rest. tied: head and embedding share a weight."""
    # Some composites have the head in their text model.
    is_head = name.removeprefix("language_model.") == "lm_head.weight"
    return name.endswith("rotary_emb.inv_freq") or (tied and is_head)


def tensor_digest(handle: Any, name: str) -> str:
    """Return the digest of a stored tensor's shape and of all its values, which are read through a memory map.

    bfloat16, float16 and float32 of the same values have the same digest.
    """
    stored = handle.get_slice(name)
    digest = xxhash.xxh3_128(repr(list(stored.get_shape())).encode())
    for chunk in _chunks(handle.get_tensor(name), stored.get_dtype()):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(tensor: Any, kind: str) -> Iterator[Any]:
    """Yield the values of a tensor as arrays of bytes or float32; each is valid until the next."""
    import torch

    flat = tensor.contiguous().view(-1)
    if kind not in WIDENED:
        yield flat.view(torch.uint8).numpy()
        return
    widened = torch.empty(min(CHUNK, len(flat)), dtype=torch.float32)
    for start in range(0, len(flat), CHUNK):
        part = flat[start : start + CHUNK]
        yield widened[: len(part)].copy_(part).numpy()


def fingerprint(directory: str | Path) -> str:
    """Return a digest of all tensors in the safetensors files of a directory: their names, shapes and values.

    How tensors are spread over files does not matter, nor their types as long as these are bfloat16, float16 or
    float32. Every byte is read, so a large model takes as long as the disk does (0.2 s for a billion parameters in
    bfloat16 that the system has cached). Returns "" if there are no tensors. Raises UserError.
    """
    if not any(Path(directory).glob("*.safetensors")):
        return ""
    files = tensor_files(Path(directory))
    handles = {path: open_tensors(path) for path in set(files.values())}
    digests = {name: tensor_digest(handles[path], name) for name, path in sorted(files.items())}
    return str(xxhash.xxh3_128_hexdigest(json.dumps(digests).encode()))
