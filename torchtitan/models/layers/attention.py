"""Causal attention of packed sequences as one operator on tensors, so that it is a node of compiled graphs.

A pack is one row of tokens [T] that holds runs of tokens one after another. A run continues another one, or none, so
that a sequence is a path of runs, and what several sequences begin with is computed once (forest.py). Projections run
over the row, so they compute no padding; attention runs per run, over the keys of its path. The operator chooses
torch's variable-length flash attention on GPUs in half precision, torch's flash attention over buckets of runs on CPUs,
and otherwise plain products for one block of queries at a time. None of them holds a score for every pair of tokens.
The backward recomputes probabilities from the sums that the forward kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F

from torchtitan.distributed.device import queued_copy
from torchtitan.models.layers.batch_invariance import KEY_BLOCK
from torchtitan.models.layers.forest import Buckets, buckets_of, forest_of, padded

if TYPE_CHECKING:
    from torchtitan.models.layers.delta_rule import ChunkPlaces

# The sum of a padding query: no key has a probability under it, whatever its score.
NO_QUERY = 1e30


def _pieces(start: int, length: int, keys: int, window: int, block: int) -> Iterator[tuple[slice, slice, slice]]:
    """Blocks of the queries at positions start, start + 1, ...: (rows, positions, keys that they may attend to). Keys
    begin and end at multiples of KEY_BLOCK, like the kernels' own blocks, so that a token's sums do not depend on its
    place in its block of queries, nor on what of its sequence is computed elsewhere."""
    for begin in range(0, length, block):
        end = min(begin + block, length)
        first = max(0, start + begin - window + 1) // KEY_BLOCK * KEY_BLOCK if window else 0
        seen = keys if end == length else min(keys, -(-(start + end) // KEY_BLOCK) * KEY_BLOCK)
        yield slice(begin, end), slice(start + begin, start + end), slice(first, seen)


def _mask(rows: slice, columns: slice, window: int, like: torch.Tensor) -> torch.Tensor:
    """The addend for scores [positions of queries, keys]: 0 where a query attends to a key, -inf elsewhere."""
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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs q [S, heads, L, D] at positions start, ..., with the keys of their whole paths: k and v [S, heads, keys >=
    start + L, D] -> (like q, sums [S, heads, L])."""
    length, keys = q.shape[2], k.shape[2]
    if _flash_on_cpu(q, softcap) and not window and not start:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    done = [
        attend_masked(
            q[:, :, rows], k[:, :, columns], v[:, :, columns], _mask(positions, columns, window, q), scale, softcap
        )
        for rows, positions, columns in _pieces(start, length, keys, window, KEY_BLOCK)
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
    start: int,
    window: int,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients with respect to q, k and v of `_sequences_forward`."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    # In half precision, torch's kernel takes up to six times as long as the products by themselves.
    flashes = _flash_on_cpu(q, softcap) and q.dtype in (torch.float32, torch.float64)
    if flashes and not window and not start:
        return flash(gradient, q, k, v, out, total, 0.0, True, scale=scale)
    by_q, by_k, by_v = torch.empty_like(q), k.new_zeros(k.shape), v.new_zeros(v.shape)
    for rows, positions, columns in _pieces(start, q.shape[2], k.shape[2], window, KEY_BLOCK):
        mask = _mask(positions, columns, window, q)
        g, q_, o, t = (x[:, :, rows] for x in (gradient, q, out, total))
        k_, v_ = k[:, :, columns], v[:, :, columns]
        if flashes:
            of_q, of_k, of_v = flash(g, q_, k_, v_, o, t, 0.0, False, attn_mask=mask, scale=scale)
        else:
            # As in flash kernels, what is subtracted from each other is wide, and the last products are not.
            g_ = _wide(g)
            scores, slope = _scores(_wide(q_), _wide(k_), mask, scale, softcap)
            weights = scores.sub_(t[..., None]).exp_()
            by_scores = (g_ @ _wide(v_).transpose(-2, -1)).sub_((g_ * _wide(o)).sum(-1, keepdim=True)).mul_(weights)
            if slope is not None:
                by_scores *= slope
            by_scores = by_scores.mul_(scale).to(q.dtype)
            weights = weights.to(q.dtype)
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
    if uses_varlen_flash(q, softcap):
        forest = forest_of(bounds)
        keys, ends, longest = forest.keys(q.device)
        # Causality is that of the last query and the last key: a run's queries are the end of its path.
        out, total, *_ = torch.ops.aten._flash_attention_forward(
            *(q[: forest.total], k.index_select(0, keys), v.index_select(0, keys)),
            *(cumulative, ends, max(forest.lengths), longest, 0.0, not window, False),
            **_window_options(window, scale),
        )
        out, total = padded(out, len(q)), padded(total.t().contiguous(), len(q))
    else:
        buckets = _buckets_of(bounds, q, k)
        done = [
            _sequences_forward(*part, start, window, scale, softcap)
            for part, start in zip(_operands(buckets, q, k, v), buckets.starts, strict=True)
        ]
        out = buckets.join([of_bucket.transpose(1, 2) for of_bucket, _ in done], len(q))
        total = buckets.join([of_bucket.transpose(1, 2) for _, of_bucket in done], len(q))
    return (out, total) if sinks is None else with_sinks(out, total, sinks)


_Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _buckets_of(bounds: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> Buckets:
    return buckets_of(forest_of(bounds), k.shape[1], q.shape[2], q.dtype, q.device, torch.get_num_threads())


def _operands(buckets: Buckets, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[_Operands]:
    """Return q, k and v of each bucket."""
    repeats = q.shape[1] // k.shape[1]
    return zip(buckets.split(q), buckets.split_keys(k, repeats), buckets.split_keys(v, repeats), strict=True)


def _buckets_backward(
    gradient: torch.Tensor,
    buckets: Buckets,
    parts: Iterable[_Operands],
    done: Iterable[Sequence[torch.Tensor]],
    window: int,
    scale: float,
    softcap: float,
) -> _Operands:
    """Gradients with respect to q, k and v, from each bucket's inputs and outputs."""
    found: list[list[torch.Tensor]] = [[], [], []]
    each = zip(buckets.split(gradient, 0.0), parts, done, buckets.starts, strict=True)
    for g, part, (out, total), start in each:
        of_q, of_k, of_v = _sequences_backward(g, *part, out, total, start, window, scale, softcap)
        found[0].append(of_q.transpose(1, 2))
        found[1].append(of_k.sum(1))
        found[2].append(of_v.sum(1))
    rows = len(gradient)
    return buckets.join(found[0], rows), buckets.join_keys(found[1], rows), buckets.join_keys(found[2], rows)


class _InBuckets(torch.autograd.Function):
    """The operator outside compiled graphs, where it can keep its buckets for the backward instead of rebuilding them:
    (q, k, v, bounds, window, scale, softcap) -> out. Keys are rebuilt, because a bucket has a shared run's once for
    every path."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, *settings: Any
    ) -> torch.Tensor:
        ctx.buckets, ctx.settings, ctx.repeats = _buckets_of(bounds, q, k), settings, q.shape[1] // k.shape[1]
        saved, outputs = [], []
        for part, start in zip(_operands(ctx.buckets, q, k, v), ctx.buckets.starts, strict=True):
            out, total = _sequences_forward(*part, start, *settings)
            saved += [part[0], out, total]
            outputs.append(out.transpose(1, 2))
        ctx.save_for_backward(k, v, *saved)
        return ctx.buckets.join(outputs, len(q))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        k, v, *saved = ctx.saved_tensors
        keys, values = (ctx.buckets.split_keys(x, ctx.repeats) for x in (k, v))
        parts, done = zip(saved[::3], keys, values, strict=True), zip(saved[1::3], saved[2::3], strict=True)
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
    forest = forest_of(bounds)
    used = forest.total
    if uses_varlen_flash(q, softcap):
        keys, ends, longest = forest.keys(q.device)
        # The kernel wants a random state, although there is no dropout.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        by_q, *found = torch.ops.aten._flash_attention_backward(
            *(gradient[:used].contiguous(), q[:used].contiguous(), k.index_select(0, keys), v.index_select(0, keys)),
            *(out[:used].contiguous(), total[:used].t().contiguous()),
            *(cumulative, ends, max(forest.lengths), longest, 0.0, not window, state, state.new_empty(0)),
            **_window_options(window, scale),
        )
        by_q = padded(by_q, len(q))
        # A shared key's gradient is the sum over its paths, formed in full precision.
        by_k, by_v = (
            x.new_zeros(x.shape, dtype=torch.float32).index_add_(0, keys, of_path.float()).to(x.dtype)
            for x, of_path in zip((k, v), found[:2], strict=True)
        )
    else:
        buckets = _buckets_of(bounds, q, k)
        done = zip(buckets.split(out), buckets.split(total, NO_QUERY), strict=True)
        by_q, by_k, by_v = _buckets_backward(
            gradient, buckets, _operands(buckets, q, k, v), done, window, scale, softcap
        )
    if sinks is None:
        return by_q, by_k, by_v, q.new_empty(0)
    # With p the sink's share of a query's weights, d out / d sink = -p out.
    share = (sinks.to(total.dtype) - total).exp()[:used]
    by_sinks = -(share * (_wide(gradient) * out)[:used].sum(-1)).sum(0)
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
    """Causal attention within each path of a pack: q [T, heads, D] -> the same shape.

    Args:
        k, v: [T, key-value heads, D]; each of their heads serves as many consecutive heads of q.
        cumulative, bounds: of the pack, see PackedLayout; tokens past the last run give zero.
        window: a token attends to itself and the window - 1 tokens before it; 0: all before it.
        scale: factor of the products of q and k.
        softcap: scores become softcap · tanh(scores / softcap) (Gemma 2); 0: unchanged.
        sinks: [heads], scores of one more key with value 0.
    """
    if not torch.compiler.is_compiling() and sinks is None and not uses_varlen_flash(q, softcap):
        return _InBuckets.apply(q, k, v, bounds, window, scale, softcap)
    out: torch.Tensor = torch.ops.torchtitan.packed_attention(
        q, k, v, sinks, cumulative, bounds, window, scale, softcap
    )[0]
    return out


class PackedLayout:
    """Where each run of tokens lies in a pack, and which run it continues. A sequence is a path of runs.

    Args:
        lengths: tokens of each run, in the order of the pack; their sum is T.
        device: where the index tensors live.
        parents: for each run the number of the earlier run that it continues, -1 for none; without it every run is a
            sequence of its own.

    Attributes:
        positions: [T] int64, the position of each token in its own sequence.
        starts: the position of each run's first token.
        cumulative: [runs + 1] int32, offsets of the runs (for varlen kernels).
        bounds: [runs + 1, 2] int64 on the host: offset and parent of each run, and T.

    Raises:
        ValueError: a run without tokens, or one that continues a later one.
    """

    def __init__(self, lengths: list[int], device: torch.device | str = "cpu", parents: list[int] | None = None):
        if not lengths or min(lengths) < 1:
            raise ValueError(f"a pack needs sequences of at least one token, got lengths {lengths}")
        parents = [-1] * len(lengths) if parents is None else parents
        if len(parents) != len(lengths) or any(not -1 <= parent < run for run, parent in enumerate(parents)):
            raise ValueError(f"each run continues an earlier one or none (-1), got parents {parents}")
        self.lengths = list(lengths)
        self.total = sum(lengths)
        self.starts: list[int] = []
        for parent in parents:
            self.starts.append(0 if parent < 0 else self.starts[parent] + lengths[parent])
        size = torch.tensor(lengths)
        offsets = F.pad(size.cumsum(0), (1, 0))
        self.bounds = torch.stack((offsets, torch.tensor([*parents, -1])), 1)
        shift = (torch.tensor(self.starts) - offsets[:-1]).repeat_interleave(size)
        self.positions = queued_copy(torch.arange(self.total) + shift, device)
        self.cumulative = queued_copy(offsets.to(torch.int32), device)


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

    places: ChunkPlaces | None = None
    """Where the T tokens lie in chunks, if the model has recurrent layers"""

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
