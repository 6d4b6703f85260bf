"""Expert parallelism: how a mixture of experts is laid out over the ranks, and how tokens get there and back.

Whole experts lie over `ep`, their rows or columns over `efsdp`. Under tensor parallelism the layers' tokens are already
shared out between its ranks (sequence parallelism): each routes its own, and experts are not cut any further. So
`efsdp` × `ep` are the ranks of dp_shard × tp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, PrepareModuleInput
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.models.decoder import Decoder
from torchtitan.models.moe import MoE


def mixtures(policy: Decoder) -> list[MoE]:
    """The layers' mixtures of experts."""
    return [layer.mlp for layer in policy.model.layers if isinstance(layer.mlp, MoE)]


def mixture_plan(plan: dict[str, ParallelStyle], mixture: MoE) -> dict[str, ParallelStyle]:
    """A dense layer's plan of tensor parallelism for one with this mixture: tokens stay shared out, but for the shared
    experts, which are cut as an ordinary feed-forward is."""
    result = {name: style for name, style in plan.items() if not name.startswith("mlp")}
    if mixture.shared_experts is not None:
        result |= {n.replace("mlp", "mlp.shared_experts"): s for n, s in plan.items() if n.startswith("mlp")}
    return result | {
        "mlp": PrepareModuleInput(
            input_layouts=(Shard(0), None), desired_input_layouts=(Shard(0), None), use_local_output=True
        ),
        "mlp.gate": SharedTokens(mixture),
    }


keep_choice = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.topk.default])
"""How a layer with a mixture is recomputed: with the experts that it had. A choice that differed for some rounding
would send other tokens to other ranks than those that wait for them."""


class SharedTokens(ParallelStyle):
    """Each rank routes its part of the pack; the router's weight is whole on all of them."""

    def __init__(self, mixture: MoE):
        self._mixture = mixture

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._mixture.part, self._mixture.parts = device_mesh.get_local_rank(), device_mesh.size()
        weight = module.get_parameter("weight").detach()
        module.register_parameter("weight", nn.Parameter(distribute_tensor(weight, device_mesh, [Replicate()])))
        return module


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


def apply_expert_parallelism(policy: Decoder, dims: ParallelDims, compiled: bool) -> None:
    """Give every rank of `ep`, which divide the experts, its share. compiled: layers will be, which the exchange has no
    part in."""
    for mixture in mixtures(policy):
        experts = mixture.experts
        for module in experts.modules():
            for name, stack in list(module.named_parameters(recurse=False)):
                part = distribute_tensor(stack.detach(), dims.expert_mesh["ep"], [Shard(0)])
                module.register_parameter(name, nn.Parameter(part))
        exchange = ExpertExchange(dims.expert_mesh["ep"])
        experts.exchange = torch.compiler.disable(exchange.__call__) if compiled else exchange


def shard_experts(policy: Decoder, dims: ParallelDims, reshard: bool, options: dict[str, Any]) -> None:
    """FSDP2 of the experts by themselves, over the ranks that have the same ones and other tokens."""
    names = ("dp_replicate", "efsdp") if dims.dp_replicate > 1 else ("efsdp",)
    # Ranks share out whole experts, or under expert parallelism rows, whose placement torch keeps apart from theirs.
    where = Shard(0) if dims.ep == 1 else Shard(1)
    for mixture in mixtures(policy):
        fully_shard(
            mixture.experts,
            reshard_after_forward=reshard,
            shard_placement_fn=lambda _: where,
            **{**options, "mesh": dims.expert_mesh[names]},
        )
