"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule") in chunks.

A head's state S [Dk, Dv] begins at 0 in every sequence. Token t decays it by exp(g), replaces a share beta of what is
stored under its key, and reads it with its query:

    S = exp(g_t) S + beta_t k_t (v_t - exp(g_t) S^T k_t)^T,    o_t = S^T q_t

Within a chunk the values that its tokens write follow from one triangular system (section 3.3 there), so only the
states at the beginnings of chunks are computed one after another. Chunks are counted from the beginning of their
sequence and contain tokens of one sequence only. A token's result depends on those before it in its chunk and on the
state at the chunk's beginning: whoever has these computes the same bits, whatever else is in the batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

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
    total: torch.Tensor
    """[..., C], logarithm of the decay from the beginning of the chunk"""
    between: torch.Tensor
    """[..., C, C], decay from a token (column) to a later one (row)"""


def _spread(x: torch.Tensor, heads: int) -> torch.Tensor:
    """x [N, key heads, ...] for each of the heads that share a key head: [N, heads, ...]."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def chunk_terms(k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> Terms:
    """k [N, key heads, C, Dk], v [N, heads, C, Dv], g (logarithms of decays, at most 0) and beta [N, heads, C]."""
    heads, chunk = v.shape[1:3]
    total = g.cumsum(-1)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=g.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
    keys = _spread(k, heads)
    system = _spread(k @ k.mT, heads) * between * beta[..., None]
    written = torch.cat((v, keys * total.exp()[..., None]), -1) * beta[..., None]
    new, read = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True).split(
        (v.shape[-1], k.shape[-1]), -1
    )
    last = total[..., -1:]
    return Terms(new, read, keys * (last - total).exp()[..., None], last.exp().squeeze(-1), total, between)


def chunk_output(q: torch.Tensor, k: torch.Tensor, terms: Terms, state: torch.Tensor) -> torch.Tensor:
    """What queries q [N, key heads, C, Dk] read, with the state [N, heads, Dk, Dv] before each chunk: [N, heads, C,
    Dv]."""
    heads = state.shape[1]
    seen = _spread(q @ k.mT, heads) * terms.between
    return (_spread(q, heads) * terms.total.exp()[..., None]) @ state + seen @ (terms.new - terms.read @ state)


def next_state(
    state: torch.Tensor, new: torch.Tensor, read: torch.Tensor, key: torch.Tensor, decay: torch.Tensor
) -> torch.Tensor:
    """The state after a chunk; see Terms."""
    return state * decay[..., None, None] + key.mT @ (new - read @ state)


def _steps(bounds: torch.Tensor, chunk: int, device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The first chunk of every sequence, and for each step those chunks that have a next one."""
    count = bounds.diff() // chunk + 1
    first = F.pad(count.cumsum(0), (1, 0))[:-1]
    steps = [(first + step)[count > step + 1].to(device) for step in range(int(count.max()) - 1)]
    return first.to(device), steps


def _scan(
    new: torch.Tensor,
    read: torch.Tensor,
    key: torch.Tensor,
    decay: torch.Tensor,
    initial: torch.Tensor | None,
    bounds: torch.Tensor,
    chunk: int,
) -> torch.Tensor:
    first, steps = _steps(bounds, chunk, new.device)
    states = new.new_zeros(*decay.shape, key.shape[-1], new.shape[-1])
    if initial is not None:
        states[first] = initial
    for here in steps:
        states[here + 1] = next_state(states[here], new[here], read[here], key[here], decay[here])
    return states


def _scan_backward(
    gradient: torch.Tensor,
    new: torch.Tensor,
    read: torch.Tensor,
    key: torch.Tensor,
    decay: torch.Tensor,
    states: torch.Tensor,
    bounds: torch.Tensor,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """With G the gradient of the state after a chunk and S the state before it: key G is that of what is written, and
    decay G - read^T key G comes back to S."""
    by_state = gradient.clone()
    by_new, by_read, by_key, by_decay = (torch.zeros_like(x) for x in (new, read, key, decay))
    for here in reversed(_steps(bounds, chunk, new.device)[1]):
        after, state = by_state[here + 1], states[here]
        written = key[here] @ after
        by_new[here] = written
        by_read[here] = -(written @ state.mT)
        by_key[here] = (new[here] - read[here] @ state) @ after.mT
        by_decay[here] = (after * state).sum((-2, -1))
        by_state[here] += after * decay[here][..., None, None] - read[here].mT @ written
    return by_new, by_read, by_key, by_decay


# The number of steps depends on the lengths of sequences: in a compiled graph the scan is one node. custom_op would
# import the compiler into every engine, see attention.py.
_library = torch.library.Library("torchtitan", "FRAGMENT")
_TERMS = "Tensor new, Tensor read, Tensor key, Tensor decay"
_library.define(f"delta_scan({_TERMS}, Tensor? initial, Tensor bounds, int chunk) -> Tensor")
_library.define(
    f"delta_scan_backward(Tensor gradient, {_TERMS}, Tensor states, Tensor bounds, int chunk) -> "
    "(Tensor, Tensor, Tensor, Tensor)"
)
_library.impl("delta_scan", _scan, "CompositeExplicitAutograd")
_library.impl("delta_scan_backward", _scan_backward, "CompositeExplicitAutograd")


def _shape(new: torch.Tensor, read: torch.Tensor, key: torch.Tensor, decay: torch.Tensor, *_: Any) -> torch.Tensor:
    return new.new_empty(*decay.shape, key.shape[-1], new.shape[-1])


def _backward_shapes(gradient: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:4])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *terms, _, bounds, ctx.chunk = inputs
    ctx.save_for_backward(*terms, output, bounds)


def _derive(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    found = torch.ops.torchtitan.delta_scan_backward(gradient.contiguous(), *ctx.saved_tensors, ctx.chunk)
    return (*found, None, None, None)


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


def places_of(cumulative: torch.Tensor, tokens: int, chunk: int = CHUNK) -> ChunkPlaces:
    """Lay out a pack of `tokens` with sequences at offsets cumulative [sequences + 1]. Its shapes depend on the number
    of tokens and sequences only, for compiled graphs."""
    starts, every = cumulative.long(), torch.arange(tokens, device=cumulative.device)
    sequence = torch.searchsorted(starts[1:], every, right=True)
    first = F.pad((starts.diff() // chunk + 1).cumsum(0), (1, 0))
    position = every - starts[sequence]
    place = first[sequence] * chunk + position
    count = tokens // chunk + len(cumulative)
    return ChunkPlaces(position, place, every.new_full((count * chunk,), tokens).index_copy(0, place, every))


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
    bounds: torch.Tensor,
    initial: torch.Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, Chunked]:
    """The gated delta rule of every sequence of a pack -> (its output [T, heads, Dv], what it was computed from).

    Args:
        q, k: [T, key heads, Dk], in at least fp32; each key head serves as many consecutive heads.
        v: [T, heads, Dv].
        g, beta: [T, heads].
        places: from `places_of` for this pack and chunk.
        bounds: [sequences + 1] int64 on the host, offsets of the sequences.
        initial: [sequences, heads, Dk, Dv], states that sequences begin with, without a gradient; None: 0.
    """

    def chunked(x: torch.Tensor) -> torch.Tensor:
        rows = F.pad(x, (0,) * (2 * x.dim() - 1) + (1,)).index_select(0, places.token)
        return rows.unflatten(0, (-1, chunk)).transpose(1, 2).contiguous()

    q, k, v, g, beta = (chunked(x) for x in (q, k, v, g, beta))
    terms = chunk_terms(k, v, g, beta)
    states = torch.ops.torchtitan.delta_scan(*terms[:4], initial, bounds, chunk)
    out = chunk_output(q, k, terms, states)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, places.place), Chunked(k, v, g, beta, states)
