"""Which tokens truncated sampling left to choose from: log-probs are normalised over those alone."""

from __future__ import annotations

import torch

CUT_OFF = -1e30
"""Logit of a token that was not kept: finite, so that 0 · logit is 0, and far below any real one"""


class KeptTokens:
    """Which tokens truncated sampling (top-p, top-k, min-p) left to choose from, per target.

    Args:
        offsets: [N + 1] int64; row i keeps token_ids[offsets[i]:offsets[i + 1]]; an empty row keeps all.
        token_ids: [sum of rows] int64.
    """

    def __init__(self, offsets: torch.Tensor, token_ids: torch.Tensor):
        self.offsets = offsets
        self.token_ids = token_ids

    @classmethod
    def from_rows(cls, rows: list[list[int]], device: torch.device | str = "cpu") -> KeptTokens | None:
        """One list of ids per target, an empty one keeps all; None where every row keeps all."""
        token_ids = [token for row in rows for token in row]
        if not token_ids:
            return None
        offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
        return cls(offsets.to(device), torch.tensor(token_ids, dtype=torch.int64, device=device))

    def part(self, rows: slice) -> KeptTokens:
        """Those of some targets."""
        return KeptTokens(self.offsets[rows.start : rows.stop + 1], self.token_ids)

    def cut_off_(self, logits: torch.Tensor, rows: slice, first: int = 0) -> torch.Tensor:
        """Set logits [r, c] of tokens that were not kept to CUT_OFF, in place.

        The tile holds the targets `rows`, and columns from token id `first` on.
        """
        offsets = self.offsets[rows.start : rows.stop + 1]
        counts = offsets.diff()
        ids = self.token_ids[offsets[0] : offsets[-1]] - first
        row = torch.arange(len(counts), device=logits.device).repeat_interleave(counts)
        inside = (ids >= 0) & (ids < logits.shape[-1])
        row, ids = row[inside], ids[inside]
        values = logits[row, ids]
        logits.masked_fill_((counts > 0)[:, None], CUT_OFF)
        logits[row, ids] = values
        return logits
