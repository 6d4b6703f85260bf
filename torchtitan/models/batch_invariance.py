"""Batch invariance: the sizes at which a CPU computes a token alike, to the last bit, whatever else is in its batch.

A matrix kernel may sum in another order for a few rows, for rows that its tiles do not divide, and for inner lengths
that it cuts in pieces; where that begins depends on processor, library, model and number of threads. So it is looked
for, once per process, and trainer and embedded engine both compute at the sizes that were found: what the engine says
of a token is then what the trainer computes for it.

For fp32 on a CPU only. Other types and devices take every size as it comes; their results are not promised to be equal.
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

from torchtitan.models.model_args import ModelArgs

STEPS = (1, 2, 4, 8, 16, 32, 64)
# What is taken where no size was found: few dummies, and the order of sums of most kernels.
USUAL_ROWS, USUAL_QUERIES = 16, 8
# Rows of a product whose results the others are held against; so many of its first ones are looked at.
REFERENCE_ROWS, COMPARED_ROWS = 512, 192
# A larger weight is represented by so many of its outputs: the order of sums is a matter of rows and inputs.
MOST_OUTPUTS = 2048
# Attention runs over key lengths in multiples of this, the lanes of the widest processors...
KEY_STEP = 16
# ... and cuts them in blocks of this (torch's flash attention on CPUs).
KEY_BLOCK = 512
KEY_BLOCKS = 3

Subject = TypeVar("Subject")
Found = TypeVar("Found")


def reproducible_products() -> None:
    """Ask MKL for its strict reproducibility, which makes products independent of the number of rows and threads.

    It has that for Intel's processors, at no cost that could be measured, and reads the variable at the first product.
    Elsewhere it offers only modes that are slower and no better.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return
    try:
        with Path("/proc/cpuinfo").open(encoding="ascii", errors="replace") as file:
            # The vendor is in the second line; a machine may have hundreds of cores.
            about = file.read(1024)
    except OSError:
        about = platform.processor()
    if "GenuineIntel" in about:
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


reproducible_products()


@dataclass(frozen=True)
class InvariantSizes:
    """At which sizes results do not depend on the batch."""

    rows: int = 1
    """Matrix products run over multiples of so many tokens"""
    queries: int = 1
    """A step of generation attends with multiples of so many queries per key head"""
    unmet: tuple[str, ...] = ()
    """What no size was found for"""

    def padding(self, tokens: int) -> int:
        """Tokens that are missing to a multiple of `rows`."""
        return -tokens % self.rows


def invariant_sizes(args: ModelArgs, dtype: torch.dtype, device: torch.device) -> InvariantSizes:
    """The sizes for a model on this machine, with as many threads as torch uses now."""
    if not _counts(dtype, device):
        return InvariantSizes()
    threads = torch.get_num_threads()
    rows = _row_step(_product_shapes(args), threads)
    attention = _attention_sizes(args.head_dim, threads)
    unmet = [] if rows else ["matrix products"]
    unmet += [] if attention.queries and attention.key_lengths else ["attention"]
    return InvariantSizes(rows or USUAL_ROWS, attention.queries or USUAL_QUERIES, tuple(unmet))


def said_of(sizes: InvariantSizes, what: str) -> str | None:
    """One line for a person where `what` will not be equal to the last bit; None where it will be."""
    if not sizes.unmet:
        return None
    return (
        f"this processor's {' and '.join(sizes.unmet)} depend on the batch: {what} will differ from the trainer's in "
        "their last bits (inference.exact rescores them)"
    )


def padded_length(length: int) -> int:
    """The length that a sequence of `length` tokens is computed with; attention may take further keys (key_length)."""
    return -(-length // KEY_STEP) * KEY_STEP


def key_length(length: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> int:
    """The number of keys that attention over `length` positions runs with; those beyond are masked."""
    length = padded_length(length)
    if not _counts(dtype, device):
        return length
    good = _attention_sizes(head_dim, torch.get_num_threads()).key_lengths
    if not good:
        return length
    whole, rest = divmod(length - 1, KEY_BLOCK)
    return whole * KEY_BLOCK + next(one for one in good if one > rest)


def _counts(dtype: torch.dtype, device: torch.device) -> bool:
    return dtype == torch.float32 and device.type == "cpu"


def _product_shapes(args: ModelArgs) -> tuple[tuple[int, int], ...]:
    """(inputs, outputs) of the model's matrix products, those for generation included (fused_projections.py)."""
    hidden, wide = args.hidden_size, args.intermediate_size
    query, key = args.num_attention_heads * args.head_dim, args.num_key_value_heads * args.head_dim
    shapes = [(columns, rows) for rows, columns in args.projection_shapes().values()]
    shapes += [(hidden, size) for size in (query + 2 * key, 2 * wide, args.vocab_size)]
    if args.experts is not None:
        for size in {args.experts.intermediate_size, args.experts.shared_intermediate_size} - {0}:
            shapes += [(hidden, size), (hidden, 2 * size), (size, hidden)]
        shapes.append((hidden, args.experts.count))
    return tuple(sorted({(inputs, min(outputs, MOST_OUTPUTS)) for inputs, outputs in shapes}))


def _undisturbed(function: Callable[[Subject, int], Found]) -> functools._lru_cache_wrapper[Found]:
    """Run function(subject, threads) in a thread of its own, once for each of both: the caller's modes (fake tensors,
    counters, default devices) do not reach it there."""

    @torch.no_grad()
    def look(subject: Subject, threads: int) -> Found:
        # A new thread would compute with as many threads as the process began with.
        torch.set_num_threads(threads)
        return function(subject, threads)

    @functools.lru_cache
    def run(subject: Subject, threads: int) -> Found:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(look, subject, threads).result()

    return run


@_undisturbed
def _row_step(shapes: tuple[tuple[int, int], ...], threads: int) -> int | None:
    """The smallest step at whose multiples all these products give the rows of a large one; None if there is none."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(max(i * o for i, o in shapes), generator=generator)
    inputs = torch.randn(REFERENCE_ROWS * max(i for i, _ in shapes), generator=generator)
    possible = list(STEPS)
    for width, outputs in shapes:
        x = inputs[: REFERENCE_ROWS * width].view(REFERENCE_ROWS, width)
        weight = numbers[: width * outputs].view(outputs, width)
        whole = F.linear(x, weight)
        # Threads may share the longer side of a product, so a pack of more tokens than outputs has to give the same.
        if threads > 1 and outputs >= REFERENCE_ROWS:
            more = F.linear(x.repeat(1 + -(-outputs // REFERENCE_ROWS), 1), weight)
            if not torch.equal(more[:REFERENCE_ROWS], whole):
                return None
        # Where a step will do, its multiples will: the first step that does is the answer.
        while possible and not all(
            torch.equal(F.linear(x[:rows], weight), whole[:rows]) for rows in _multiples(possible[0], COMPARED_ROWS)
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
    """Lengths up to KEY_BLOCK, the last one included; larger ones may add whole blocks. Empty: none will do"""


@_undisturbed
def _attention_sizes(head_dim: int, threads: int) -> _AttentionSizes:
    """Held against causal attention over three blocks: a generated token's, and that over shorter sequences."""
    # There are several heads, as in use: the threads might share the work of a single one.
    heads = 2 * min(threads, 8)
    longest = KEY_BLOCKS * KEY_BLOCK
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, longest, head_dim, generator=generator) for _ in range(3))
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def generated(queries: int, length: int) -> bool:
        """Whether one token attends over `length` keys, of which it sees some, as in the whole sequence."""
        seen = sorted({max(1, length - back) for back in (0, 3, 21, 70, 200, 333, length // 2, length - 7)})
        places = torch.tensor(seen) - 1
        query = F.pad(q[0, :, places].transpose(0, 1)[:, :, None], (0, 0, 0, queries - 1))
        mask = torch.where(torch.arange(length) <= places[:, None], 0.0, float("-inf"))[:, None, None]
        keys, values = (x[:, :, :length].expand(len(seen), -1, -1, -1) for x in (k, v))
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        return torch.equal(out[:, :, 0], whole[0, :, places].transpose(0, 1))

    def sequence(length: int, keys: int) -> bool:
        """Whether a shorter sequence attends, with so many keys, as the longer one does."""
        out = F.scaled_dot_product_attention(q[:, :, :length], k[:, :, :keys], v[:, :, :keys], is_causal=True)
        return torch.equal(out, whole[:, :, :length])

    fitting = (step for step in STEPS[:5] if all(generated(rows, longest) for rows in _multiples(step, 16)))
    queries = next(fitting, None)
    if queries is None:
        return _AttentionSizes(None, ())
    lengths = range(KEY_STEP, KEY_BLOCK + 1, KEY_STEP)
    good = tuple(
        length
        for length in lengths
        if all(generated(queries, block * KEY_BLOCK + length) for block in range(KEY_BLOCKS))
    )
    if not good or good[-1] != KEY_BLOCK:
        return _AttentionSizes(queries, ())
    # The trainer attends with as many queries as the sequence is long.
    for length in (KEY_STEP, 80, 208, 336, 464, KEY_BLOCK + 96, 2 * KEY_BLOCK - 80):
        rest = (length - 1) % KEY_BLOCK
        if not sequence(length, length - 1 - rest + next(one for one in good if one > rest)):
            return _AttentionSizes(queries, ())
    return _AttentionSizes(queries, good)
