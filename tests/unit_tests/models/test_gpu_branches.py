"""The branches that a GPU takes, on numbers: its kernels are replaced by plain products on a CPU, as torch documents
them, and the results are held against what the CPU's own branch computes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from torchtitan.distributed import device
from torchtitan.models.layers import attention
from torchtitan.models.layers.attention import PackedLayout


def _attended(queries: int, keys: int, causal: bool, left: int, right: int) -> torch.Tensor:
    """Which keys a query sees [queries, keys]: the last query is aligned with the last key."""
    distance = torch.arange(queries)[:, None] + (keys - queries) - torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        seen &= distance >= 0
    if left >= 0:
        seen &= distance <= left
    if right >= 0:
        seen &= distance >= -right
    return seen


def _one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [L, heads, D], k and v [keys, key heads, D] -> (the attention, its sums [heads, L])."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    scores = scores.masked_fill(~seen, -math.inf)
    total = scores.logsumexp(-1)
    return torch.einsum("hij,jhd->ihd", (scores - total[..., None]).exp(), v), total


def _runs(cumulative: torch.Tensor, ends: torch.Tensor) -> list[tuple[slice, slice]]:
    edges = cumulative.tolist(), ends.tolist()
    return [(slice(*edges[0][i : i + 2]), slice(*edges[1][i : i + 2])) for i in range(len(edges[0]) - 1)]


def flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cumulative: torch.Tensor, ends: torch.Tensor, longest_q: int,
    longest_k: int, dropout: float, causal: bool, debug: bool, *, scale: float, window_size_left: int,
    window_size_right: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """aten::_flash_attention_forward for sequences of variable length."""
    out, total = torch.full_like(q, torch.nan), q.new_full((q.shape[1], len(q)), torch.nan)
    for rows, keys in _runs(cumulative, ends):
        assert rows.stop - rows.start <= longest_q and keys.stop - keys.start <= longest_k and not dropout
        assert causal == (window_size_left < 0)  # what a window to the right of 0 makes of it
        seen = _attended(rows.stop - rows.start, keys.stop - keys.start, causal, window_size_left, window_size_right)
        out[rows], total[:, rows] = _one(q[rows], k[keys], v[keys], seen, scale)
    return out, total, torch.empty(2), torch.empty(0), torch.empty(0)


def flash_backward(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, total: torch.Tensor,
    cumulative: torch.Tensor, ends: torch.Tensor, longest_q: int, longest_k: int, dropout: float, causal: bool,
    state: torch.Tensor, unused: torch.Tensor, *, scale: float, window_size_left: int, window_size_right: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Its backward: probabilities come from the sums that are given, and the correction from out and its gradient."""
    by_q, by_k, by_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    repeats = q.shape[1] // k.shape[1]
    assert causal == (window_size_left < 0)
    for rows, keys in _runs(cumulative, ends):
        seen = _attended(rows.stop - rows.start, keys.stop - keys.start, causal, window_size_left, window_size_right)
        k_, v_ = (x[keys].repeat_interleave(repeats, 1) for x in (k, v))
        scores = (torch.einsum("ihd,jhd->hij", q[rows], k_) * scale).masked_fill(~seen, -math.inf)
        weights = (scores - total[:, rows][..., None]).exp()
        g = gradient[rows]
        correction = (g * out[rows]).sum(-1).T[..., None]
        by_scores = weights * (torch.einsum("ihd,jhd->hij", g, v_) - correction) * scale
        by_q[rows] = torch.einsum("hij,jhd->ihd", by_scores, k_)
        of_k, of_v = torch.einsum("hij,ihd->jhd", by_scores, q[rows]), torch.einsum("hij,ihd->jhd", weights, g)
        by_k[keys] += of_k.unflatten(1, (-1, repeats)).sum(2)
        by_v[keys] += of_v.unflatten(1, (-1, repeats)).sum(2)
    return by_q, by_k, by_v


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("parents", [None, [-1, 0, 0, -1, 1]], ids=["sequences", "forest"])
def test_packed_attention_gives_flash_attention_what_makes_it_compute_the_same(
    parents: list[int] | None, window: int, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks, windows, sinks, keys of shared runs, padding behind the pack, and the order of every operand."""
    torch.manual_seed(0)
    layout = PackedLayout([9, 4, 6, 3, 2], parents=parents)
    tokens, heads, key_heads, size = layout.total + 3, 4, 2, 8
    q, gradient = (torch.randn(tokens, heads, size, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(tokens, key_heads, size, dtype=torch.float64) for _ in range(2))
    of_sinks = torch.randn(heads, dtype=torch.float64) if sinks else None
    given = (layout.cumulative, layout.bounds, window, 0.3, 0.0)

    def both() -> list[torch.Tensor]:
        out, total = attention._forward(q, k, v, of_sinks, *given)
        used = layout.total
        back = attention._backward(gradient, q, k, v, of_sinks, out, total, *given)
        return [out[:used], total[:used], back[0][:used], back[1][:used], back[2][:used], back[3]]

    expected = both()
    monkeypatch.setattr(attention, "uses_varlen_flash", lambda *_: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward)
    names = "out", "total", "by_q", "by_k", "by_v", "by_sinks"
    for name, found, wanted in zip(names, both(), expected, strict=True):
        # Shared keys are summed in fp32.
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("into", [False, True])
def test_products_of_bfloat16_are_summed_in_fp32_and_added_where_they_are_to_be(
    into: bool, accumulate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.mm and torch.addmm with a type of their result exist on a GPU only."""

    def mm(first: torch.Tensor, second: torch.Tensor, dtype: torch.dtype, *, out: Any = None) -> torch.Tensor:
        assert first.dtype == second.dtype == torch.bfloat16 and dtype == torch.float32
        product = first.double() @ second.double()
        return product.float() if out is None else out.copy_(product)

    def addmm(
        added: torch.Tensor, first: torch.Tensor, second: torch.Tensor, *, out_dtype: torch.dtype, out: torch.Tensor
    ) -> torch.Tensor:
        assert first.dtype == second.dtype == torch.bfloat16 and out_dtype == torch.float32
        return out.copy_(added.double() + first.double() @ second.double())

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    torch.manual_seed(0)
    first, second = torch.randn(5, 7).bfloat16(), torch.randn(7, 3).bfloat16()
    target = torch.randn(5, 3)
    before = target.double() if into and accumulate else 0.0
    found = device.matmul(first, second, target if into else None, accumulate)
    assert not into or found.data_ptr() == target.data_ptr()
    torch.testing.assert_close(found.double(), before + first.double() @ second.double(), rtol=1e-6, atol=1e-6)
