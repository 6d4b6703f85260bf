"""The language-model head: log-probs and entropy of target tokens from hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from torchtitan.models.vocabulary_parallel import VocabularyShard


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

    def mask_(self, logits: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Set logits [N, V] of tokens that were not kept to -inf (out of place, differentiable).

        `first` is the token id of the first column, where the logits are a part of the vocabulary.
        """
        counts = self.offsets.diff()
        keep = (counts == 0)[:, None].expand_as(logits).clone()
        rows = torch.arange(len(counts), device=logits.device).repeat_interleave(counts)
        columns = self.token_ids - first
        inside = (columns >= 0) & (columns < logits.shape[-1])
        keep[rows[inside], columns[inside]] = True
        return logits.masked_fill(~keep, float("-inf"))


def scale_logits(logits: torch.Tensor, temperature: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Logits [N, V] in fp32, divided by the temperature (a number, or [N, 1])."""
    scaled = logits.float()
    if isinstance(temperature, torch.Tensor) or temperature != 1.0:
        scaled = scaled / temperature
    return scaled


def project(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Logits [N, V] in fp32 from hidden [N, H] and weight [V, H] of any type.

    Rounding logits to bfloat16 was measured to cost 2.7 % gradient error, so products are summed in fp32.
    """
    return F.linear(hidden.float(), weight.float())


def log_probs_of_logits(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0, kept: KeptTokens | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of targets [N] and entropy [N], both fp32, under softmax(logits [N, V] / temperature).

    The one definition for trainer and engine: behaviour and policy log-probs must agree.
    """
    scaled = scale_logits(logits, temperature)
    if kept is not None:
        scaled = kept.mask_(scaled)
    log_probs = torch.log_softmax(scaled, dim=-1)
    # Not gather and squeeze: FSDP warns about outputs that are views.
    chosen = -F.nll_loss(log_probs, targets, reduction="none")
    with torch.no_grad():
        entropy = torch.special.entr(log_probs.exp()).sum(-1)
    return chosen, entropy


class LogProbHead(nn.Module):
    """Projects hidden states to the vocabulary and reduces them to what the objective needs.

    A module of its own so that FSDP2 gathers its weight like any other and a fused head can take its place.
    """

    def __init__(self, hidden_size: int, vocab_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        # Set where tensor parallelism shards the vocabulary.
        self.shard: VocabularyShard | None = None

    def forward(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor | None = None,
        temperature: float = 1.0,
        kept: KeptTokens | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """hidden [N, H] -> logits [N, V] without targets; with targets [N], (log-probs [N], entropy [N]) in fp32."""
        if self.shard is not None:
            return self.shard(hidden, self.weight, targets, temperature, kept)
        logits = project(hidden, self.weight)
        if targets is None:
            return logits
        return log_probs_of_logits(logits, targets, temperature, kept)
