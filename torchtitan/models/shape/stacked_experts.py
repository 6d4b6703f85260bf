"""Files of composites whose experts are stacked: all experts' gate and up in one tensor, and all their down in another.

Parameters, engines and weight synchronisation name each expert's matrices separately, as most families' files do. Here
is where each of them is in such files. Does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.errors import UserError
from torchtitan.models.shape.checkpoint_files import open_tensors

_MATRIX = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_STACK = re.compile(r".+\.layers\.\d+\.mlp\.experts\.gate_up_proj")


@dataclass(frozen=True)
class StackedMatrix:
    """Where an expert's matrix is in files."""

    name: str
    """Of the stacked tensor"""
    expert: int
    half: int | None
    """0 or 1: its rows are the first or second half of an entry; None: it is the entry"""


@dataclass(frozen=True)
class StackedExperts:
    """Stacks [expert, out, in], and if `transposed` [expert, in, out]."""

    transposed: bool

    def find(self, name: str) -> StackedMatrix | None:
        """Return where the tensor that is called so elsewhere is; None if it is not an expert's matrix."""
        found = _MATRIX.fullmatch(name)
        if found is None:
            return None
        experts, index, projection = found.groups()
        if projection == "down":
            return StackedMatrix(f"{experts}.down_proj", int(index), None)
        return StackedMatrix(f"{experts}.gate_up_proj", int(index), int(projection == "up"))

    def matrix_shape(self, matrix: StackedMatrix, stack: list[int]) -> list[int]:
        """Return the shape [out, in] of a matrix in a stack of this shape."""
        _, rows, columns = stack
        rows, columns = (columns, rows) if self.transposed else (rows, columns)
        return [rows if matrix.half is None else rows // 2, columns]

    def read(self, stored: Any, matrix: StackedMatrix, region: tuple[slice, ...]) -> Any:
        """Read a region of a matrix [out, in] from an open safetensors tensor, without the rest."""
        rows, columns = region
        first = (matrix.half or 0) * self.matrix_shape(matrix, stored.get_shape())[0]
        rows = slice(first + rows.start, first + rows.stop)
        entry = slice(matrix.expert, matrix.expert + 1)
        if self.transposed:
            return stored[entry, columns, rows][0].T
        return stored[entry, rows, columns][0]


def find_stacked_experts(files: Mapping[str, Path], hidden: int) -> StackedExperts | None:
    """Return how files with these tensors hold experts; None if none are stacked. hidden: the model's hidden size.

    Both directions occur: as published by Qwen3-VL, and as transformers writes the same model.
    """
    gate_up = next(filter(_STACK.fullmatch, files), None)
    if gate_up is None:
        return None
    _, rows, columns = _shape(files, gate_up)
    if rows != columns:
        return StackedExperts(transposed=columns != hidden)
    # An expert is half as wide as the hidden size, so this one is no square.
    return StackedExperts(transposed=_shape(files, gate_up.replace("gate_up_proj", "down_proj"))[1] != hidden)


def _shape(files: Mapping[str, Path], name: str) -> list[int]:
    """The shape of a stack in files. Raises UserError."""
    if name not in files:
        raise UserError(f"the safetensors lack {name}")
    shape = list(open_tensors(files[name], framework="numpy").get_slice(name).get_shape())
    if len(shape) != 3:
        raise UserError(f"{files[name]}: tensor {name} has shape {shape}, but a stack of experts has three dimensions")
    return shape
