"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule") in chunks.

A head's state S [Dk, Dv] begins at 0 in every sequence. Token t decays it by exp(g), replaces a share beta of what is
stored under its key, and reads it with its query:

    S = exp(g_t) S + beta_t k_t (v_t - exp(g_t) S^T k_t)^T,    o_t = S^T q_t

Within a chunk the values that its tokens write follow from one triangular system (section 3.3 there), so only the
states at the beginnings of chunks are computed one after another. Chunks are counted from the beginning of their
sequence and contain tokens of one sequence only. A token's result depends on those before it in its chunk and on the
state at the chunk's beginning: on a CPU, whoever has these computes the same bits, whatever else is in the batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from torchtitan.models.layers.linear_scan import linear_scan, padded_steps
from torchtitan.models.shape.delta_args import CHUNK


class Terms(NamedTuple):
    """What a chunk's tokens do to the state, for chunks [N, heads]; C is the tokens of a chunk."""

    new: torch.Tensor
    """[..., C, Dv], the values that they write if the state is 0"""
    read: torch.Tensor
    """[..., C, Dk]: times the state, what is subtracted from these values"""
    key: torch.Tensor
    """[..., C, Dk], keys, decayed to the end of the chunk"""
    decay: torch.Tensor
    """[N, heads], by which the state decays over the chunk"""
    from_start: torch.Tensor
    """[..., C], decay from the beginning of the chunk to a token"""
    between: torch.Tensor
    """[..., C, C], decay from a token (column) to a later one (row)"""


def _by_heads(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """x [N, key heads, ...] times the factors [N, heads, ...] of the heads that share a key head, without copies of x:
    [N, heads, ...]."""
    return (x[:, :, None] * factor.unflatten(1, (x.shape[1], -1))).flatten(1, 2)


def chunk_terms(
    k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, ends: torch.Tensor | None = None
) -> Terms:
    """k [N, key heads, C, Dk], v [N, heads, C, Dv], g (logarithms of decays, at most 0) and beta [N, heads, C].

    ends: [N] bool, chunks behind which nothing is left of the state: it decays to 0, and so do their keys.
    """
    chunk = v.shape[2]
    total = g.cumsum(-1)
    from_start = total.exp()
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=g.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
    system = _by_heads(k @ k.mT, between) * beta[..., None]
    written = torch.cat((v, _by_heads(k, from_start[..., None])), -1) * beta[..., None]
    new, read = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True).split(
        (v.shape[-1], k.shape[-1]), -1
    )
    last = total[..., -1:]
    if ends is not None:
        last = last.masked_fill(ends[:, None, None], float("-inf"))
    key = _by_heads(k, (last - total).exp()[..., None])
    return Terms(new, read, key, last.exp().squeeze(-1), from_start, between)


def chunk_output(q: torch.Tensor, k: torch.Tensor, terms: Terms, state: torch.Tensor) -> torch.Tensor:
    """What queries q [N, key heads, C, Dk] read, with the state [N, heads, Dk, Dv] before each chunk: [N, heads, C,
    Dv]."""
    seen = _by_heads(q @ k.mT, terms.between)
    return _by_heads(q, terms.from_start[..., None]) @ state + seen @ (terms.new - terms.read @ state)


def next_state(
    state: torch.Tensor, new: torch.Tensor, read: torch.Tensor, key: torch.Tensor, decay: torch.Tensor
) -> torch.Tensor:
    """The state after a chunk; see Terms."""
    return state * decay[..., None, None] + key.mT @ (new - read @ state)


def _steps(first: torch.Tensor) -> list[torch.Tensor]:
    """For each step those chunks that have a next one, where first [sequences + 1] are the first chunks of all
    sequences, and the one behind the last."""
    count = first.diff()
    return [(first[:-1] + step)[count > step + 1] for step in range(int(count.max()) - 1)]


def few_launches(x: torch.Tensor) -> bool:
    """Whether a launch costs more than what it computes."""
    return x.is_cuda


def _scan(
    new: torch.Tensor,
    read: torch.Tensor,
    key: torch.Tensor,
    decay: torch.Tensor,
    initial: torch.Tensor | None,
    first: torch.Tensor,
) -> torch.Tensor:
    if few_launches(new):
        return scan_in_few_launches(new, read, key, decay, initial, first)
    states = new.new_zeros(*decay.shape, key.shape[-1], new.shape[-1])
    if initial is not None:
        states[first[:-1]] = initial
    for here in _steps(first):
        states[here + 1] = next_state(states[here], new[here], read[here], key[here], decay[here])
    return states


def _scan_backward(
    gradient: torch.Tensor,
    new: torch.Tensor,
    read: torch.Tensor,
    key: torch.Tensor,
    decay: torch.Tensor,
    states: torch.Tensor,
    first: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """With G the gradient of the state after a chunk and S the state before it: key G is that of what is written, and
    decay G - read^T key G comes back to S."""
    if few_launches(new):
        after = gradients_in_few_launches(gradient, read, key, decay)
        return _by_terms(after, new, read, key, states)
    by_state = gradient.clone()
    found = torch.zeros_like(new), torch.zeros_like(read), torch.zeros_like(key), torch.zeros_like(decay)
    for here in reversed(_steps(first)):
        after = by_state[here + 1]
        terms = _by_terms(after, new[here], read[here], key[here], states[here])
        for by_term, of_step in zip(found, terms, strict=True):
            by_term[here] = of_step
        by_state[here] += after * decay[here][..., None, None] - read[here].mT @ terms[0]
    return found


def _by_terms(
    after: torch.Tensor, new: torch.Tensor, read: torch.Tensor, key: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of new, read, key and decay from `after`, that of the state after each chunk."""
    written = key @ after
    return written, -(written @ state.mT), (new - read @ state) @ after.mT, (after * state).sum((-2, -1))


def _by_head(x: torch.Tensor) -> torch.Tensor:
    """[N, heads, ...] -> [heads, padded_steps(N), ...], with zeros behind."""
    count, steps = len(x), padded_steps(len(x))
    if count == steps:
        return x.transpose(0, 1).contiguous()
    rows = x.new_zeros(x.shape[1], steps, *x.shape[2:])
    rows[:, :count] = x.transpose(0, 1)
    return rows


def _transitions(read: torch.Tensor, key: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """What a chunk multiplies the state by, decay - key^T read: [heads, padded_steps(N), Dk, Dk]."""
    key, read = key.flatten(0, 1), read.flatten(0, 1)
    # With beta = 0 what it adds to is not read.
    a = torch.baddbmm(key.new_empty(()).expand(len(key), 1, 1), key.mT, read, beta=0, alpha=-1)
    a.diagonal(dim1=-2, dim2=-1).add_(decay.flatten()[:, None])
    return _by_head(a.view(*decay.shape, *a.shape[1:]))


def scan_in_few_launches(
    new: torch.Tensor,
    read: torch.Tensor,
    key: torch.Tensor,
    decay: torch.Tensor,
    initial: torch.Tensor | None,
    first: torch.Tensor,
) -> torch.Tensor:
    """The states of `_scan` for GPUs: all sequences are one chain of chunks, as a sequence's last chunk, whose key and
    decay are 0, hands on the next one's initial state and nothing else. Sums have another order than step by step, so
    bits differ."""
    b = torch.bmm(key.flatten(0, 1).mT, new.flatten(0, 1))
    b = _by_head(b.view(*decay.shape, *b.shape[1:]))
    start = None
    if initial is not None:
        start = initial[0]
        b[:, first[1:-1] - 1] = initial[1:].transpose(0, 1)
    states = linear_scan(_transitions(read, key, decay), b, start)[:, : len(decay)]
    return states.transpose(0, 1).contiguous()


def gradients_in_few_launches(
    gradient: torch.Tensor, read: torch.Tensor, key: torch.Tensor, decay: torch.Tensor
) -> torch.Tensor:
    """The gradient of the state after each chunk [N, heads, Dk, Dv]: the same chain from its end, with transposed
    transitions. A sequence's last chunk has the next sequence's, by which its key and decay would change: chunk_terms
    multiplies that by 0."""
    after = linear_scan(_transitions(key, read, decay), _by_head(gradient), backward=True)[:, : len(decay)]
    return after.transpose(0, 1).contiguous()


# The number of steps depends on the lengths of sequences: in a compiled graph the scan is one node. custom_op would
# import the compiler into every engine, see attention.py.
_library = torch.library.Library("torchtitan", "FRAGMENT")
_TERMS = "Tensor new, Tensor read, Tensor key, Tensor decay"
_library.define(f"delta_scan({_TERMS}, Tensor? initial, Tensor first) -> Tensor")
_library.define(
    f"delta_scan_backward(Tensor gradient, {_TERMS}, Tensor states, Tensor first) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.impl("delta_scan", _scan, "CompositeExplicitAutograd")
_library.impl("delta_scan_backward", _scan_backward, "CompositeExplicitAutograd")


def _shape(new: torch.Tensor, read: torch.Tensor, key: torch.Tensor, decay: torch.Tensor, *_: Any) -> torch.Tensor:
    return new.new_empty(*decay.shape, key.shape[-1], new.shape[-1])


def _backward_shapes(gradient: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:4])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *terms, _, first = inputs
    ctx.save_for_backward(*terms, output, first)


def _derive(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    found = torch.ops.torchtitan.delta_scan_backward(gradient.contiguous(), *ctx.saved_tensors)
    return (*found, None, None)


torch.library.register_fake("torchtitan::delta_scan", _shape, lib=_library)
torch.library.register_fake("torchtitan::delta_scan_backward", _backward_shapes, lib=_library)
torch.library.register_autograd("torchtitan::delta_scan", _derive, setup_context=_keep, lib=_library)


class ChunkPlaces(NamedTuple):
    """Where the tokens of a pack lie in chunks. Every sequence has one chunk more than it fills, so that the state
    after its last whole chunk is the state before another one."""

    position: torch.Tensor
    """[T], of each token in its sequence; tokens past the last sequence count as another one"""
    place: torch.Tensor
    """[T], chunk × tokens of a chunk + place in the chunk"""
    token: torch.Tensor
    """[N × tokens of a chunk], the token at each place, T if there is none"""
    first: torch.Tensor
    """[sequences + 1], the first chunk of each sequence, and the one behind the last"""
    ends: torch.Tensor
    """[N] bool, whether no chunk of the same sequence follows"""


def places_of(cumulative: torch.Tensor, tokens: int, chunk: int = CHUNK) -> ChunkPlaces:
    """Lay out a pack of `tokens` with sequences at offsets cumulative [sequences + 1]. Its shapes depend on the number
    of tokens and sequences only, for compiled graphs."""
    starts, every = cumulative.long(), torch.arange(tokens, device=cumulative.device)
    sequence = torch.searchsorted(starts[1:], every, right=True)
    first = F.pad((starts.diff() // chunk + 1).cumsum(0), (1, 0))
    position = every - starts[sequence]
    place = first[sequence] * chunk + position
    count = tokens // chunk + len(cumulative)
    if few_launches(cumulative):
        count = padded_steps(count)
    token = every.new_full((count * chunk,), tokens).index_copy(0, place, every)
    ends = (torch.arange(count, device=cumulative.device) >= first[-1]).index_fill(0, first[1:] - 1, True)
    return ChunkPlaces(position, place, token, first, ends)


class Chunked(NamedTuple):
    """A pack in chunks: the arguments of `chunk_terms`, and the state before every chunk."""

    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    states: torch.Tensor


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    places: ChunkPlaces,
    initial: torch.Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, Chunked]:
    """The gated delta rule of every sequence of a pack -> (its output [T, heads, Dv], what it was computed from).

    Args:
        q, k: [T, key heads, Dk], in at least fp32; each key head serves as many consecutive heads.
        v: [T, heads, Dv].
        g, beta: [T, heads].
        places: from `places_of` for this pack and chunk.
        initial: [sequences, heads, Dk, Dv], states that sequences begin with, without a gradient; None: 0.
    """

    operands = q, k, v, g, beta
    # Of all operands in one copy, behind which a row of zeros stands for places without a token.
    rows = F.pad(torch.cat([x.flatten(1) for x in operands], 1), (0, 0, 0, 1)).index_select(0, places.token)
    chunks = rows.unflatten(0, (-1, chunk)).split([x[0].numel() for x in operands], -1)
    q, k, v, g, beta = (
        part.unflatten(-1, x.shape[1:]).transpose(1, 2).contiguous() for part, x in zip(chunks, operands, strict=True)
    )
    terms = chunk_terms(k, v, g, beta, places.ends)
    states = torch.ops.torchtitan.delta_scan(*terms[:4], initial, places.first)
    out = chunk_output(q, k, terms, states)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, places.place), Chunked(k, v, g, beta, states)
