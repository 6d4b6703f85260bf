"""Batch invariance: sizes at which a CPU computes a token alike, to the last bit, whatever else is in its batch.

A matrix kernel may sum in another order for a few rows, for rows that its tiles do not divide, and for inner lengths
that it splits. The thresholds depend on processor, library, model and number of threads, so they are measured once per
process. Trainer and embedded engine both compute at the sizes found, so that the engine's log-prob of a token equals
the trainer's.

This covers only fp32 on a CPU. Other types and devices run at any size, without a promise of equal results.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F

from torchtitan.models.layers.delta_rule import chunk_output, chunk_terms, next_state
from torchtitan.models.shape.delta_args import CHUNK, Delta
from torchtitan.models.shape.model_args import ModelArgs

STEPS = (1, 2, 4, 8, 16, 32, 64)
# These are used if no size was found: few dummy rows, and the summation order of most kernels.
USUAL_ROWS, USUAL_QUERIES = 16, 8
# Rows of the reference product, and how many of its first rows are compared.
REFERENCE_ROWS, COMPARED_ROWS = 512, 192
# A larger weight is represented by this many outputs, because rows and inputs decide the order of sums.
MAX_OUTPUTS = 2048
# Attention runs over key lengths in multiples of this, the lanes of the widest processors ...
KEY_STEP = 16
# ... and splits them into blocks of this size (torch's flash attention on CPUs).
KEY_BLOCK = 512
KEY_BLOCKS = 3

Subject = TypeVar("Subject")
Found = TypeVar("Found")


def reproducible_products() -> None:
    """Request MKL's strict reproducibility, which makes products independent of the number of rows and threads.

    MKL offers it on Intel processors, at no measurable cost, and reads the variable at the first product. On other
    processors it has only slower modes that are no better.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return
    try:
        with Path("/proc/cpuinfo").open(encoding="ascii", errors="replace") as file:
            # The vendor is in the second line, and the file may be long on a machine with hundreds of cores.
            about = file.read(1024)
    except OSError:
        about = platform.processor()
    if "GenuineIntel" in about:
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


reproducible_products()


@dataclass(frozen=True)
class InvariantSizes:
    """Sizes at which results do not depend on the batch."""

    rows: int = 1
    """Matrix products run over multiples of this many tokens"""
    queries: int = 1
    """A generation step attends with multiples of this many queries per key head"""
    unmet: tuple[str, ...] = ()
    """The operations for which no size was found"""

    def padding(self, tokens: int) -> int:
        """How many tokens are missing up to a multiple of `rows`."""
        return -tokens % self.rows


def invariant_sizes(args: ModelArgs, dtype: torch.dtype, device: torch.device) -> InvariantSizes:
    """Find the sizes for a model on this machine, with torch's current number of threads."""
    if not _counts(dtype, device):
        return InvariantSizes()
    threads = torch.get_num_threads()
    rows = _row_step(_product_shapes(args), threads)
    attention = _attention_sizes(args.head_dim, threads)
    unmet = [] if rows else ["matrix products"]
    unmet += [] if attention.queries and attention.key_lengths else ["attention"]
    unmet += [] if args.delta is None or _delta_is_alike(args.delta, threads) else ["linear attention"]
    return InvariantSizes(rows or USUAL_ROWS, attention.queries or USUAL_QUERIES, tuple(unmet))


def size_message(sizes: InvariantSizes, what: str) -> str | None:
    """Return a one-line message if `what` will not be equal to the last bit; None if it will be."""
    if not sizes.unmet:
        return None
    return (
        f"this processor's {' and '.join(sizes.unmet)} depend on the batch: {what} will differ from the trainer's in "
        "their last bits (inference.embedded.exact rescores them)"
    )


def padded_length(length: int) -> int:
    """The length at which a sequence of `length` tokens is computed; attention may use more keys (key_length)."""
    return -(-length // KEY_STEP) * KEY_STEP


def key_length(length: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> int:
    """The number of keys with which attention over `length` positions runs; keys beyond `length` are masked."""
    length = padded_length(length)
    if not _counts(dtype, device):
        return length
    good = _attention_sizes(head_dim, torch.get_num_threads()).key_lengths
    if not good:
        return length
    blocks, rest = divmod(length - 1, KEY_BLOCK)
    return blocks * KEY_BLOCK + next(length for length in good if length > rest)


def _counts(dtype: torch.dtype, device: torch.device) -> bool:
    return dtype == torch.float32 and device.type == "cpu"


def _product_shapes(args: ModelArgs) -> tuple[tuple[int, int], ...]:
    """(inputs, outputs) of the model's matrix products, including those for generation (fused_projections.py)."""
    hidden, wide = args.hidden_size, args.intermediate_size
    query, key = args.num_attention_heads * args.head_dim, args.num_key_value_heads * args.head_dim
    shapes = [(columns, rows) for rows, columns in args.projection_shapes().values()]
    shapes += [(hidden, size) for size in (query + 2 * key, 2 * wide, args.vocab_size)]
    if args.experts is not None:
        for size in {args.experts.intermediate_size, args.experts.shared_intermediate_size} - {0}:
            shapes += [(hidden, size), (hidden, 2 * size), (size, hidden)]
        shapes.append((hidden, args.experts.count))
    return tuple(sorted({(inputs, min(outputs, MAX_OUTPUTS)) for inputs, outputs in shapes}))


def _undisturbed(function: Callable[[Subject, int], Found]) -> functools._lru_cache_wrapper[Found]:
    """Run function(subject, threads) in a separate thread, once per pair of arguments, so that the caller's modes (fake
    tensors, counters, default devices) do not affect it."""

    @torch.no_grad()
    def probe(subject: Subject, threads: int) -> Found:
        # A new thread would otherwise use the number of threads that the process started with.
        torch.set_num_threads(threads)
        return function(subject, threads)

    @functools.lru_cache
    def run(subject: Subject, threads: int) -> Found:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(probe, subject, threads).result()

    return run


@_undisturbed
def _row_step(shapes: tuple[tuple[int, int], ...], threads: int) -> int | None:
    """The smallest step whose multiples all give the same rows as a large product; None if there is none."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(max(i * o for i, o in shapes), generator=generator)
    inputs = torch.randn(REFERENCE_ROWS * max(i for i, _ in shapes), generator=generator)
    possible = list(STEPS)
    for width, outputs in shapes:
        x = inputs[: REFERENCE_ROWS * width].view(REFERENCE_ROWS, width)
        weight = numbers[: width * outputs].view(outputs, width)
        product = F.linear(x, weight)
        # Threads may split the longer side of a product, so a pack with more tokens than outputs must agree too.
        if threads > 1 and outputs >= REFERENCE_ROWS:
            more = F.linear(x.repeat(1 + -(-outputs // REFERENCE_ROWS), 1), weight)
            if not torch.equal(more[:REFERENCE_ROWS], product):
                return None
        # If a step works, so do its multiples: the first one that works is the answer.
        while possible and not all(
            torch.equal(F.linear(x[:rows], weight), product[:rows]) for rows in _multiples(possible[0], COMPARED_ROWS)
        ):
            possible.pop(0)
    return possible[0] if possible else None


def _multiples(step: int, most: int) -> Iterable[int]:
    """Some multiples of `step`: many small ones, where kernels differ, and a few large ones."""
    return sorted({step * factor for factor in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16) if step * factor <= most})


@dataclass(frozen=True)
class _AttentionSizes:
    queries: int | None
    key_lengths: tuple[int, ...]
    """Lengths up to KEY_BLOCK, the last one included; whole blocks may be added. Empty: no length works"""


@_undisturbed
def _attention_sizes(head_dim: int, threads: int) -> _AttentionSizes:
    """Compare with causal attention over three blocks: that of a generated token, and that over shorter sequences."""
    # There are several heads, as in practice, because threads might split the work of a single one.
    heads = 2 * min(threads, 8)
    longest = KEY_BLOCKS * KEY_BLOCK
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, longest, head_dim, generator=generator) for _ in range(3))
    full_output = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def generated(queries: int, length: int) -> bool:
        """Whether a token over `length` keys, some of them masked, gets the same result as in the whole sequence."""
        key_counts = sorted({max(1, length - back) for back in (0, 3, 21, 70, 200, 333, length // 2, length - 7)})
        places = torch.tensor(key_counts) - 1
        query = F.pad(q[0, :, places].transpose(0, 1)[:, :, None], (0, 0, 0, queries - 1))
        mask = torch.where(torch.arange(length) <= places[:, None], 0.0, float("-inf"))[:, None, None]
        keys, values = (x[:, :, :length].expand(len(key_counts), -1, -1, -1) for x in (k, v))
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        return torch.equal(out[:, :, 0], full_output[0, :, places].transpose(0, 1))

    def sequence(length: int, keys: int) -> bool:
        """Whether a shorter sequence, with this many keys, gets the same results as the longer one."""
        out = F.scaled_dot_product_attention(q[:, :, :length], k[:, :, :keys], v[:, :, :keys], is_causal=True)
        return torch.equal(out, full_output[:, :, :length])

    def continued(start: int, length: int, keys: int) -> bool:
        """Whether the rest of a sequence, behind what several have in common, gets the same results as in the whole."""
        positions = torch.arange(start, start + length)[:, None]
        mask = torch.where(torch.arange(keys) <= positions, 0.0, float("-inf"))
        query = q[:, :, start : start + length]
        out = F.scaled_dot_product_attention(query, k[:, :, :keys], v[:, :, :keys], attn_mask=mask)
        return torch.equal(out, full_output[:, :, start : start + length])

    def queries_fit(step: int) -> bool:
        return all(generated(rows, longest) for rows in _multiples(step, 16))

    queries = next(filter(queries_fit, STEPS[:5]), None)
    if queries is None:
        return _AttentionSizes(None, ())

    def keys_fit(length: int) -> bool:
        return all(generated(queries, block * KEY_BLOCK + length) for block in range(KEY_BLOCKS))

    good = tuple(filter(keys_fit, range(KEY_STEP, KEY_BLOCK + 1, KEY_STEP)))
    if not good or good[-1] != KEY_BLOCK:
        return _AttentionSizes(queries, ())
    # The trainer attends with one query per token of the sequence.
    for length in (KEY_STEP, 80, 208, 336, 464, KEY_BLOCK + 96, 2 * KEY_BLOCK - 80):
        rest = (length - 1) % KEY_BLOCK
        keys = length - 1 - rest + next(size for size in good if size > rest)
        if not (sequence(length, keys) and continued(length // 3, length - length // 3, keys)):
            return _AttentionSizes(queries, ())
    return _AttentionSizes(queries, good)


@_undisturbed
def _delta_is_alike(sizes: Delta, threads: int) -> bool:
    """Whether a chunk among others gives each token what it gets alone, before later tokens of the chunk are known."""
    generator = torch.Generator().manual_seed(0)
    count, keys, heads = 5, (sizes.key_heads, CHUNK, sizes.key_dim), sizes.value_heads

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(count, *shape, generator=generator)

    q, k = (F.normalize(some(*keys), dim=-1) for _ in range(2))
    v, state = some(heads, CHUNK, sizes.value_dim), some(heads, sizes.key_dim, sizes.value_dim)
    g, beta = -some(heads, CHUNK).abs(), some(heads, CHUNK).sigmoid()

    def outputs(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        terms = chunk_terms(k, v, g, beta)
        return chunk_output(q, k, terms, state), next_state(state, *terms[:4])

    everything = (q, k, v, g, beta, state)
    out, after = outputs(*everything)
    for chunk, place in enumerate((0, 1, CHUNK // 2, CHUNK - 2, CHUNK - 1)):
        alone = [operand[chunk : chunk + 1].clone() for operand in everything]
        for operand in alone[:5]:
            operand[:, :, place + 1 :] = 0
        alone[0][:, :, :place] = 0
        alone_out, alone_after = outputs(*alone)
        if not torch.equal(alone_out[0, :, place], out[chunk, :, place]):
            return False
    return torch.equal(alone_after[0], after[-1])
