"""A tile of whole rows of logits on a GPU: log-probs, entropy and gradients in the fewest operators that torch has.

On a GPU a tile is tens of milliseconds of work that memory bandwidth bounds, and every operator that makes a tensor of
its own is one more sweep over it. Each operator here writes into one of two buffers that are there already.
"""

from __future__ import annotations

import torch

from torchtitan.models.kept_tokens import CUT_OFF


class WholeRows:
    """Works on logits [r, V] of up to `rows` rows, beside which it holds one more buffer of their size.

    dtype: of the matrix products that the gradients go into.
    """

    def __init__(self, rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device):
        self._beside = torch.empty(rows * vocabulary, device=device)
        self._gradients = self._beside.view(dtype)
        self._minus_one = torch.full((rows, 1), -1.0, device=device)

    def normalize_(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        log_probs: torch.Tensor,
        entropy: torch.Tensor | None,
        truncated: bool,
    ) -> None:
        """Turn logits [r, V] into probabilities; writes log_probs [r] of targets [r], and entropy [r] where given.

        truncated: logits hold CUT_OFF for tokens that were not kept; the log-prob of such a target is -inf.
        """
        beside = self._beside[: logits.numel()].view_as(logits)
        torch.log_softmax(logits, -1, out=beside)
        torch.gather(beside, -1, targets[:, None], out=log_probs[:, None])
        if truncated:
            log_probs.masked_fill_(log_probs <= CUT_OFF / 2, -torch.inf)
        torch.exp(beside, out=logits)
        if entropy is not None:
            torch.special.entr(logits, out=beside)
            torch.sum(beside, -1, out=entropy)

    def gradients(self, probabilities: torch.Tensor, targets: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """factor_r · (p_rj - [j = target_r]), [r, V], rounded once; uses probabilities [r, V] up. factor [r]."""
        probabilities.scatter_add_(-1, targets[:, None], self._minus_one[: len(targets)])
        result = self._gradients[: probabilities.numel()].view_as(probabilities)
        return torch.mul(probabilities, factor[:, None], out=result)
