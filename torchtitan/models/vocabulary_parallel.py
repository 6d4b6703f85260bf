"""The head under tensor parallelism: every rank holds a part of the vocabulary, all get the same log-probs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torchtitan.distributed.placement import local_region
from torchtitan.models.logprob_head import KeptTokens, project


class VocabularyShard:
    """What LogProbHead does where its weight is sharded over `mesh` (one dimension) along the vocabulary."""

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh

    def __call__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor | None,
        temperature: float,
        kept: KeptTokens | None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the pack, hidden [N / ranks, H] -> plain tensors, equal on all ranks of the mesh.

        Without targets, logits [N, V]; with targets [n], n <= N, (log-probs [n], entropy [n]) of the first n rows.
        """
        assert isinstance(weight, DTensor)
        hidden = DTensor.from_local(hidden, self.mesh, [Shard(0)], run_check=False).redistribute(
            placements=[Replicate()]
        )
        # Every rank's gradient of the hidden states covers its own vocabulary only: they add up.
        rows = hidden.to_local(grad_placements=[Partial()])
        vocabulary = local_region(weight)[0]
        local_weight = weight.to_local()
        if targets is None:
            logits = project(rows, local_weight)
            shape = (len(rows), weight.shape[0])
            return DTensor.from_local(
                logits, self.mesh, [Shard(1)], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
            ).full_tensor()
        scaled = project(rows[: len(targets)], local_weight)
        if temperature != 1.0:
            scaled = scaled / temperature
        if kept is not None:
            scaled = kept.mask_(scaled, vocabulary.start)
        return _ShardedLogProbs.apply(scaled, targets - vocabulary.start, self.mesh.get_group())


class _ShardedLogProbs(torch.autograd.Function):
    """Log-prob of targets and entropy under a softmax whose columns are spread over the ranks of a group."""

    @staticmethod
    def forward(
        ctx: Any, scaled: torch.Tensor, columns: torch.Tensor, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inside = (columns >= 0) & (columns < scaled.shape[-1])
        columns = columns.clamp(0, scaled.shape[-1] - 1)
        largest = scaled.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        total = (scaled - largest[:, None]).exp().sum(-1)
        dist.all_reduce(total, group=group)
        log_normalizer = largest + total.log()
        probabilities = (scaled - log_normalizer[:, None]).exp()
        # A target that was cut off has log-prob -inf, which the sum over ranks must keep.
        chosen = torch.where(inside, scaled.gather(-1, columns[:, None]).squeeze(-1), 0.0)
        sums = torch.stack((chosen, torch.special.entr(probabilities).sum(-1)))
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(probabilities, columns, inside)
        entropy = sums[1].clone()
        ctx.mark_non_differentiable(entropy)
        return sums[0] - log_normalizer, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        probabilities, columns, inside = ctx.saved_tensors
        gradient = -probabilities * gradients[0][:, None]
        gradient.scatter_add_(-1, columns[:, None], (gradients[0] * inside)[:, None])
        return gradient, None, None
