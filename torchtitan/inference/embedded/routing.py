"""Which experts the embedded engine's forwards have chosen, and the sequences that want to know it."""

from __future__ import annotations

import numpy as np
import torch

from torchtitan.inference.embedded.requests import Sequence
from torchtitan.inference.types import Routes
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

    def note(self, parts: list[tuple[Sequence, int, int]]) -> None:
        """Of the last forward: (sequence, first token, tokens) of what it computed, one after another."""
        if all(sequence.routes is None for sequence, _, _ in parts):
            return
        rows = self._rows(sum(tokens for _, _, tokens in parts))
        begin = 0
        for sequence, first, tokens in parts:
            if sequence.routes is not None:
                sequence.routes[first : first + tokens] = rows[begin : begin + tokens]
            begin += tokens

    def _rows(self, tokens: int) -> np.ndarray:
        rows = np.zeros((tokens, *self._shape), self._dtype)
        for layer, experts in self._chosen.items():
            rows[:, layer] = experts[:tokens].cpu().numpy()
        return rows


def known_rows(sequence: Sequence) -> np.ndarray | None:
    """Those of a sequence, where they are known from its first token on."""
    return sequence.routes if sequence.routes_from == 0 else None


def begin_rows(sequence: Sequence, rows: np.ndarray | None, tokens: int) -> None:
    """A sequence begins with so many tokens of another one, which has these rows; None: they are not known, so that
    what comes before the next one is left out of what is told."""
    if sequence.routes is None:
        return
    if rows is None:
        sequence.routes_from = max(sequence.routes_from, tokens)
    else:
        sequence.routes[:tokens] = rows[:tokens]


def told(sequence: Sequence, tokens: int) -> Routes | None:
    """The routes of a sequence that has ended with so many tokens."""
    if sequence.routes is None:
        return None
    first = min(sequence.routes_from, tokens - 1)
    return Routes(first, sequence.routes[first : tokens - 1].copy())
