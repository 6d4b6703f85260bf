"""What SGLang's own weight group is told, by the version that the server says it is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

# SGLang allocates what an order brings beside its weights; before 0.5.23 a flattened bucket twice.
BUCKET_BYTES = 256 * 2**20
# The oldest whose source was read for it: a bucket comes as one broadcast of bytes.
FLATTENED = (0, 5, 18)
# Since then weights are taken only between the beginning and the end of an update.
SESSIONS = (0, 5, 21)


class TransferDialect:
    """For a server that says it is `version`.

    flattened: it takes many parameters as one broadcast. sessions: an update has a beginning and an end.
    """

    def __init__(self, version: str):
        found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
        # Of what has no such number nothing is expected; SGLang refuses an update that lacks its beginning.
        numbers = tuple(int(part) for part in found.groups()) if found else (0, 0, 0)
        self.flattened = numbers >= FLATTENED
        self.sessions = numbers >= SESSIONS

    def update(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """/update_weights_from_distributed: these come, in this order, as `pieces` makes them."""
        body: dict[str, Any] = {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }
        return {**body, "load_format": "flattened_bucket"} if self.flattened else body

    def pieces(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """What is broadcast for that order: all bytes as one tensor, or every tensor by itself."""
        if not self.flattened:
            return list(tensors.values())
        return [torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors.values()])]


def buckets(tensors: Mapping[str, torch.Tensor], size: int = BUCKET_BYTES) -> Iterator[list[str]]:
    """Names in portions of at most `size` bytes, one at least.

    SGLang reads tensors where they lie in a bucket, without padding: one that would not be aligned begins another.
    """
    names: list[str] = []
    taken = 0
    for name, tensor in tensors.items():
        if names and (taken + tensor.nbytes > size or taken % tensor.dtype.itemsize):
            yield names
            names, taken = [], 0
        names.append(name)
        taken += tensor.nbytes
    if names:
        yield names
