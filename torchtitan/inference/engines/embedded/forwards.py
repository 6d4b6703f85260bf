"""The engine's forwards over the trainer's decoder (prompts into rows of the cache, one more token for all rows, and
the trainer's own forward for the log-probs of what is finished), and the choice of every row's next token, with its
log-prob exactly as the trainer computes it.

Randomness is a function of (seed, sample, position) alone, so a request's completions do not depend on what runs beside
it. (Logits do, in their last bits, where a matrix kernel sums in another order for another batch size.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F

from torchtitan.inference.engines.embedded.cache import (
    DecodeAttention,
    ExtensionAttention,
    KeyValueCache,
    PrefillAttention,
)
from torchtitan.inference.types import Completion, SamplingParameters
from torchtitan.models.decoder import Decoder
from torchtitan.models.fused_projections import separate_projections
from torchtitan.models.head.logit_tiles import KeptTokens, exponentials_
from torchtitan.models.head.logprob_head import scale_logits
from torchtitan.models.layers.attention import PackedLayout
from torchtitan.models.layers.elementwise import RotaryTables, rotary_tables
from torchtitan.models.layers.mixture import MoE
from torchtitan.models.shape.mixture_args import MISSING

if TYPE_CHECKING:
    from torchtitan.inference.engines.embedded.sequences import Sequence

# Tokens of prompts in one forward, or of completions whose log-probs are computed anew: more take several forwards, so
# that none grows without bound.
FORWARD_TOKENS = 8192
Scored = tuple[list[int], Completion, float]
Item = TypeVar("Item")
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
# Truncation looks at so many likeliest tokens first, and sorts the whole vocabulary only where they do not suffice.
CANDIDATES = 1024
MAX_TOP_K = 2**31 - 1
# Neighbouring tokens whose probabilities are summed before one of them is drawn.
DRAWN_TOGETHER = 256


class SequencePart(NamedTuple):
    """Tokens of a sequence whose keys and values a forward adds to its row, which has those before `start`."""

    token_ids: np.ndarray
    """[tokens] int64, the whole sequence"""
    row: int
    start: int = 0

    @property
    def tokens(self) -> int:
        """How many are computed."""
        return len(self.token_ids) - self.start


def packs(items: Iterable[Item], tokens: Callable[[Item], int]) -> Iterator[list[Item]]:
    """The items in order, as many in a forward as are FORWARD_TOKENS, or one that is longer."""
    pack: list[Item] = []
    for item in items:
        if pack and sum(map(tokens, pack)) + tokens(item) > FORWARD_TOKENS:
            yield pack
            pack = []
        pack.append(item)
    if pack:
        yield pack


class Forwards:
    """Runs `policy` with `cache`, for sequences of at most `max_length` tokens."""

    def __init__(self, policy: Decoder, cache: KeyValueCache, max_length: int):
        self._policy, self._cache = policy, cache
        positions = torch.arange(max_length, device=cache.device)
        self._rotary_tables = rotary_tables(policy.args, positions, cache.dtype)

    def prompts(self, parts: list[SequencePart]) -> torch.Tensor:
        """Fill the cache rows of sequences in one packed forward -> logits after each [N, V].

        Either all of them are whole, or their rows hold something already.
        """
        cache = self._cache
        layout = PackedLayout([part.tokens for part in parts], cache.device)
        padding = cache.sizes.padding(layout.total)
        attention: PrefillAttention | ExtensionAttention
        positions = layout.positions
        if parts[0].start == 0:
            attention = PrefillAttention(cache, layout, [part.row for part in parts])
        else:
            ends = [(part.row, part.start, len(part.token_ids)) for part in parts]
            attention = ExtensionAttention(cache, ends, padding)
            starts = np.repeat([part.start for part in parts], layout.lengths)
            positions = positions + torch.from_numpy(starts).to(cache.device)
        token_ids = np.concatenate([part.token_ids[part.start :] for part in parts])
        positions = F.pad(positions, (0, padding))
        hidden = self._policy.model(
            F.pad(torch.from_numpy(token_ids).to(cache.device), (0, padding)),
            positions,
            attention,
            self._rotary(positions),
        )
        last = layout.cumulative[1:].long() - 1
        return self._policy.lm_head(hidden[F.pad(last, (0, cache.sizes.padding(len(last))))])[: len(parts)]

    def next_tokens(self, lengths: np.ndarray, last: np.ndarray, used: int) -> torch.Tensor:
        """Put the last token of every row into the cache -> logits after it [used, V].

        Args:
            lengths: tokens of each row, whole_rows(used) of them; those from `used` on are dummies of length 0.
            last: the tokens [whole_rows(used)].
        """
        positions = torch.from_numpy(lengths.copy()).to(self._cache.device)
        token_ids = torch.from_numpy(last).to(self._cache.device)
        attention = DecodeAttention(self._cache, positions, int(lengths[:used].max()) + 1)
        hidden = self._policy.model(token_ids, positions, attention, self._rotary(positions))
        return self._policy.lm_head(hidden)[:used]

    def _rotary(self, positions: torch.Tensor) -> list[RotaryTables]:
        return [(c.index_select(0, positions), s.index_select(0, positions)) for c, s in self._rotary_tables]


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


@torch.inference_mode()
def rescore(policy: Decoder, finished: list[Scored]) -> None:
    """Overwrite the log-probs of completions (prompt, completion, sampling temperature) with the trainer's."""
    by_temperature: dict[float, list[Scored]] = {}
    for scored in finished:
        by_temperature.setdefault(scored[2] or 1.0, []).append(scored)
    with separate_projections(policy):
        for temperature, group in by_temperature.items():
            for pack in packs(group, lambda scored: len(scored[0]) + len(scored[1].token_ids)):
                _rescore_pack(policy, pack, temperature)


def score(policy: Decoder, token_ids: list[int]) -> list[float]:
    """Log-probs at temperature 1 of all tokens but the first."""
    scored = Completion(token_ids[1:], [0.0] * (len(token_ids) - 1), "length", [])
    rescore(policy, [(token_ids[:1], scored, 1.0)])
    return scored.log_probs


@torch.inference_mode()
def likeliest(policy: Decoder, token_ids: list[int], count: int) -> list[tuple[list[int], list[float]]]:
    """Ids and log-probs at temperature 1 of the `count` likeliest tokens in the place of each but the first."""
    device = policy.lm_head.weight.device
    with separate_projections(policy):
        logits = policy(torch.tensor(token_ids[:-1], device=device), PackedLayout([len(token_ids) - 1], device))
    found = logits.float().log_softmax(-1).topk(min(count, logits.shape[-1]))
    return list(zip(found.indices.tolist(), found.values.tolist(), strict=True))


def _rescore_pack(policy: Decoder, pack: list[Scored], temperature: float) -> None:
    token_ids: list[int] = []
    targets: list[int] = []
    kept: list[list[int]] = []
    lengths: list[int] = []
    places: list[slice] = []
    for prompt, completion, _ in pack:
        sequence = prompt + completion.token_ids
        # Position t predicts token t + 1; the last predicts nothing.
        begin = len(token_ids) + len(prompt) - 1
        places.append(slice(begin, begin + len(completion.token_ids)))
        token_ids += sequence
        targets += [*sequence[1:], 0]
        lengths.append(len(sequence))
        kept += [[]] * (len(prompt) - 1)
        kept += completion.kept_token_ids or [[]] * len(completion.token_ids)
        kept.append([])
    device = policy.lm_head.weight.device
    log_probs, _ = policy(
        torch.tensor(token_ids, device=device),
        PackedLayout(lengths, device),
        torch.tensor(targets, device=device),
        temperature,
        KeptTokens.from_rows(kept, device),
        routes=_routes([completion for _, completion, _ in pack], lengths, device),
        entropy=False,
    )
    values = log_probs.cpu()
    for (_, completion, _), place in zip(pack, places, strict=True):
        completion.log_probs = values[place].tolist()


def _routes(completions: list[Completion], lengths: list[int], device: torch.device) -> torch.Tensor | None:
    """[T, layers, k]: the experts that the tokens were sampled with, as the trainer will have them."""
    known = [completion.routes for completion in completions if completion.routes is not None]
    if not known:
        return None
    rows = torch.full((sum(lengths), *known[0].experts.shape[1:]), MISSING, dtype=torch.int16)
    for completion, place in zip(completions, rows.split(lengths), strict=True):
        if completion.routes is not None:
            experts = torch.from_numpy(completion.routes.experts.astype("int16"))
            place[completion.routes.first : completion.routes.first + len(experts)] = experts
    return rows.to(device)


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


def draw(likely: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative distribution: weights [N, V] >= 0 and shares [N, 1] in [0, 1), float64 -> tokens [N, 1].

    First a block of tokens is drawn, by the sums of all blocks, then a token of it. Sums over several tokens are in
    float64, so that rare tokens keep their probability: over the whole vocabulary that takes as long as the head.
    """
    vocabulary = likely.shape[-1]
    grouped_end = vocabulary - vocabulary % DRAWN_TOGETHER
    parts = (
        likely[:, :grouped_end].unflatten(-1, (-1, DRAWN_TOGETHER)).sum(-1),
        likely[:, grouped_end:].sum(-1, keepdim=True),
    )
    sums = torch.cat(parts, -1).double()
    ends = sums.cumsum(-1)
    block, rest = _inverse(ends, shares * ends[:, -1:])
    places = block * DRAWN_TOGETHER + torch.arange(DRAWN_TOGETHER, device=likely.device)
    inside = likely.gather(-1, places.clamp(max=vocabulary - 1)).masked_fill(places >= vocabulary, 0.0)
    within = inside.cumsum(-1, dtype=torch.float64)
    # The block's sum has been rounded: what is left of the draw is a share of it.
    token, _ = _inverse(within, rest / sums.gather(-1, block) * within[:, -1:])
    return (block * DRAWN_TOGETHER + token).clamp(max=vocabulary - 1)


def _inverse(ends: torch.Tensor, drawn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the intervals with these ends [N, K] each draw [N, 1] falls into, and how far."""
    # Rounding must not lift a draw to the very end. NaN alone gets past it; the caller sees it in the log-prob.
    drawn = drawn.minimum(ends[:, -1:].nextafter(ends.new_zeros(())))
    found = torch.searchsorted(ends, drawn, right=True).clamp_(max=ends.shape[-1] - 1)
    before = torch.where(found > 0, ends.gather(-1, (found - 1).clamp(min=0)), 0.0)
    return found, drawn - before


@dataclass
class SampledTokens:
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
        greedy = [sampling.temperature == 0.0 for sampling in parameters]
        temperatures = [sampling.temperature or 1.0 for sampling in parameters]
        self._all_greedy = all(greedy)
        self._greedy = torch.tensor(greedy, device=device) if any(greedy) and not self._all_greedy else None
        self._temperature: float | torch.Tensor = temperatures[0]
        if any(temperature != temperatures[0] for temperature in temperatures):
            self._temperature = torch.tensor(temperatures, device=device)[:, None]
        truncated = [row for row, sampling in enumerate(parameters) if sampling.truncated]
        self._truncated = truncated
        if truncated:
            self._truncated_rows = torch.tensor(truncated, device=device)
            # Any integer may be asked for; truncation_mask clamps to the vocabulary, of which this is a bound.
            top_k = [min(parameters[row].top_k, MAX_TOP_K) for row in truncated]
            self._top_k = torch.tensor(top_k, device=device)
            self._top_p = torch.tensor([parameters[row].top_p for row in truncated], device=device)
            self._min_p = torch.tensor([parameters[row].min_p for row in truncated], device=device)

    def __call__(self, logits: torch.Tensor, positions: np.ndarray) -> SampledTokens:
        """logits [N, V], draw number of each row [N] -> the choice."""
        scaled = scale_logits(logits, self._temperature)
        kept: list[list[int]] | None = None
        if self._truncated:
            part = scaled[self._truncated_rows]
            keep = truncation_mask(part, self._top_k, self._top_p, self._min_p)
            scaled = scaled.index_copy(0, self._truncated_rows, part.masked_fill(~keep, float("-inf")))
            kept = [[] for _ in range(len(scaled))]
            keeps_all = keep.all(-1).tolist()
            for row, mask, everything in zip(self._truncated, keep, keeps_all, strict=True):
                kept[row] = [] if everything else mask.nonzero().squeeze(-1).tolist()
        likely = scaled.clone()
        maximum, total, _ = exponentials_(likely)
        if self._all_greedy:
            tokens = scaled.argmax(-1, keepdim=True)
        else:
            tokens = draw(likely, torch.from_numpy(uniforms(self._keys, positions)).to(self._device)[:, None])
            if self._greedy is not None:
                tokens = torch.where(self._greedy[:, None], scaled.argmax(-1, keepdim=True), tokens)
        # As the trainer's head puts it together (logit_tiles.py).
        chosen = scaled.gather(-1, tokens) - (maximum + total.log())[:, None]
        return SampledTokens(tokens.squeeze(-1).cpu().numpy(), chosen.squeeze(-1).cpu().numpy(), kept)
