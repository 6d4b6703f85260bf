"""Which experts an engine had each token computed by: from its answer to what training repeats. No torch here."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class Routes:
    """Of the tokens of a prompt and its completion from number `first` on, but for the last, which nothing followed.

    experts: [tokens, layers, experts per token], uint8 or (for more than 256) uint16; layers without experts hold 0.
    """

    first: int
    experts: np.ndarray

    def to_json(self) -> dict[str, Any]:
        """Little-endian numbers as base64."""
        experts = np.ascontiguousarray(self.experts)
        data = base64.b64encode(experts.astype(experts.dtype.newbyteorder("<"), copy=False).tobytes()).decode()
        return {"first": self.first, "shape": list(experts.shape), "bytes": experts.itemsize, "experts": data}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Routes:
        """Raises ValueError, KeyError or TypeError for anything else."""
        dtype = {1: "<u1", 2: "<u2"}[data["bytes"]]
        experts = np.frombuffer(base64.b64decode(data["experts"], validate=True), dtype)
        return cls(int(data["first"]), experts.reshape(tuple(int(size) for size in data["shape"])))


def compact(experts: np.ndarray) -> np.ndarray:
    """In the smallest type that holds these numbers of experts. Raises ValueError where they are none."""
    if experts.size and not 0 <= int(experts.min()) <= int(experts.max()) < 1 << 16:
        raise ValueError(f"experts are numbered {int(experts.min())} to {int(experts.max())}")
    return experts.astype(np.uint8 if not experts.size or int(experts.max()) < 1 << 8 else np.uint16)


def check_routes(routes: Routes, tokens: int) -> None:
    """Raise ValueError unless these can be the routes of a prompt and completion of so many tokens."""
    shape = routes.experts.shape
    if len(shape) != 3 or not 0 <= routes.first <= tokens - 1 or shape[0] != tokens - 1 - routes.first:
        text = f"{list(shape)} numbers of experts from token {routes.first} on came for {tokens} tokens"
        raise ValueError(f"{text}: one row is needed for each but the last")
