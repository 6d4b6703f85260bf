"""The head under tensor parallelism: every rank holds a part of the vocabulary, all get the same log-probs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torchtitan.distributed.placement import local_region
from torchtitan.models.logprob_head import VocabularyPart


class VocabularyShard:
    """Between LogProbHead's sharded tensors and plain ones: its weight is sharded over `mesh` along the vocabulary."""

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh

    @property
    def group(self) -> dist.ProcessGroup:
        """Ranks that hold the parts of the vocabulary."""
        return self.mesh.get_group()

    def part(self, weight: torch.Tensor) -> VocabularyPart:
        """This rank's rows of weight [V, H]."""
        assert isinstance(weight, DTensor)
        ranks, total = self.mesh.size(), weight.shape[0]
        return VocabularyPart(local_region(weight)[0].start, total, -(-total // ranks))

    def local(self, hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's tokens [N / ranks, H] -> all of them [N, H], and this rank's rows of the weight."""
        assert isinstance(weight, DTensor)
        gathered = DTensor.from_local(hidden, self.mesh, [Shard(0)], run_check=False).redistribute(
            placements=[Replicate()]
        )
        # Every rank's gradient of the hidden states covers its own vocabulary only: they add up.
        return gathered.to_local(grad_placements=[Partial()]), weight.to_local()

    def whole(self, logits: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """This rank's columns of the logits -> [N, V]."""
        shape = torch.Size((len(logits), weight.shape[0]))
        columns = DTensor.from_local(logits, self.mesh, [Shard(1)], run_check=False, shape=shape, stride=(shape[1], 1))
        return columns.full_tensor()
