"""Choosing the next token of every row, and its log-prob exactly as the trainer computes it.

Randomness is a function of (seed, sample, position) alone, so a request's completions do not depend on what runs beside
it. (Logits do, in their last bits, where a matrix kernel sums in another order for another batch size.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from torchtitan.inference.types import SamplingParameters
from torchtitan.models.logit_tiles import exponentials_
from torchtitan.models.logprob_head import scale_logits

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
# Truncation looks at so many likeliest tokens first, and sorts the whole vocabulary only where they do not suffice.
CANDIDATES = 1024
MOST_TOP_K = 2**31 - 1


def _mix(state: np.ndarray) -> np.ndarray:
    """The output function of splitmix64: [N] uint64 -> [N] uint64, every input bit reaches every output bit."""
    state = (state ^ (state >> _SHIFTS[0])) * _MULTIPLIERS[0]
    state = (state ^ (state >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return state ^ (state >> _SHIFTS[2])


def stream_keys(seed: int, samples: int) -> np.ndarray:
    """[samples] uint64: the start of each sample's stream of a request seeded with `seed` (any integer)."""
    root = _mix(np.array([seed % 2**64], dtype=np.uint64) + _STEP)
    return _mix(root + _STEP * np.arange(1, samples + 1, dtype=np.uint64))


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[N] float64 in [0, 1): draw number positions[i] of stream keys[i]."""
    bits = _mix(keys + _STEP * (positions.astype(np.uint64) + np.uint64(1)))
    # 52 bits: times any total, the product then stays below that total.
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def truncation_mask(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Which tokens truncated sampling keeps: bool [N, V] for logits [N, V] (already divided by the temperature).

    top_k first; then top_p over what it left, renormalised: the fewest likeliest tokens that together reach top_p;
    then min_p: tokens at least min_p times as likely as the likeliest. Parameters are [N]; 0, 1 and 0 turn them off.
    The likeliest token is always kept.
    """
    vocabulary = scaled.shape[-1]
    limit = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary)[:, None]
    keep = scaled >= scaled.amax(-1, keepdim=True) + min_p.log()[:, None]
    sorting = (limit < vocabulary) | (top_p < 1.0)[:, None]
    if not sorting.any():
        return keep
    width = min(vocabulary, CANDIDATES)
    while True:
        values, order = scaled.topk(width, dim=-1)
        inside = torch.arange(width, device=scaled.device) < limit
        # Where top_k is on and fits, only its tokens count; else the whole vocabulary does.
        total = torch.where(
            limit <= width,
            values.masked_fill(~inside, float("-inf")).logsumexp(-1, keepdim=True),
            scaled.logsumexp(-1, keepdim=True),
        )
        probabilities = (values - total).exp().masked_fill(~inside, 0.0)
        reached = probabilities.cumsum(-1, dtype=torch.float64)
        chosen = inside & ((reached - probabilities < top_p[:, None]) | (top_p >= 1.0)[:, None])
        chosen[:, 0] = True
        nucleus_inside = (limit == vocabulary) & (reached[:, -1:] >= top_p[:, None])
        enough = ~sorting | (limit <= width) | nucleus_inside
        if width == vocabulary or bool(enough.all()):
            break
        width = vocabulary
    sorted_keep = torch.zeros_like(keep).scatter_(-1, order, chosen)
    return keep & (sorted_keep | ~sorting)


@dataclass
class Choice:
    """One token per row: token_ids [N] int64, log_probs [N] float32, and per row the kept ids (empty list: all)."""

    token_ids: np.ndarray
    log_probs: np.ndarray
    kept: list[list[int]] | None


class BatchSampler:
    """Samples for a fixed set of rows; built anew when the set changes.

    Args:
        parameters: of each row.
        keys: [N] uint64, stream of each row.
    """

    def __init__(self, parameters: list[SamplingParameters], keys: np.ndarray, device: torch.device):
        self._keys, self._device = keys, device
        # Greedy log-probs are those at temperature 1, over all tokens.
        greedy = [one.temperature == 0.0 for one in parameters]
        temperatures = [one.temperature or 1.0 for one in parameters]
        self._all_greedy = all(greedy)
        self._greedy = torch.tensor(greedy, device=device) if any(greedy) and not self._all_greedy else None
        self._temperature: float | torch.Tensor = temperatures[0]
        if any(one != temperatures[0] for one in temperatures):
            self._temperature = torch.tensor(temperatures, device=device)[:, None]
        truncated = [row for row, one in enumerate(parameters) if one.truncated]
        self._truncated = truncated
        if truncated:
            self._truncated_rows = torch.tensor(truncated, device=device)
            # Any integer may be asked for; truncation_mask clamps to the vocabulary, of which this is a bound.
            top_k = [min(parameters[row].top_k, MOST_TOP_K) for row in truncated]
            self._top_k = torch.tensor(top_k, device=device)
            self._top_p = torch.tensor([parameters[row].top_p for row in truncated], device=device)
            self._min_p = torch.tensor([parameters[row].min_p for row in truncated], device=device)

    def __call__(self, logits: torch.Tensor, positions: np.ndarray) -> Choice:
        """logits [N, V], draw number of each row [N] -> the choice."""
        scaled = scale_logits(logits, self._temperature)
        kept: list[list[int]] | None = None
        if self._truncated:
            part = scaled[self._truncated_rows]
            keep = truncation_mask(part, self._top_k, self._top_p, self._min_p)
            scaled = scaled.index_copy(0, self._truncated_rows, part.masked_fill(~keep, float("-inf")))
            kept = [[] for _ in range(len(scaled))]
            whole = keep.all(-1).tolist()
            for row, mask, everything in zip(self._truncated, keep, whole, strict=True):
                kept[row] = [] if everything else mask.nonzero().squeeze(-1).tolist()
        likely = scaled.clone()
        maximum, total, _ = exponentials_(likely)
        if self._all_greedy:
            tokens = scaled.argmax(-1, keepdim=True)
        else:
            # Inverse of the cumulative distribution, in float64 so that rare tokens keep their probability.
            cumulative = likely.cumsum(-1, dtype=torch.float64)
            draw = torch.from_numpy(uniforms(self._keys, positions)).to(self._device)[:, None]
            tokens = torch.searchsorted(cumulative, draw * cumulative[:, -1:], right=True)
            # Only NaN gets past the end; the caller sees it in the log-prob.
            tokens.clamp_(max=logits.shape[-1] - 1)
            if self._greedy is not None:
                tokens = torch.where(self._greedy[:, None], scaled.argmax(-1, keepdim=True), tokens)
        # As the trainer's head puts it together (logit_tiles.py).
        chosen = scaled.gather(-1, tokens) - (maximum + total.log())[:, None]
        return Choice(tokens.squeeze(-1).cpu().numpy(), chosen.squeeze(-1).cpu().numpy(), kept)
