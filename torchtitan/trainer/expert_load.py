"""Balance without an auxiliary loss (Wang et al. 2024): the router's bias, which helps to choose experts and does not
weigh them, moves towards those with less than their share of the tokens."""

from __future__ import annotations

import functools

import torch

from torchtitan.distributed.collectives import all_reduce_sum
from torchtitan.models.decoder import Decoder
from torchtitan.models.moe import MoE


class ExpertLoad:
    """Counts the experts of all forwards of a policy whose routers have biases.

    rate: how far a bias moves in a step.
    """

    def __init__(self, policy: Decoder, rate: float):
        self._rate = rate
        self._mixtures = [layer.mlp for layer in policy.model.layers if isinstance(layer.mlp, MoE)]
        self._loads: dict[int, torch.Tensor] = {}
        for mixture in self._mixtures:
            mixture.record = functools.partial(self._count, mixture.gate.args.count)

    def _count(self, experts: int, layer: int, chosen: torch.Tensor) -> None:
        # A layer that is recomputed counts twice, as all of its tokens do: only shares matter.
        chosen = chosen.flatten()
        load = torch.zeros(experts, device=chosen.device).scatter_add_(0, chosen, torch.ones_like(chosen).float())
        self._loads[layer] = self._loads[layer] + load if layer in self._loads else load

    @torch.no_grad()
    def step(self) -> None:
        """After an optimizer step: b ← b + rate · sign(mean load - load). A collective."""
        loads = all_reduce_sum(torch.stack([self._loads[mixture.index] for mixture in self._mixtures]))
        for mixture, load in zip(self._mixtures, loads, strict=True):
            bias = mixture.gate.e_score_correction_bias
            assert bias is not None
            bias += self._rate * (load.mean() - load).sign()
        self._loads.clear()
