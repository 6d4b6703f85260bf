"""The safetensors of a Hugging Face checkpoint directory: which file holds which tensor. No model here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from torchtitan.errors import UserError

INDEX_FILE = "model.safetensors.index.json"


def tensor_files(directory: Path) -> dict[str, Path]:
    """Which file holds which tensor. Raises UserError."""
    index = directory / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise UserError(f"{index}: not a safetensors index ({type(error).__name__}: {error})") from error
        paths = [directory / name for name in names]
    else:
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise UserError(f"{directory}: no *.safetensors files there (other weight formats are not supported)")
    files: dict[str, Path] = {}
    for path in paths:
        with open_tensors(path) as handle:
            files.update(dict.fromkeys(handle.keys(), path))
    return files


def open_tensors(path: Path) -> Any:
    """A safetensors file, mapped: tensors are read where they are used. Raises UserError."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise UserError(f"{path}: file missing, though {path.parent / INDEX_FILE} names it") from error
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error})") from error


def is_redundant(name: str, tied: bool) -> bool:
    """Tensors that some checkpoints carry and that follow from the rest. tied: head and embedding are one."""
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")
