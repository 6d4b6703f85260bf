"""One worker's tensors to all workers of a tensor-parallel group, one at a time. Runs inside vLLM.

Every rank makes the same collective calls whatever happens to it, so that one that fails leaves nobody waiting.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchtitan.inference.base_weights import outlines

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator

Tensors = Mapping[str, torch.Tensor]


class Spread:
    """The tensors of the group's first rank, on every rank: iterate over it once, on all ranks.

    group: vLLM's; tensors: on the first rank what is sent, or None where it has nothing to send and `error` says why.
    Elsewhere both are ignored. Raises RuntimeError on all ranks where the first has nothing.
    """

    def __init__(self, group: GroupCoordinator, device: torch.device, tensors: Tensors | None, error: str = ""):
        self._group, self._device = group, device
        self._first = group.rank_in_group == 0
        self._tensors = tensors if self._first else None
        header = {"error": error or "nothing to send"} if tensors is None else {"parameters": _described(tensors)}
        told = self._tell(header if self._first else None)
        if "error" in told:
            raise RuntimeError(told["error"])
        self._parameters: list[tuple[str, str, list[int]]] = told["parameters"]
        self._sent = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        while self._sent < len(self._parameters):
            name, dtype, shape = self._parameters[self._sent]
            self._sent += 1
            yield name, self._broadcast(name, dtype, shape)

    def drain(self) -> None:
        """Take part in what has not been iterated over."""
        for _ in self:
            pass

    def agree(self, error: str | None) -> str | None:
        """After all: the error of the first rank that has one, the same on all ranks."""
        if self._group.world_size == 1:
            return error
        failed = torch.tensor([self._group.rank_in_group if error else self._group.world_size], dtype=torch.int64)
        dist.all_reduce(failed, dist.ReduceOp.MIN, group=self._group.cpu_group)
        rank = int(failed.item())
        if rank == self._group.world_size:
            return None
        return error or f"rank {rank} of the tensor-parallel group failed"

    def _broadcast(self, name: str, dtype: str, shape: list[int]) -> torch.Tensor:
        if self._first:
            assert self._tensors is not None
            tensor = self._tensors[name]
            if self._group.world_size == 1:
                return tensor
            tensor = tensor.to(self._device).contiguous()
        else:
            # A new one for every parameter: the model's loader may hold on to it until its layer is complete.
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
        dist.broadcast(tensor, self._group.ranks[0], group=self._group.device_group)
        return tensor

    def _tell(self, header: dict[str, Any] | None) -> dict[str, Any]:
        if self._group.world_size == 1:
            assert header is not None
            return header
        source, group = self._group.ranks[0], self._group.cpu_group
        data = json.dumps(header).encode() if header is not None else b""
        size = torch.tensor([len(data)], dtype=torch.int64)
        dist.broadcast(size, source, group=group)
        payload = torch.empty(int(size.item()), dtype=torch.uint8)
        if header is not None:
            payload.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(payload, source, group=group)
        told: dict[str, Any] = json.loads(bytes(payload.tolist()))
        return told


def _described(tensors: Tensors) -> list[tuple[str, str, list[int]]]:
    return [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in outlines(tensors).items()]
