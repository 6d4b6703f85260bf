"""The fused head against plain float64 arithmetic, whatever the tiles."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from torchtitan.models.head.logit_tiles import ROW_STEP, TILE_ROWS, KeptTokens, choose_tiling
from torchtitan.models.head.logprob_head import HeadOptions, LogProbHead, fused_log_probs, fused_objective
from torchtitan.models.shape.costs import default_head_budget


@dataclass
class Case:
    hidden: list[torch.Tensor]
    weight: list[torch.Tensor]
    targets: torch.Tensor
    by_log_prob: torch.Tensor
    by_entropy: torch.Tensor

    def leaves(self) -> list[torch.Tensor]:
        return [*self.hidden, *self.weight]


def make(rows: int, vocabulary: int, hidden: int = 6, rank: int = 0, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    sizes = [hidden, rank] if rank else [hidden]
    return Case(
        [random(rows, size) for size in sizes],
        [random(vocabulary, size) for size in sizes],
        torch.randint(0, vocabulary, (rows,), generator=generator),
        torch.randn(rows, generator=generator),
        torch.randn(rows, generator=generator),
    )


def reference(
    case: Case, temperature: float = 1.0, softcap: float | None = None, kept: list[list[int]] | None = None
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Log-probs, entropy, the gradients of Σ a log p + b H, and how far rounding may bring the gradients in fp32 off.

    Written down in float64. A gradient is a sum of n products; each is off by a few roundings of its size, by what the
    rounding of a logit does to its probability, and the sum in any order by u · sqrt(n) of their sizes.
    """
    leaves = [tensor.detach().double().requires_grad_() for tensor in case.leaves()]
    pairs = len(case.hidden)
    logits = functools.reduce(torch.add, (h @ w.t() for h, w in zip(leaves[:pairs], leaves[pairs:], strict=True)))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    log_probs, entropy = [], []
    for row, target in enumerate(case.targets.tolist()):
        choices = (kept[row] if kept else []) or list(range(logits.shape[1]))
        distribution = logits[row, choices].log_softmax(-1)
        log_probs.append(distribution[choices.index(target)])
        entropy.append(-(distribution.exp() * distribution).sum())
    if not log_probs:
        empty = torch.zeros(0, dtype=torch.float64)
        nothing = [torch.zeros_like(leaf) for leaf in leaves]
        return empty, empty, nothing, nothing
    chosen, spread = torch.stack(log_probs), torch.stack(entropy)
    loss = (case.by_log_prob * chosen + case.by_entropy * spread).sum()
    gradients = list(torch.autograd.grad(loss, leaves))
    with torch.no_grad():
        allowed = torch.ones_like(logits, dtype=torch.bool)
        for row, choices in enumerate(kept or []):
            if choices:
                allowed[row] = False
                allowed[row, choices] = True
        distribution = logits.masked_fill(~allowed, -torch.inf).log_softmax(-1)
        # The sizes of what a logit's gradient is a sum of. The soft cap's derivative is at most 1. Rounding a logit
        # moves log p by as much, however near to 0 that is: hence the 1 beside it.
        a, b = case.by_log_prob.abs()[:, None], case.by_entropy.abs()[:, None]
        surprise = -distribution.clamp(min=-1e4)
        terms = distribution.exp() * (a + b * (1 + surprise + spread[:, None]))
        terms[torch.arange(len(terms)), case.targets] += a.squeeze(1)
        terms = terms / temperature
        scales = [terms @ w.abs() for w in leaves[pairs:]] + [terms.T @ h.abs() for h in leaves[:pairs]]
        eps, largest = torch.finfo(torch.float32).eps, logits.abs().max().item()
        counts = [logits.shape[1]] * pairs + [logits.shape[0]] * pairs
        roundings = [
            4 * eps * (largest + math.sqrt(count)) * scale + eps for count, scale in zip(counts, scales, strict=True)
        ]
    return chosen.detach(), spread.detach(), gradients, roundings


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)


@settings(max_examples=60)
@given(data=st.data())
def test_equals_float64_for_any_tiling(data: st.DataObject) -> None:
    rows, vocabulary = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 200))
    case = make(rows, vocabulary, rank=data.draw(st.sampled_from([0, 2])), seed=data.draw(st.integers(0, 99)))
    temperature = data.draw(st.sampled_from([1.0, 0.6]))
    softcap = data.draw(st.sampled_from([None, 2.0]))
    kept = None
    if data.draw(st.booleans()):
        kept = [
            sorted({target, *data.draw(st.lists(st.integers(0, vocabulary - 1), max_size=3))}) if row % 2 else []
            for row, target in enumerate(case.targets.tolist())
        ]
    options: HeadOptions = {"temperature": temperature, "softcap": softcap}
    if kept:
        options["kept"] = KeptTokens.from_rows(kept)
    if data.draw(st.booleans()):
        options["chunk_tokens"] = data.draw(st.integers(1, 50))
    else:
        options["budget_bytes"] = data.draw(st.sampled_from([1, 4 * 64 * 40, 4 * 100 * 17, 1 << 20]))
    expected_log_probs, expected_entropy, expected, roundings = reference(case, temperature, softcap, kept)

    log_probs, entropy = fused_log_probs(case.hidden, case.weight, case.targets, **options)
    loss = (case.by_log_prob * log_probs + case.by_entropy * entropy).sum()
    two_pass = torch.autograd.grad(loss, case.leaves())

    def objective(log_probs: torch.Tensor, entropy: torch.Tensor, part: slice) -> torch.Tensor:
        return case.by_log_prob[part] * log_probs + case.by_entropy[part] * entropy

    total, again, entropy_again = fused_objective(case.hidden, case.weight, case.targets, objective, **options)
    one_pass = torch.autograd.grad(3.0 * total, case.leaves())
    for found in (log_probs, again):
        assert_close(found.detach(), expected_log_probs)
    for found in (entropy, entropy_again):
        assert_close(found.detach(), expected_entropy)
    assert total.item() == pytest.approx(loss.item(), rel=1e-4, abs=1e-4)
    for found, twin, exact, rounding in zip(two_pass, one_pass, expected, roundings, strict=True):
        assert found.dtype == twin.dtype == torch.float32
        assert ((found - exact).abs() <= rounding).all()
        assert ((twin / 3.0 - exact).abs() <= rounding).all()


@settings(max_examples=200)
@given(
    rows=st.integers(0, 5000),
    vocabulary=st.integers(1, 200_000),
    hidden=st.integers(1, 4096),
    budget=st.integers(1, 1 << 30),
    whole_rows=st.sampled_from([ROW_STEP, TILE_ROWS]),
    buffers=st.integers(1, 3),
    converts=st.booleans(),
)
def test_tiles_stay_in_the_budget(
    rows: int, vocabulary: int, hidden: int, budget: int, whole_rows: int, buffers: int, converts: bool
) -> None:
    tiling = choose_tiling(rows, vocabulary, hidden, budget, whole_rows=whole_rows, buffers=buffers, converts=converts)
    assert 1 <= tiling.rows <= max(rows, 1) and 1 <= tiling.columns <= vocabulary
    held = 4 * tiling.columns * (buffers * tiling.rows + (hidden if converts else 0))
    # A tile of 64 columns is the least there is.
    assert held <= budget or tiling.columns <= 64
    if tiling.columns < vocabulary:
        assert 4 * vocabulary * (buffers * min(max(rows, 1), whole_rows) + (hidden if converts else 0)) > budget


def test_a_budget_that_nobody_names_is_small_beside_the_gradients() -> None:
    mib = 1 << 20
    assert default_head_budget(2048, 151936, 1024) == default_head_budget(8192, 151936, 4096) == 36 * mib
    assert default_head_budget(32768, 32768, 256) == 8 * mib
    # All logits at once would fit into the largest.
    assert default_head_budget(10, 64, 32) == default_head_budget(2048, 4096, 64) == 36 * mib
    # A converted weight comes on top, unless it is large.
    assert default_head_budget(32768, 32768, 256, converts=True) == (36 + 32) * mib
    assert default_head_budget(32768, 151936, 1024, converts=True) == 36 * mib
    assert choose_tiling(2048, 49152, 576, default_head_budget(2048, 49152, 576, True), converts=True).columns == 49152
    assert default_head_budget(2048, 151936, 256) == 4 * 256 * (2048 + 151936) // 8


@pytest.mark.parametrize("one_pass", [False, True])
def test_bfloat16_operands_have_fp32_logits(one_pass: bool) -> None:
    """The only rounding is that of the results to bfloat16."""
    case = make(24, 300)
    with torch.no_grad():
        for leaf in case.leaves():
            leaf.copy_(leaf.bfloat16())
    expected_log_probs, _, expected, _ = reference(case)
    leaves = [tensor.detach().bfloat16().requires_grad_() for tensor in case.leaves()]
    hidden, weight = leaves
    for budget in (1 << 20, 4 * 64 * 40):
        if one_pass:
            loss, log_probs, _ = fused_objective(
                hidden,
                weight,
                case.targets,
                lambda log_probs, entropy, part: case.by_log_prob[part] * log_probs + case.by_entropy[part] * entropy,
                budget_bytes=budget,
            )
        else:
            log_probs, entropy = fused_log_probs(hidden, weight, case.targets, budget_bytes=budget)
            loss = (case.by_log_prob * log_probs + case.by_entropy * entropy).sum()
        assert_close(log_probs.detach(), expected_log_probs)
        for found, exact in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
            assert found.dtype == torch.bfloat16
            assert ((found.double() - exact).norm() / exact.norm()).item() < 2.5e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("one_pass", [False, True])
def test_later_micro_batches_add_to_the_gradient_in_place(one_pass: bool, dtype: torch.dtype) -> None:
    cases = [make(20, 90, seed=seed) for seed in range(3)]
    weight = cases[0].weight[0].detach().to(dtype).requires_grad_()
    separate, places = torch.zeros(weight.shape), []
    for case in cases:
        twin = weight.detach().clone().requires_grad_()
        log_probs, _ = fused_log_probs(case.hidden[0], twin, case.targets)
        (case.by_log_prob * log_probs).sum().backward()
        separate += twin.grad.float()
        if one_pass:
            loss, _, _ = fused_objective(
                case.hidden[0],
                weight,
                case.targets,
                lambda log_probs, _, part, case=case: case.by_log_prob[part] * log_probs,
                accumulate=True,
                chunk_tokens=7,
            )
        else:
            log_probs, _ = fused_log_probs(case.hidden[0], weight, case.targets, accumulate=True, chunk_tokens=7)
            loss = (case.by_log_prob * log_probs).sum()
        loss.backward()
        places.append(weight.grad.data_ptr())
    assert len(set(places)) == 1
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(weight.grad.float(), separate, rtol=tolerance, atol=tolerance)


def test_accumulating_needs_a_plain_backward() -> None:
    case = make(5, 20)
    case.weight[0].grad = torch.zeros_like(case.weight[0])
    loss, _, _ = fused_objective(
        case.hidden[0], case.weight[0], case.targets, lambda log_probs, *_: log_probs, accumulate=True
    )
    with pytest.raises(RuntimeError, match="must be what backward"):
        (2 * loss).backward()


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_forward_without_a_backward_adds_no_gradient(accumulate: bool) -> None:
    case = make(5, 20)
    weight = case.weight[0]
    weight.grad = torch.ones_like(weight)
    with torch.no_grad():
        fused_objective(case.hidden[0], weight, case.targets, lambda log_probs, *_: log_probs, accumulate=accumulate)
    log_probs, _ = fused_log_probs(case.hidden[0], weight, case.targets)
    (gradient,) = torch.autograd.grad(log_probs.sum(), [weight])
    assert gradient.abs().max() > 0 and torch.equal(weight.grad, torch.ones_like(weight))


def test_hooks_see_every_gradient() -> None:
    case, seen = make(5, 20), []
    weight = case.weight[0]
    weight.register_hook(lambda gradient: seen.append(gradient.norm().item()))
    for _ in range(2):
        fused_log_probs(case.hidden[0], weight, case.targets, accumulate=True)[0].sum().backward()
    assert len(seen) == 2 and seen[0] == pytest.approx(seen[1]) and seen[0] > 0


def test_second_backward_and_frozen_operands() -> None:
    case = make(9, 30)
    log_probs, _ = fused_log_probs(case.hidden[0], case.weight[0].detach(), case.targets)
    first = torch.autograd.grad(log_probs.sum(), case.hidden[0], retain_graph=True)[0]
    second = torch.autograd.grad(log_probs.sum(), case.hidden[0])[0]
    torch.testing.assert_close(first, second)
    with torch.no_grad():
        again, entropy = fused_log_probs(case.hidden[0], case.weight[0], case.targets, entropy=False)
    assert torch.equal(again, log_probs.detach()) and not again.requires_grad and entropy.abs().max() == 0


def test_masked_rows_and_cut_off_targets() -> None:
    case = make(4, 12)
    log_probs, _ = fused_log_probs(case.hidden[0], case.weight[0], case.targets)
    (0.0 * log_probs).sum().backward()
    assert case.weight[0].grad.abs().max() == 0 and case.hidden[0].grad.abs().max() == 0
    other = [[int(target + 1) % 12] for target in case.targets]
    log_probs, entropy = fused_log_probs(
        case.hidden[0], case.weight[0], case.targets, kept=KeptTokens.from_rows(other), budget_bytes=1
    )
    assert (log_probs == -torch.inf).all() and entropy.abs().max() < 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.tensor([0, 1, 12, 3])}, "target 12 of row 2 lies outside the vocabulary of 12 tokens"),
        ({"targets": torch.tensor([0, -1, 2, 3])}, "target -1 of row 1"),
        ({"targets": torch.tensor([0, 1, 2])}, r"targets \[3\], not hidden \[\[4, 6\]\] and weight \[\[12, 6\]\]"),
        ({"weight": torch.zeros(12, 5)}, "are needed"),
        ({"chunk_tokens": 0}, "at least 1, not 0"),
        ({"temprature": 0.5}, "no option temprature; there are temperature, softcap"),
    ],
)
def test_mistakes_are_named(change: dict[str, object], message: str) -> None:
    case = make(4, 12)
    arguments = {"hidden": case.hidden[0], "weight": case.weight[0], "targets": case.targets, **change}
    kind = TypeError if "temprature" in change else ValueError
    with pytest.raises(kind, match=message):
        fused_log_probs(**arguments)
    with pytest.raises(kind, match=message):
        fused_objective(**arguments, objective=lambda log_probs, *_: log_probs)


def test_rows_leave_the_rest_out() -> None:
    head = LogProbHead(6, 30)
    torch.nn.init.normal_(head.weight)
    hidden, targets, rows = torch.randn(10, 6), torch.randint(0, 30, (3,)), torch.tensor([2, 5, 9])
    expected = torch.log_softmax(hidden[rows].double() @ head.weight.detach().double().t(), -1)
    log_probs, _ = head(hidden, targets, rows=rows)
    assert_close(log_probs.detach(), expected.gather(-1, targets[:, None]).squeeze(-1))
    head.mode = "full"
    assert_close(head(hidden, targets, rows=rows)[0].detach(), log_probs.detach().double())


@pytest.mark.slow
def test_compiles_around_the_head() -> None:
    head, layer = LogProbHead(6, 30), torch.nn.Linear(6, 6)
    torch.nn.init.normal_(head.weight)

    def block(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return head(layer(x).relu(), targets)[0].sum()

    x, targets = torch.randn(8, 6), torch.randint(0, 30, (8,))
    block(x, targets).backward()
    expected = [head.weight.grad.clone(), layer.weight.grad.clone()]
    head.weight.grad = layer.weight.grad = None
    compiled = torch.compile(block, backend="aot_eager")
    # The second time there is a gradient to add to.
    for times in (1, 2):
        compiled(x, targets).backward()
        torch.testing.assert_close(head.weight.grad, times * expected[0])
        torch.testing.assert_close(layer.weight.grad, times * expected[1])


def test_gradients_add_up_under_activation_checkpointing() -> None:
    head = LogProbHead(6, 30)
    torch.nn.init.normal_(head.weight)
    hidden, targets = torch.randn(8, 6), torch.randint(0, 30, (8,))
    head(hidden, targets)[0].sum().backward()
    expected, head.weight.grad = head.weight.grad, None
    for times in (1, 2):
        checkpoint(head, hidden, targets, use_reentrant=False)[0].sum().backward()
        torch.testing.assert_close(head.weight.grad, times * expected)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_one_pass_adds_up_where_its_forward_is_repeated(early_stop: bool, reentrant: bool) -> None:
    head, layer = LogProbHead(6, 30), torch.nn.Linear(6, 6)
    torch.nn.init.normal_(head.weight)
    hidden, targets = torch.randn(8, 6, requires_grad=True), torch.randint(0, 30, (8,))

    def block(hidden: torch.Tensor) -> torch.Tensor:
        return head(torch.tanh(layer(hidden)), targets, objective=lambda log_probs, *_: -log_probs)[0]

    block(hidden).backward()
    expected = [parameter.grad for parameter in (head.weight, layer.weight)]
    head.weight.grad = layer.weight.grad = None
    for times in (1, 2):
        with set_checkpoint_early_stop(early_stop):
            checkpoint(block, hidden, use_reentrant=reentrant).backward()
        torch.testing.assert_close(head.weight.grad, times * expected[0])
        torch.testing.assert_close(layer.weight.grad, times * expected[1])


@pytest.mark.parametrize("vocabulary", [7, 3000, 4100])
def test_logits_without_gradient_are_fp32_sums_of_bf16_operands(vocabulary: int) -> None:
    """Rows of the weight are converted piece by piece; a rounded logit would be off by up to 2**-9 of itself."""
    generator = torch.Generator().manual_seed(0)
    head = LogProbHead(576, vocabulary).bfloat16()
    with torch.no_grad():
        head.weight.copy_(torch.randn(vocabulary, 576, generator=generator))
        hidden = torch.randn(9, 576, generator=generator).bfloat16()
        logits = head(hidden)
    exact = hidden.double() @ head.weight.detach().double().T
    assert isinstance(logits, torch.Tensor) and logits.dtype == torch.float32
    assert float((logits - exact).abs().max()) < 2e-4
    torch.testing.assert_close(head(hidden).detach(), logits, rtol=1e-6, atol=1e-4)
