"""What the metrics say of a batch: sums over its tokens, reduced over the ranks once, and the figures made of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchtitan.distributed.collectives import all_reduce_sum
from torchtitan.distributed.placement import ParallelDims
from torchtitan.grpo.loss import MicroBatchLoss, k3
from torchtitan.inference.types import sampled_tokens
from torchtitan.trainer.mismatch import ActorFigures
from torchtitan.trainer.packing import MicroBatch

SUMS = ("loss", "tokens", "entropy", "clip/low", "clip/high", "masked", "ratio", "reference_kl", "compared")
MISMATCH_SUMS = ("mismatch", "mismatch_tokens", "same_version", "same_version_tokens", "drift", "drift_tokens")
OBSERVED_SUMS = ("observation", "observed")
ALL_SUMS = (*SUMS, *MISMATCH_SUMS, *OBSERVED_SUMS, "replayed", "routed", "computed", "inputs", "operations")
LARGEST = ("ratio", "mismatch")
# Figures that only some runs have: name, its sum, and what it is divided by.
MEANS_OF_SOME_RUNS = (
    ("reference_kl", "reference_kl", "compared"),
    ("observation/loss", "observation", "observed"),
    ("routing/replayed_share", "replayed", "routed"),
)


class BatchTotals:
    """Sums and largest values over active tokens, reduced over the ranks once per batch."""

    def __init__(self, device: torch.device, actors: Sequence[str] = ()):
        self.actor_figures: dict[str, ActorFigures] = {}
        """Known once the sums are reduced"""
        self._actors = actors
        # One more for tokens that are judged with none.
        self._of_actors = torch.zeros(2, len(actors) + 1, device=device, dtype=torch.float64)
        self.sums = {name: torch.zeros((), device=device, dtype=torch.float64) for name in ALL_SUMS}
        self.largest = {name: torch.zeros((), device=device, dtype=torch.float64) for name in LARGEST}

    def add(self, loss: torch.Tensor, loss_of: MicroBatchLoss, copies: int) -> None:
        """copies: how many context-parallel ranks add the same."""
        self.sums["loss"] += loss / copies
        for name, value in loss_of.sums.items():
            self.sums[name] += value / copies
        self._raise_largest("ratio", loss_of.ratio_max)

    def add_observations(self, cross_entropy: torch.Tensor, count: int) -> None:
        """Sum of -log π over so many tokens that environments wrote."""
        self.sums["observation"] += cross_entropy
        self.sums["observed"] += count

    def add_mismatch(self, log_probs: torch.Tensor, micro_batch: MicroBatch, moved: bool = False) -> None:
        """moved: the policy has taken optimizer steps of this batch, so it is no version that has sampled."""
        # What is logged of the batch shows them beside the engine's; they stay on the device until then.
        lengths = [sampled_tokens([branch]) for branch in micro_batch.trained]
        for branch, of_branch in zip(micro_batch.trained, log_probs.split(lengths), strict=True):
            branch.trainer_log_probs = of_branch
        # KL(μ ‖ π), estimated from samples of μ.
        divergence = k3(micro_batch.behaviour_log_probs, log_probs)
        same = micro_batch.same_version & (not moved)
        if len(divergence):
            self._raise_largest("mismatch", divergence.max())
        self.sums["mismatch"] += divergence.sum()
        self.sums["mismatch_tokens"] += len(divergence)
        # Picking them by an index would wait for the device.
        self.sums["same_version"] += torch.where(same, divergence, 0.0).sum()
        self.sums["same_version_tokens"] += same.sum()
        if self._actors and not moved:
            differences = (micro_batch.behaviour_log_probs - log_probs).double().abs()
            self._of_actors.index_add_(1, micro_batch.actors, torch.stack((differences, torch.ones_like(differences))))

    def add_packs(self, packs: list[MicroBatch], operations: float) -> None:
        """What is computed, for how many tokens, and how much of it with the experts of the engine."""
        self.sums["operations"] += operations
        for micro_batch in packs:
            self.sums["computed"] += micro_batch.layout.total
            self.sums["inputs"] += micro_batch.inputs
            self.sums["replayed"] += micro_batch.routed[0]
            self.sums["routed"] += micro_batch.routed[1]

    def add_drift(self, old: torch.Tensor, log_probs: torch.Tensor) -> None:
        """How far all optimizer steps of the batch but the last have moved the policy."""
        divergence = k3(old, log_probs)
        self.sums["drift"] += divergence.sum()
        self.sums["drift_tokens"] += len(divergence)

    def _raise_largest(self, name: str, value: torch.Tensor) -> None:
        self.largest[name] = torch.maximum(self.largest[name], value.double())

    def _judge(self, reduced: torch.Tensor, copies: int) -> None:
        """reduced: the sums over all ranks, of which so many hold the same."""
        differences, tokens = reduced.view(2, -1).tolist()
        for actor, difference, count in zip(self._actors, differences, tokens, strict=False):
            if count:
                self.actor_figures[actor] = ActorFigures(difference / count, round(count / copies))

    def _mean_difference(self) -> float | None:
        """Over the tokens of all actors; None where none can be judged."""
        difference = tokens = 0.0
        for actor in self.actor_figures.values():
            difference += actor.difference * actor.tokens
            tokens += actor.tokens
        return difference / tokens if tokens else None

    def reduce(self, dims: ParallelDims, optimizer_steps: int) -> dict[str, float | None]:
        # Each rank has a place of its own for its largest values, so that one sum carries them, too.
        places = torch.zeros(dims.world_size, len(LARGEST), device=self.largest[LARGEST[0]].device, dtype=torch.float64)
        places[dims.rank] = torch.stack(list(self.largest.values()))
        rank_figures = torch.stack(list(self.sums.values())), places.flatten(), self._of_actors.flatten()
        packed = all_reduce_sum(torch.cat(rank_figures))
        # Tensor-parallel ranks hold the same sums: each counts its share. So do context-parallel ones of what they
        # have gathered.
        copies = {name: dims.tp if name in SUMS else dims.tp * dims.cp for name in self.sums}
        sums = {name: value / copies[name] for name, value in zip(self.sums, packed.tolist(), strict=False)}
        by_rank = packed[len(self.sums) : len(self.sums) + places.numel()].unflatten(0, places.shape)
        self._judge(packed[len(self.sums) + places.numel() :], dims.tp * dims.cp)
        largest = dict(zip(LARGEST, by_rank.amax(0).tolist(), strict=True))
        tokens = max(sums["tokens"], 1.0)
        same, drifted = sums["same_version_tokens"], sums["drift_tokens"]
        # The last forward has seen all steps but one; a divergence grows with the square of the way.
        whole_way = (optimizer_steps / max(optimizer_steps - 1, 1)) ** 2
        figures: dict[str, float | None] = {
            "loss": sums["loss"] / optimizer_steps,
            "entropy": sums["entropy"] / tokens,
            "clip/low_fraction": sums["clip/low"] / tokens,
            "clip/high_fraction": sums["clip/high"] / tokens,
            "masked_fraction": sums["masked"] / tokens,
            "ratio/mean": sums["ratio"] / tokens,
            "ratio/max": largest["ratio"],
            "mismatch_kl": sums["mismatch"] / max(sums["mismatch_tokens"], 1.0),
            "mismatch_kl/max": largest["mismatch"],
            "mismatch_kl/same_version": sums["same_version"] / same if same else None,
            "mismatch_kl/nats": self._mean_difference(),
            "mismatch_kl/drift": whole_way * sums["drift"] / drifted if drifted else None,
            "trained_tokens": sums["tokens"] / optimizer_steps,
            "computed_tokens": sums["computed"],
            "computed_share": sums["computed"] / max(sums["inputs"], 1.0),
            "operations": sums["operations"],
        }
        for name, total, count in MEANS_OF_SOME_RUNS:
            if sums[count]:
                figures[name] = sums[total] / sums[count]
        return figures
