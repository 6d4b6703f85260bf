"""Causal attention of packed sequences as one operator on tensors, so that it is a node of compiled graphs.

A pack is one row of tokens [T] that holds whole sequences one after another. Projections run over the row, so they
compute no padding; attention runs per sequence. The operator chooses torch's variable-length flash attention on GPUs in
half precision, torch's flash attention over buckets of sequences on CPUs, and otherwise plain products for one block of
queries at a time. None of them holds a score for every pair of tokens. The backward recomputes probabilities from the
sums that the forward kept.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from torchtitan.models.batch_invariance import KEY_BLOCK, key_length, padded_length

# A bucket takes sequences down to this share of its longest, so at most a quarter of its rows is padding (plus
# rounding).
BUCKET_FILL = 0.75
# The sum of a padding query: no key has a probability under it, whatever its score.
NO_QUERY = 1e30


class Buckets:
    """The mapping between a pack [T, heads, D] and buckets of sequences of similar length.

    A key head and its query heads are treated as a separate sequence: a bucket is [sequences × key heads, width, ...],
    so that keys need no copy per query head. Padding lies to the right of a sequence, where causality hides it from
    every real token.
    """

    def __init__(self, lengths: tuple[int, ...], heads: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        self.total, self.heads = sum(lengths), heads
        self.widths: list[tuple[int, int, int]] = []
        """(sequences × key heads, queries of each, keys of each) per bucket"""
        size = torch.tensor(lengths)
        offsets = F.pad(size.cumsum(0), (1, 0))
        order = size.argsort(descending=True, stable=True).tolist()
        queries, keys = _Rows(size, offsets, heads), _Rows(size, offsets, heads)
        start = 0
        while start < len(order):
            longest = lengths[order[start]]
            end = start
            while end < len(order) and lengths[order[end]] >= BUCKET_FILL * longest:
                end += 1
            members, width = torch.tensor(order[start:end]), padded_length(longest)
            further = key_length(width, head_dim, dtype, device)
            self.widths.append((len(members) * heads, width, further))
            queries.add(members, width)
            keys.add(members, further)
            start = end
        self.queries, self.keys = queries.done(device), keys.done(device)

    def split(self, x: torch.Tensor, padding: float | None = None) -> list[torch.Tensor]:
        """x [T or more, heads of q, ...] -> [sequences × key heads, query heads of each, width, ...] of each bucket.

        padding: the value of padding; None: it is undefined.
        """
        rows = x.unflatten(1, (self.heads, -1)).flatten(0, 1).index_select(0, self.queries.tokens)
        if padding is not None:
            rows.index_fill_(0, self.queries.padding, padding)
        parts = rows.split([count * width for count, width, _ in self.widths])
        return [
            part.unflatten(0, (count, width)).transpose(1, 2)
            for part, (count, width, _) in zip(parts, self.widths, strict=True)
        ]

    def split_keys(self, x: torch.Tensor, repeats: int) -> list[torch.Tensor]:
        """x [T or more, key heads, D] -> [sequences × key heads, repeats, keys, D] of each bucket, without copies."""
        rows = x.flatten(0, 1).index_select(0, self.keys.tokens)
        parts = rows.split([count * width for count, _, width in self.widths])
        return [
            part.unflatten(0, (count, 1, width)).expand(-1, repeats, -1, -1)
            for part, (count, _, width) in zip(parts, self.widths, strict=True)
        ]

    def join(self, parts: list[torch.Tensor], rows: int, of_keys: bool = False) -> torch.Tensor:
        """Invert `split`: [sequences × key heads, width, ...] to `rows` rows; those past the last token are 0."""
        flat = [part.flatten(0, 1) for part in parts]
        places = self.keys.places if of_keys else self.queries.places
        joint = (torch.cat(flat) if len(flat) > 1 else flat[0]).index_select(0, places)
        joint = joint.unflatten(0, (self.total, self.heads))
        return _padded(joint if of_keys else joint.flatten(1, 2), rows)


class _Rows:
    """Index tensors between rows (token, key head) and the places of all buckets in sequence."""

    def __init__(self, size: torch.Tensor, offsets: torch.Tensor, heads: int):
        self.size, self.offsets, self.heads, self.base = size, offsets, heads, 0
        self.tokens = self.padding = torch.empty(0, dtype=torch.int64)
        """The row of each place (any row for padding), and the places that are padding"""
        self.places = torch.empty(int(size.sum()) * heads, dtype=torch.int64)
        """The place of each row"""

    def add(self, members: torch.Tensor, width: int) -> None:
        column = torch.arange(width)
        inside = (column < self.size[members][:, None])[:, None].expand(-1, self.heads, -1)
        token = (self.offsets[members][:, None, None] + column) * self.heads + torch.arange(self.heads)[:, None]
        token = torch.where(inside, token, 0)
        place = self.base + torch.arange(token.numel()).view(token.shape)
        self.places[token[inside]] = place[inside]
        self.tokens = torch.cat((self.tokens, token.flatten()))
        self.padding = torch.cat((self.padding, place[~inside]))
        self.base += token.numel()

    def done(self, device: torch.device) -> _Rows:
        self.tokens, self.padding, self.places = (x.to(device) for x in (self.tokens, self.padding, self.places))
        return self


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    return F.pad(x, (0,) * (2 * x.dim() - 1) + (rows - len(x),)) if len(x) < rows else x


@functools.lru_cache(maxsize=16)
def _buckets(
    lengths: tuple[int, ...], heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, threads: int
) -> Buckets:
    # All layers of a pack request the same buckets. Suitable key lengths may depend on the number of threads.
    return Buckets(lengths, heads, head_dim, dtype, device)


def _pieces(length: int, keys: int, window: int, block: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, with the keys that they may attend to. Those begin at multiples of KEY_BLOCK, like the
    kernels' own blocks, so that a token's sums do not depend on its place in its block of queries."""
    for start in range(0, length, block):
        end = min(start + block, length)
        first = max(0, start - window + 1) // KEY_BLOCK * KEY_BLOCK if window else 0
        yield slice(start, end), slice(first, keys if end == length else end)


def _mask(rows: slice, columns: slice, window: int, like: torch.Tensor) -> torch.Tensor:
    """The addend for scores [rows, keys]: 0 where a query attends to a key, -inf elsewhere."""
    back = torch.arange(rows.start, rows.stop, device=like.device)[:, None]
    back = back - torch.arange(columns.start, columns.stop, device=like.device)
    seen = (back >= 0) & (back < window) if window else back >= 0
    return torch.zeros((), dtype=like.dtype, device=like.device).where(seen, -math.inf)


def _scores(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores [..., L, keys], and with a soft cap its slope."""
    scores = (q @ k.transpose(-2, -1)) * scale
    slope = None
    if softcap:
        bent = (scores / softcap).tanh_()
        slope = 1 - bent * bent
        scores = bent.mul_(softcap)
    return scores + mask, slope


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _flash_on_cpu(q: torch.Tensor, softcap: float) -> bool:
    return q.device.type == "cpu" and not softcap


def attend_masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, heads, L, D], k and v [B, heads, keys, D], mask (added to scores) broadcast to [B, heads, L, keys] ->
    (attention like q, log Σ e^score [B, heads, L] in fp32 or wider). No gradients."""
    if _flash_on_cpu(q, softcap):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)
    scores, _ = _scores(_wide(q), _wide(k), mask, scale, softcap)
    total = scores.logsumexp(-1)
    return ((scores - total[..., None]).exp_() @ _wide(v)).to(q.dtype), total


def with_sinks(out: torch.Tensor, total: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add one more key with score sinks [heads] and value 0 to attention out [..., heads, D] with sums total [...,
    heads] (gpt-oss)."""
    joint = torch.logaddexp(total, sinks.to(total.dtype))
    return out * (total - joint).exp()[..., None].to(out.dtype), joint


def _sequences_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole sequences: q [S, heads, L, D], k and v [S, heads, keys >= L, D] -> (like q, sums [S, heads, L])."""
    length, keys = q.shape[2], k.shape[2]
    if _flash_on_cpu(q, softcap) and not window:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    done = [
        attend_masked(
            q[:, :, rows], k[:, :, columns], v[:, :, columns], _mask(rows, columns, window, q), scale, softcap
        )
        for rows, columns in _pieces(length, keys, window, KEY_BLOCK)
    ]
    if len(done) == 1:
        return done[0]
    return torch.cat([out for out, _ in done], 2), torch.cat([total for _, total in done], 2)


def _sequences_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    window: int,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients with respect to q, k and v of `_sequences_forward`."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    on_cpu = _flash_on_cpu(q, softcap)
    if on_cpu and not window:
        return flash(gradient, q, k, v, out, total, 0.0, True, scale=scale)
    by_q, by_k, by_v = torch.empty_like(q), k.new_zeros(k.shape), v.new_zeros(v.shape)
    for rows, columns in _pieces(q.shape[2], k.shape[2], window, KEY_BLOCK):
        mask = _mask(rows, columns, window, q)
        g, q_, o, t = (x[:, :, rows] for x in (gradient, q, out, total))
        k_, v_ = k[:, :, columns], v[:, :, columns]
        if on_cpu:
            of_q, of_k, of_v = flash(g, q_, k_, v_, o, t, 0.0, False, attn_mask=mask, scale=scale)
        else:
            g, q_, k_, v_, o = (_wide(x) for x in (g, q_, k_, v_, o))
            scores, slope = _scores(q_, k_, mask, scale, softcap)
            weights = (scores - t[..., None]).exp_()
            by_scores = weights * (g @ v_.transpose(-2, -1) - (g * o).sum(-1, keepdim=True))
            if slope is not None:
                by_scores *= slope
            by_scores *= scale
            of_q, of_k, of_v = by_scores @ k_, by_scores.transpose(-2, -1) @ q_, weights.transpose(-2, -1) @ g
        by_q[:, :, rows] = of_q
        by_k[:, :, columns] += of_k
        by_v[:, :, columns] += of_v
    return by_q, by_k, by_v


def uses_varlen_flash(q: torch.Tensor, softcap: float = 0.0) -> bool:
    """Whether flash attention handles the pack directly: CUDA since Ampere, half precision, head sizes in steps of 8 up
    to 256, no soft cap."""
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16) or softcap:
        return False
    return q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _window_options(window: int, scale: float) -> dict[str, Any]:
    return {"scale": scale, "window_size_left": window - 1 if window else -1, "window_size_right": 0}


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    cumulative: torch.Tensor,
    bounds: torch.Tensor,
    window: int,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = tuple(bounds.diff().tolist())
    if uses_varlen_flash(q, softcap):
        used, longest = sum(lengths), max(lengths)
        out, total, *_ = torch.ops.aten._flash_attention_forward(
            *(x[:used] for x in (q, k, v)),
            *(cumulative, cumulative, longest, longest, 0.0, not window, False),
            **_window_options(window, scale),
        )
        out, total = _padded(out, len(q)), _padded(total.t().contiguous(), len(q))
    else:
        buckets, parts = _operands(lengths, q, k, v)
        done = [_sequences_forward(*part, window, scale, softcap) for part in parts]
        out = buckets.join([one.transpose(1, 2) for one, _ in done], len(q))
        total = buckets.join([one.transpose(1, 2) for _, one in done], len(q))
    return (out, total) if sinks is None else with_sinks(out, total, sinks)


_Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _operands(
    lengths: tuple[int, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[Buckets, list[_Operands]]:
    """The buckets, and q, k and v of each."""
    heads, repeats = k.shape[1], q.shape[1] // k.shape[1]
    buckets = _buckets(lengths, heads, q.shape[2], q.dtype, q.device, torch.get_num_threads())
    parts = zip(buckets.split(q), buckets.split_keys(k, repeats), buckets.split_keys(v, repeats), strict=True)
    return buckets, list(parts)


def _buckets_backward(
    gradient: torch.Tensor,
    buckets: Buckets,
    parts: list[_Operands],
    done: list[tuple[torch.Tensor, torch.Tensor]],
    window: int,
    scale: float,
    softcap: float,
) -> Iterator[torch.Tensor]:
    """Gradients with respect to q, k and v, from each bucket's inputs and outputs."""
    found: list[list[torch.Tensor]] = [[], [], []]
    for g, part, (out, total) in zip(buckets.split(gradient, 0.0), parts, done, strict=True):
        of_q, of_k, of_v = _sequences_backward(g, *part, out, total, window, scale, softcap)
        found[0].append(of_q.transpose(1, 2))
        found[1].append(of_k.sum(1))
        found[2].append(of_v.sum(1))
    return (buckets.join(one, len(gradient), of_keys=one is not found[0]) for one in found)


class _InBuckets(torch.autograd.Function):
    """The operator outside compiled graphs, where it can keep its buckets for the backward instead of rebuilding them:
    (q, k, v, lengths, window, scale, softcap) -> out."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lengths: tuple[int, ...],
        *settings: Any,
    ) -> torch.Tensor:
        ctx.buckets, parts = _operands(lengths, q, k, v)
        done = [_sequences_forward(*part, *settings) for part in parts]
        ctx.settings = settings
        ctx.save_for_backward(*(x for part, pair in zip(parts, done, strict=True) for x in (*part, *pair)))
        return ctx.buckets.join([one.transpose(1, 2) for one, _ in done], len(q))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        saved = ctx.saved_tensors
        groups = [saved[place : place + 5] for place in range(0, len(saved), 5)]
        parts, done = [group[:3] for group in groups], [group[3:] for group in groups]
        return (*_buckets_backward(gradient, ctx.buckets, parts, done, *ctx.settings), None, None, None, None)


def _backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    total: torch.Tensor,
    cumulative: torch.Tensor,
    bounds: torch.Tensor,
    window: int,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """If out and total include the sinks, the same kernels give the gradients with sinks."""
    lengths = tuple(bounds.diff().tolist())
    if uses_varlen_flash(q, softcap):
        used, longest = sum(lengths), max(lengths)
        # The kernel wants a random state, although there is no dropout.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        found = torch.ops.aten._flash_attention_backward(
            *(x[:used].contiguous() for x in (gradient, q, k, v, out)),
            total[:used].t().contiguous(),
            *(cumulative, cumulative, longest, longest, 0.0, not window, state, state.new_empty(0)),
            **_window_options(window, scale),
        )
        by_q, by_k, by_v = (_padded(x, len(q)) for x in found)
    else:
        buckets, operands = _operands(lengths, q, k, v)
        done = list(zip(buckets.split(out), buckets.split(total, NO_QUERY), strict=True))
        by_q, by_k, by_v = _buckets_backward(gradient, buckets, operands, done, window, scale, softcap)
    if sinks is None:
        return by_q, by_k, by_v, q.new_empty(0)
    # With p the sink's share of a query's weights, d out / d sink = -p out.
    share = (sinks.to(total.dtype) - total).exp()[: sum(lengths)]
    by_sinks = -(share * (_wide(gradient) * out)[: sum(lengths)].sum(-1)).sum(0)
    return by_q, by_k, by_v, by_sinks.to(sinks.dtype)


# torch.library.custom_op would import the compiler into every engine at its first call (1.4 s of 3.3 s).
_library = torch.library.Library("torchtitan", "FRAGMENT")
_SETTINGS = "Tensor cumulative, Tensor bounds, int window, float scale, float softcap"
_library.define(f"packed_attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, {_SETTINGS}) -> (Tensor, Tensor)")
_library.define(
    "packed_attention_backward(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor out, Tensor total, "
    f"{_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.impl("packed_attention", _forward, "CompositeExplicitAutograd")
_library.impl("packed_attention_backward", _backward, "CompositeExplicitAutograd")


def _forward_shapes(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))


def _backward_shapes(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, *_: Any
) -> tuple[torch.Tensor, ...]:
    by_sinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return (*(x.new_empty(x.shape) for x in (q, k, v)), by_sinks)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, sinks, cumulative, bounds, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, sinks, *output, cumulative, bounds)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _derive(ctx: Any, gradient: torch.Tensor | None, _: None) -> tuple[Any, ...]:
    if gradient is None:
        return (None,) * 9
    operands = ctx.saved_tensors
    found = torch.ops.torchtitan.packed_attention_backward(gradient.contiguous(), *operands, *ctx.settings)
    return (*found[:3], None if operands[3] is None else found[3], *(None,) * 5)


torch.library.register_fake("torchtitan::packed_attention", _forward_shapes, lib=_library)
torch.library.register_fake("torchtitan::packed_attention_backward", _backward_shapes, lib=_library)
torch.library.register_autograd("torchtitan::packed_attention", _derive, setup_context=_keep, lib=_library)


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cumulative: torch.Tensor,
    bounds: torch.Tensor,
    *,
    window: int = 0,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention within each sequence of a pack: q [T, heads, D] -> the same shape.

    Args:
        k, v: [T, key-value heads, D]; each of their heads serves as many consecutive heads of q.
        cumulative: [sequences + 1] int32 on q's device, offsets of the sequences; tokens past the last give zero.
        bounds: the same in int64 on the host.
        window: a token attends to itself and the window - 1 tokens before it; 0: all before it.
        scale: factor of the products of q and k.
        softcap: scores become softcap · tanh(scores / softcap) (Gemma 2); 0: unchanged.
        sinks: [heads], scores of one more key with value 0.
    """
    if not torch.compiler.is_compiling() and sinks is None and not uses_varlen_flash(q, softcap):
        return _InBuckets.apply(q, k, v, tuple(bounds.diff().tolist()), window, scale, softcap)
    out: torch.Tensor = torch.ops.torchtitan.packed_attention(
        q, k, v, sinks, cumulative, bounds, window, scale, softcap
    )[0]
    return out


class PackedLayout:
    """Where each sequence lies in a pack of tokens.

    Args:
        lengths: tokens of each sequence, in the order of the pack; their sum is T.
        device: where the index tensors live.

    Attributes:
        positions: [T] int64, the position of each token in its own sequence.
        cumulative: [sequences + 1] int32, offsets of the sequences (for varlen kernels).
        bounds: the same in int64 on the host.
    """

    def __init__(self, lengths: list[int], device: torch.device | str = "cpu"):
        if not lengths or min(lengths) < 1:
            raise ValueError(f"a pack needs sequences of at least one token, got lengths {lengths}")
        self.lengths = list(lengths)
        self.total = sum(lengths)
        size = torch.tensor(lengths)
        self.bounds = F.pad(size.cumsum(0), (1, 0))
        self.positions = (torch.arange(self.total) - self.bounds[:-1].repeat_interleave(size)).to(device)
        self.cumulative = self.bounds.to(torch.int32).to(device)


class AttentionLayer(Protocol):
    """What attention needs to know of a layer; see `packed_attention`."""

    index: int
    """The layer's index"""
    window: int
    scale: float
    softcap: float
    sinks: torch.Tensor | None


# (layer, query [T, heads, D], key [T, key-value heads, D], value like key) -> [T, heads, D]
AttentionFunction = Callable[[AttentionLayer, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class PackedAttention:
    """Attention of a pack, as the decoder calls it: (layer, q [T, Hq, D], k [T, Hkv, D], v) -> [T, Hq, D].

    T may exceed the layout's; rows that belong to no sequence are zero.
    """

    def __init__(self, layout: PackedLayout):
        self.cumulative, self.bounds = layout.cumulative, layout.bounds

    def __call__(self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # The layer's index is not read, because compiled graphs would then be specific to one layer.
        return packed_attention(
            q,
            k,
            v,
            self.cumulative,
            self.bounds,
            window=layer.window,
            scale=layer.scale,
            softcap=layer.softcap,
            sinks=layer.sinks,
        )
