"""The divergence from a teacher over the vocabulary: values and gradients against plain tensors in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed_launcher import run_distributed
from torchtitan.models.head.divergence_head import Comparison, TeacherStates, TopTokens, fused_divergence
from torchtitan.models.head.logit_tiles import KeptTokens
from torchtitan.models.head.logprob_head import VocabularyPart

ROWS, VOCABULARY, HIDDEN, RANK, TEACHER = 37, 501, 24, 4, 40
KINDS = ("forward_kl", "reverse_kl", "jsd")
BETA = 0.3


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tensors(adapter: bool = True) -> tuple[list[torch.Tensor], list[torch.Tensor], TeacherStates, torch.Tensor]:
    """Hidden states and weights of a policy with an adapter, and of a wider teacher; targets."""
    hidden, weight = [2 * draw(ROWS, HIDDEN, seed=1)], [draw(VOCABULARY, HIDDEN, seed=2) / HIDDEN**0.5]
    if adapter:
        hidden.append(draw(ROWS, RANK, seed=3))
        weight.append(draw(VOCABULARY, RANK, seed=4) / RANK**0.5)
    teacher = TeacherStates([2 * draw(ROWS, TEACHER, seed=5)], [draw(VOCABULARY, TEACHER, seed=6) / TEACHER**0.5])
    return hidden, weight, teacher, torch.arange(ROWS) * 13 % VOCABULARY


def log_softmax(
    hidden: list[torch.Tensor], weight: list[torch.Tensor], options: dict[str, Any], softcap: float | None
) -> torch.Tensor:
    logits = sum(h @ w.t() for h, w in zip(hidden, weight, strict=True))
    assert isinstance(logits, torch.Tensor)
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    if (kept := options.get("kept")) is not None:
        cut = kept.cut_off_(torch.zeros(logits.shape), slice(0, len(logits)))
        logits = logits + cut
    return (logits / options.get("temperature", 1.0)).log_softmax(-1)


def defined(p: torch.Tensor, q: torch.Tensor, kind: str) -> torch.Tensor:
    """By the definition of the divergences, from log-probs."""

    def kl(log_probs: torch.Tensor, other_log_probs: torch.Tensor) -> torch.Tensor:
        return (log_probs.exp() * (log_probs - other_log_probs)).sum(-1)

    if kind == "jsd":
        mixture = torch.logaddexp(q + math.log(BETA), p + math.log(1 - BETA))
        return BETA * kl(q, mixture) + (1 - BETA) * kl(p, mixture)
    return kl(q, p) if kind == "forward_kl" else kl(p, q)


def total(log_probs: torch.Tensor, entropy: torch.Tensor, divergence: torch.Tensor) -> torch.Tensor:
    """Of all results, with other weights for every row."""
    rows = torch.arange(len(divergence)).to(divergence) + 1
    return (divergence * rows).sum() / 10 + (log_probs * rows.flip(0)).sum() / 50 + (entropy * rows).sum() / 70


def check(found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert found is not None and expected is not None
    assert (found.double() - expected).norm() <= 1e-6 * expected.norm()


KEPT = [[13 * n % VOCABULARY, 5, 499] * (n % 3 > 0) for n in range(ROWS)]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("one tile", {"chunk_tokens": ROWS}),
    ("tiles", {"budget_bytes": 1 << 13, "temperature": 0.7}),
    ("softcap", {"budget_bytes": 1 << 14, "softcap": 3.0}),
    ("kept", {"budget_bytes": 1 << 14, "kept": KeptTokens.from_rows(KEPT)}),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [options for _, options in CASES], ids=[name for name, _ in CASES])
def test_values_and_gradients_are_those_of_float64(kind: str, options: dict[str, Any]) -> None:
    hidden, weight, teacher, targets = tensors()
    found = [leaf.clone().requires_grad_() for leaf in (*hidden, *weight)]
    teacher = teacher._replace(softcap=5.0 if "softcap" in options else None)
    results = fused_divergence(found[:2], found[2:], targets, Comparison(teacher, kind, BETA), **options)
    total(*results).backward()
    exact = [leaf.double().requires_grad_() for leaf in (*hidden, *weight)]
    p = log_softmax(exact[:2], exact[2:], options, options.get("softcap"))
    teacher_tensors = [[tensor.double() for tensor in part] for part in teacher[:2]]
    q = log_softmax(teacher_tensors[0], teacher_tensors[1], options, teacher.softcap)
    expected = p.gather(-1, targets[:, None])[:, 0], -(p.exp() * p).sum(-1), defined(p, q, kind)
    total(*expected).backward()
    for result, expected_result in zip(results, expected, strict=True):
        check(result, expected_result)
    for leaf, exact_leaf in zip(found, exact, strict=True):
        check(leaf.grad, exact_leaf.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_of_the_likeliest_tokens_alone_the_others_count_as_one(kind: str) -> None:
    hidden, weight, teacher, targets = tensors()
    q = log_softmax(*teacher[:2], {}, None).double()
    top = q.topk(7)
    found = [leaf.clone().requires_grad_() for leaf in (*hidden, *weight)]
    comparison = Comparison(TopTokens(top.indices, top.values.float()), kind, BETA)
    results = fused_divergence(found[:2], found[2:], targets, comparison, budget_bytes=1 << 13)
    total(*results).backward()
    exact = [leaf.double().requires_grad_() for leaf in (*hidden, *weight)]
    p = log_softmax(exact[:2], exact[2:], {}, None)

    def merged(log_probs: torch.Tensor) -> torch.Tensor:
        known = log_probs.gather(-1, top.indices)
        rest = log_probs.exp().scatter(-1, top.indices, 0.0).sum(-1, keepdim=True)
        return torch.cat((known, rest.log()), -1)

    expected = p.gather(-1, targets[:, None])[:, 0], -(p.exp() * p).sum(-1), defined(merged(p), merged(q), kind)
    total(*expected).backward()
    assert (expected[2] < defined(p, q, kind)).all()
    for result, expected_result in zip(
        (*results, *(x.grad for x in found)), (*expected, *(x.grad for x in exact)), strict=True
    ):
        check(result, expected_result)


def test_gradients_are_added_to_those_that_are_there_and_no_rows_give_none() -> None:
    hidden, weight, teacher, targets = tensors(adapter=False)
    comparison = Comparison(teacher, "reverse_kl")
    leaf = weight[0].requires_grad_()
    seen = []
    for _ in range(2):
        fused_divergence(hidden, weight, targets, comparison, accumulate=True)[2].sum().backward()
        assert leaf.grad is not None
        seen.append(leaf.grad.clone())
    torch.testing.assert_close(seen[1], 2 * seen[0])
    none = comparison.teacher._replace(hidden=[teacher.hidden[0][:0]])  # type: ignore[union-attr, call-arg]
    leaf.grad = None
    fused_divergence([hidden[0][:0]], weight, targets[:0], Comparison(none, "jsd"))[2].sum().backward()
    assert leaf.grad is not None and not leaf.grad.any()


def on_ranks(kind: str, top: bool) -> list[list[Any]]:
    """Results and gradients, from this process's part of the vocabulary."""
    hidden, weight, teacher, targets = tensors()
    options: dict[str, Any] = {"budget_bytes": 1 << 13}
    rows = slice(0, VOCABULARY)
    comparison: Any = teacher
    if top:
        found = log_softmax(*teacher[:2], {}, None).topk(7)
        comparison = TopTokens(found.indices, found.values)
    if dist.is_initialized():
        rank, largest = dist.get_rank(), -(-VOCABULARY // dist.get_world_size())
        rows = slice(rank * largest, min(VOCABULARY, (rank + 1) * largest))
        options["vocabulary"] = VocabularyPart(rows.start, VOCABULARY, largest, dist.group.WORLD)
        comparison = comparison if top else teacher._replace(weight=[part[rows] for part in teacher.weight])
    leaves = [tensor.clone().requires_grad_() for tensor in (*hidden, *(tensor[rows] for tensor in weight))]
    results = fused_divergence(leaves[:2], leaves[2:], targets, Comparison(comparison, kind, BETA), **options)
    total(*results).backward()
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    if dist.is_initialized():
        for gradient in gradients[:2]:  # each rank has its summand
            dist.all_reduce(gradient)
    return [tensor.tolist() for tensor in (*results, *gradients)]


def all_on_ranks() -> list[list[list[Any]]]:
    return [on_ranks(kind, top) for kind in KINDS for top in (False, True)]


@pytest.mark.slow
def test_ranks_that_share_the_vocabulary_agree_with_one() -> None:
    alone = all_on_ranks()
    ranks = run_distributed("tests.unit_tests.models.test_divergence_head:all_on_ranks", 2)
    for expected, *parts in zip(alone, *ranks, strict=True):
        for place, whole in enumerate(expected):
            found = [torch.as_tensor(part[place]) for part in parts]
            for each in [torch.cat(found)] if place >= 5 else found:
                torch.testing.assert_close(each, torch.tensor(whole), rtol=1e-5, atol=1e-5)
