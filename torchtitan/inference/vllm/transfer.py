"""What vLLM's own weight transfer is told, by the version that the server says it is. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

# vLLM holds as many buffers of this size beside its weights.
BUFFER_BYTES, BUFFERS = 128 * 2**20, 2
PACKING = {"packed": True, "packed_buffer_size_bytes": BUFFER_BYTES, "packed_num_buffers": BUFFERS}
# Since then the group is told once how its bytes are packed; before, every update was.
PACKED_BY_GROUP = (0, 24)
# Since then an update has a beginning and an end.
FOUR_PHASES = (0, 22)


class Outline(Protocol):
    """A tensor as far as the two sides have to agree on it."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> object: ...

    @property
    def nbytes(self) -> int: ...


class TransferDialect:
    """For a server that says it is `version`. Raises ValueError where that is too old."""

    def __init__(self, version: str):
        found = re.match(r"(\d+)\.(\d+)", version)
        # What has no number was built by somebody, from what is newest.
        numbers = (int(found[1]), int(found[2])) if found else PACKED_BY_GROUP
        if numbers < FOUR_PHASES:
            raise ValueError(f"vLLM {version} updates weights in another way: take 0.22 or later, or another route")
        self._by_group = numbers >= PACKED_BY_GROUP

    def init(self, meeting: Mapping[str, Any], workers: int) -> dict[str, Any]:
        """/init_weight_transfer_engine: the group of rank 0 and `workers` workers, who meet as `meeting` says."""
        body = {**meeting, "rank_offset": 1, "world_size": workers + 1}
        return {"init_info": body | PACKING if self._by_group else body}

    def update(self, tensors: Mapping[str, Outline]) -> dict[str, Any]:
        """/update_weights: these come, in this order."""
        body: dict[str, Any] = {
            "names": list(tensors),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }
        return {"update_info": body if self._by_group else body | PACKING}


def chunks(tensors: Mapping[str, Outline], size: int = BUFFER_BYTES) -> Iterator[list[str]]:
    """Names whose bytes travel as one, as vLLM cuts them: the tensor that makes it more than `size` is the last."""
    names: list[str] = []
    taken = 0
    for name, tensor in tensors.items():
        names.append(name)
        taken += tensor.nbytes
        if taken > size:
            yield names
            names, taken = [], 0
    if names:
        yield names
