"""Which experts the embedded engine's forwards have chosen, and the sequences that want to know it."""

from __future__ import annotations

import numpy as np
import torch

from torchtitan.inference.embedded.requests import Sequence
from torchtitan.inference.routes import Routes
from torchtitan.models.decoder import Decoder
from torchtitan.models.moe import MoE


class RouteRecorder:
    """Listens to all mixtures of a policy. Rows: [tokens, layers, experts per token], 0 in layers without experts."""

    def __init__(self, policy: Decoder):
        args = policy.args
        assert args.experts is not None
        self._shape = (args.num_hidden_layers, args.experts.per_token)
        self._dtype = np.uint8 if args.experts.count <= 1 << 8 else np.uint16
        self._chosen: dict[int, torch.Tensor] = {}
        for layer in policy.model.layers:
            if isinstance(layer.mlp, MoE):
                layer.mlp.record = self._chosen.__setitem__

    def begin(self, sequence: Sequence, tokens: int) -> None:
        """Make room for the rows of a sequence of at most so many tokens."""
        sequence.routes = np.zeros((tokens, *self._shape), self._dtype)

    def rows(self, tokens: int) -> np.ndarray:
        """What the last forward has chosen for its first `tokens` tokens."""
        rows = np.zeros((tokens, *self._shape), self._dtype)
        for layer, experts in self._chosen.items():
            rows[:, layer] = experts[:tokens].cpu().numpy()
        return rows


def write_rows(sequence: Sequence, first: int, rows: np.ndarray | None) -> None:
    """Note the rows of a sequence's tokens from number `first` on; None: nobody knows, so what comes before the next
    known one is left out of what is told."""
    if sequence.routes is None:
        return
    if rows is None:
        sequence.routes_from = max(sequence.routes_from, first)
    else:
        sequence.routes[first : first + len(rows)] = rows


def told(sequence: Sequence, tokens: int) -> Routes | None:
    """The routes of a sequence that has ended with so many tokens."""
    if sequence.routes is None:
        return None
    first = min(sequence.routes_from, tokens - 1)
    return Routes(first, sequence.routes[first : tokens - 1].copy())
