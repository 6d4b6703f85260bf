"""Sizes at which results do not depend on the batch: found on this processor, and on ones that are made up here."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.models.head.logit_tiles import exponentials_
from torchtitan.models.head.logprob_head import fused_log_probs, fused_objective
from torchtitan.models.layers import batch_invariance
from torchtitan.models.layers.batch_invariance import InvariantSizes, invariant_sizes, key_length, size_message
from torchtitan.models.layers.elementwise import swiglu
from torchtitan.models.shape.checkpoint_shape import find_flavor

CPU = torch.device("cpu")
ARGS = find_flavor("qwen3", "debug")
# As they are, whatever takes their place in a test.
LINEAR, ATTEND = F.linear, F.scaled_dot_product_attention


@pytest.fixture
def look_again() -> Iterator[None]:
    """What was found before does not count, nor does what is found here afterwards."""
    finders: list[Any] = [batch_invariance._row_step, batch_invariance._attention_sizes]
    for finder in finders:
        finder.cache_clear()
    yield
    for finder in finders:
        finder.cache_clear()


class TestProducts:
    @pytest.mark.parametrize(
        ("differs", "step"),
        [
            (lambda rows: False, 1),
            (lambda rows: rows < 4, 4),
            (lambda rows: rows < 16, 16),
            (lambda rows: rows % 4 != 0, 4),
            (lambda rows: rows % 4 != 0 or rows < 24, 32),
            (lambda rows: rows < 300, None),
        ],
    )
    def test_the_step_is_the_smallest_that_this_kernel_allows(
        self, monkeypatch: pytest.MonkeyPatch, look_again: None, differs: Callable[[int], bool], step: int | None
    ) -> None:
        def kernel(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            out = LINEAR(x.double(), weight.double()).float()
            return out.nextafter(out + 1) if differs(len(x)) else out

        monkeypatch.setattr(F, "linear", kernel)
        assert batch_invariance._row_step(((64, 22), (22, 64)), 1) == step

    def test_one_shape_that_needs_more_decides_for_all(self, monkeypatch: pytest.MonkeyPatch, look_again: None) -> None:
        def kernel(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            out = LINEAR(x.double(), weight.double()).float()
            return out + (len(x) < (8 if weight.shape[1] == 22 else 2))

        monkeypatch.setattr(F, "linear", kernel)
        assert batch_invariance._row_step(((64, 22), (22, 64)), 1) == 8

    @pytest.mark.parametrize(("threads", "step"), [(1, 1), (2, None)])
    def test_threads_that_share_the_longer_side(
        self, monkeypatch: pytest.MonkeyPatch, look_again: None, threads: int, step: int | None
    ) -> None:
        def kernel(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            out = LINEAR(x.double(), weight.double()).float()
            return out + (torch.get_num_threads() > 1 and len(x) > len(weight))

        monkeypatch.setattr(F, "linear", kernel)
        assert batch_invariance._row_step(((16, 700),), threads) == step

    def test_missing_invariant_sizes_are_reported_in_one_line(
        self, monkeypatch: pytest.MonkeyPatch, look_again: None
    ) -> None:
        monkeypatch.setattr(F, "linear", lambda x, weight: LINEAR(x, weight) + len(x))
        sizes = invariant_sizes(ARGS, torch.float32, CPU)
        assert sizes.rows == batch_invariance.USUAL_ROWS and sizes.unmet == ("matrix products",)
        message = size_message(sizes, "log-probs")
        assert message is not None and "\n" not in message
        assert "matrix products" in message and "inference.embedded.exact" in message


class TestAttention:
    @pytest.mark.parametrize(
        ("differs", "queries", "lengths"),
        [
            (lambda queries, keys: False, 1, [(1, 16), (200, 208), (512, 512), (513, 528), (1500, 1504)]),
            (lambda queries, keys: queries < 8, 8, [(17, 32)]),
            # Inner lengths that are cut in two halves where they are between one piece and two.
            (lambda queries, keys: 192 < keys % 512 < 384, 1, [(192, 192), (193, 384), (385, 400), (705, 896)]),
            (lambda queries, keys: keys % 64 != 0, 1, [(1, 64), (64, 64), (65, 128), (700, 704)]),
        ],
    )
    def test_sizes_are_those_that_this_kernel_allows(
        self,
        monkeypatch: pytest.MonkeyPatch,
        look_again: None,
        differs: Callable[[int, int], bool],
        queries: int,
        lengths: list[tuple[int, int]],
    ) -> None:
        def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
            whole = F.pad(k, (0, 0, 0, 1536 - k.shape[2])), F.pad(v, (0, 0, 0, 1536 - k.shape[2]))
            rows = max(0, 32 - q.shape[2])
            if "attn_mask" in options:
                mask = F.pad(options["attn_mask"], (0, 1536 - k.shape[2]), value=-torch.inf)
                options["attn_mask"] = F.pad(mask, (0, 0, 0, rows if mask.shape[-2] > 1 else 0))
            filled = F.pad(q, (0, 0, 0, rows))
            out = ATTEND(filled, *whole, **options)[:, :, : q.shape[2]]
            return out + 1 if differs(q.shape[2], k.shape[2]) else out

        monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
        found = batch_invariance._attention_sizes(16, torch.get_num_threads())
        assert found.queries == queries
        assert [(length, key_length(length, 16, torch.float32, CPU)) for length, _ in lengths] == lengths

    def test_shorter_sequences_that_differ_are_unmet(self, monkeypatch: pytest.MonkeyPatch, look_again: None) -> None:
        """What generated tokens do says nothing of that: the trainer runs as many queries as a sequence is long."""
        monkeypatch.setattr(
            F,
            "scaled_dot_product_attention",
            lambda q, k, v, **o: ATTEND(q, k, v, **o) + ("is_causal" in o and q.shape[2] == 208),
        )
        assert "attention" in invariant_sizes(ARGS, torch.float32, CPU).unmet

    def test_attention_that_always_differs_is_unmet(self, monkeypatch: pytest.MonkeyPatch, look_again: None) -> None:
        monkeypatch.setattr(
            F, "scaled_dot_product_attention", lambda q, k, v, **o: ATTEND(q, k, v, **o) + 1.0 / k.shape[2]
        )
        sizes = invariant_sizes(ARGS, torch.float32, CPU)
        assert "attention" in sizes.unmet
        assert key_length(17, ARGS.head_dim, torch.float32, CPU) == 32

    def test_lengths_are_never_shorter_and_their_own(self) -> None:
        for length in range(1, 1700):
            keys = key_length(length, 16, torch.float32, CPU)
            assert length <= keys < length + 512 and keys % 16 == 0
            assert key_length(keys, 16, torch.float32, CPU) == keys


def test_other_types_and_devices_take_every_size() -> None:
    assert invariant_sizes(ARGS, torch.bfloat16, CPU) == InvariantSizes()
    assert invariant_sizes(ARGS, torch.float32, torch.device("meta")) == InvariantSizes()
    assert size_message(InvariantSizes(), "log-probs") is None


def test_the_look_computes_with_the_callers_threads(monkeypatch: pytest.MonkeyPatch, look_again: None) -> None:
    thread_counts: list[int] = []
    tell = torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: (thread_counts.append(threads), tell(threads)))
    invariant_sizes(ARGS, torch.float32, CPU)
    # A new thread would otherwise compute with as many as the process began with.
    assert thread_counts == [torch.get_num_threads()] * 2


def test_the_callers_modes_do_not_reach_the_look(look_again: None) -> None:
    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        sizes = invariant_sizes(ARGS, torch.float32, CPU)
    assert counter.get_total_flops() == 0 and sizes.rows >= 1


@pytest.mark.parametrize(
    ("cpuinfo", "before", "expected"),
    [
        ("vendor_id\t: GenuineIntel", None, "AUTO,STRICT"),
        ("vendor_id\t: GenuineIntel", "COMPATIBLE", "COMPATIBLE"),
        ("vendor_id\t: AuthenticAMD", None, None),
    ],
)
def test_strict_products_are_asked_for_where_mkl_has_them(
    monkeypatch: pytest.MonkeyPatch, cpuinfo: str, before: str | None, expected: str | None
) -> None:
    monkeypatch.setattr(Path, "open", lambda *_, **__: io.StringIO(cpuinfo))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setenv("MKL_CBWR", before or "")
    if before is None:
        monkeypatch.delenv("MKL_CBWR")
    batch_invariance.reproducible_products()
    assert os.environ.get("MKL_CBWR") == expected


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("width", [22, 96, 160])
def test_the_activation_of_a_token_does_not_depend_on_the_others_nor_on_threads(threads: int, width: int) -> None:
    gate, up = torch.randn(2, 1301, width, generator=torch.Generator().manual_seed(0)).mul(3).unbind()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    whole = swiglu(gate, up)
    try:
        torch.set_num_threads(threads)
        for rows in (1, 2, 3, 7, 64, 343, 501, 1301):
            assert torch.equal(swiglu(gate[:rows], up[:rows]), whole[:rows])
        for first in (1, 5, 700):
            assert torch.equal(swiglu(gate[first:], up[first:]), whole[first:])
        joint = torch.cat((gate, up), 1)
        assert torch.equal(swiglu(*joint.chunk(2, -1)), whole)
        assert torch.equal(swiglu(*joint[:30].chunk(2, -1)), whole[:30])
        assert torch.equal(swiglu(gate.requires_grad_(), up), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("width", [24, 96])
def test_the_activation_is_silu_times_up_and_so_is_its_gradient(width: int) -> None:
    gate, up, by = torch.randn(3, 500, width, generator=torch.Generator().manual_seed(1)).mul(4).unbind()
    gate[0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    ours = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    wide = [gate.double().requires_grad_(), up.double().requires_grad_()]
    result, expected = swiglu(ours[0], ours[1]), F.silu(wide[0]) * wide[1]
    result.backward(by)
    expected.backward(by.double())
    for found, exact in ((result, expected), (ours[0].grad, wide[0].grad), (ours[1].grad, wide[1].grad)):
        assert found is not None and exact is not None
        # A handful of roundings of terms of this size.
        scale = (gate.abs() + 1) * (up.abs() + 1) * (by.abs() + 1)
        assert ((found.double() - exact).abs() <= 8 * torch.finfo(torch.float32).eps * scale).all()


@pytest.mark.parametrize("vocabulary", [22, 40_000])
def test_a_rows_normaliser_does_not_depend_on_the_others(vocabulary: int) -> None:
    """One long row alone would be shared between threads, which sums it in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        logits = torch.randn(9, vocabulary, generator=torch.Generator().manual_seed(0)) * 5
        whole = exponentials_(logits.clone(), with_moment=True)
        for first, last in ((0, 1), (8, 9), (3, 5), (2, 9)):
            part = exponentials_(logits[first:last].clone(), with_moment=True)
            assert all(torch.equal(some, all_[first:last]) for some, all_ in zip(part, whole, strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("budget", [None, 4 * 22 * 20])
def test_rows_that_fill_up_a_product_leave_no_trace_in_the_head(budget: int | None) -> None:
    """Log-probs are those of any other number of rows, gradients those without filling up."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(45, 64, generator=generator), torch.randn(22, 64, generator=generator)
    targets = torch.randint(22, (45,), generator=generator)
    found = batch_invariance._row_step(((64, 22),), torch.get_num_threads())
    step = found or batch_invariance.USUAL_ROWS
    whole, _ = fused_log_probs(hidden, weight, targets, row_step=64)
    for rows in (1, 2, 3, 5, 17, 33, 45):
        some, _ = fused_log_probs(hidden[:rows], weight, targets[:rows], row_step=step, budget_bytes=budget)
        assert torch.equal(some, whole[:rows]) or found is None

    def gradients(row_step: int) -> list[torch.Tensor]:
        leaves = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
        loss, _, _ = fused_objective(
            leaves[0].float(),
            leaves[1].float(),
            targets,
            lambda log_probs, entropy, rows: log_probs * log_probs + entropy,
            row_step=row_step,
            budget_bytes=budget,
        )
        loss.backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    for padded, plain in zip(gradients(16), gradients(1), strict=True):
        torch.testing.assert_close(padded, plain, rtol=1e-4, atol=1e-5)


def test_the_look_takes_part_in_no_random_stream(look_again: None) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    invariant_sizes(ARGS, torch.float32, CPU)
    assert torch.equal(torch.rand(1), expected)
