"""Expert parallelism: every rank of a group has some of the experts, and tokens go where their experts are and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


class _AllToAll(torch.autograd.Function):
    """rows [R, H] -> rows [R', H]: sent[i] of them go to rank i, received[i] come from it; gradients go back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        got = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(got, rows.contiguous(), received, sent, group=group)
        return got

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _AllToAll.apply(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


class ExpertExchange:
    """Brings rows to the ranks of their experts; rank r of n has experts r · E / n to (r + 1) · E / n.

    A collective of the mesh, forward and backward: its ranks run equally many micro-batches.
    """

    def __init__(self, mesh: DeviceMesh):
        self._group, self._ranks = mesh.get_group(), mesh.size()

    def __call__(
        self, rows: torch.Tensor, counts: torch.Tensor, compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """rows [R, H] in the order of their experts, of which counts [E] rows each -> what compute makes of each row.

        compute(rows [R', H], their experts [R'] counted from this rank's first) -> like rows.
        """
        per_rank = len(counts) // self._ranks
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=self._group)
        # The one place where the device is waited for.
        sent, received = torch.stack((counts, coming)).view(2, self._ranks, -1).sum(-1).tolist()
        expert = torch.arange(per_rank, device=rows.device).repeat(self._ranks).repeat_interleave(coming)
        arrived = _AllToAll.apply(rows, sent, received, self._group)
        back: torch.Tensor = _AllToAll.apply(compute(arrived, expert), received, sent, self._group)
        return back
