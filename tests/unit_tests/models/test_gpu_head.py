"""The head as a GPU runs it: operators, bytes and operations counted on meta tensors, figures on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.unit_tests.models.test_logprob_head import assert_close, make, reference
from torchtitan.models.head import fused_head, logit_tiles
from torchtitan.models.head.logit_tiles import KeptTokens
from torchtitan.models.head.logprob_head import HeadOptions, LogProbHead, fused_log_probs, fused_objective
from torchtitan.models.shape.costs import GPU_HEAD_BYTES

# An H100: bytes per second, and what of its 989e12 operations per second large products reach.
BANDWIDTH, PRODUCTS = 3.35e12, 0.65 * 989e12
# They make no kernel, or touch one element of a row.
VIEWS = {"t", "transpose", "view", "slice", "select", "detach", "expand", "unsqueeze", "squeeze", "empty", "alias"}
ONE_OF_A_ROW = {"gather", "scatter_add_"}


class Work(TorchDispatchMode):
    """Counts launches, and seconds by the roofline: an operator takes what its bytes or its operations take."""

    launches, bytes, seconds = 0, 0, 0.0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = op(*args, **(kwargs or {})), op.overloadpacket.__name__
        if name in VIEWS:
            return result
        tensors = {id(leaf): leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)}
        touched = 0 if name in ONE_OF_A_ROW else sum(t.numel() * t.element_size() for t in tensors.values())
        operations = 0
        if name in ("mm", "addmm"):
            first, second = [leaf for leaf in args if isinstance(leaf, torch.Tensor)][-2:]
            operations = 2 * first.shape[0] * first.shape[1] * second.shape[1]
            # A sum that is added to is read as well.
            touched += result.numel() * result.element_size() if name == "addmm" else 0
        self.launches, self.bytes = self.launches + 1, self.bytes + touched
        self.seconds += max(touched / BANDWIDTH, operations / PRODUCTS)
        return result


def head(vocabulary: int, hidden: int) -> LogProbHead:
    with torch.device("meta"):
        return LogProbHead(hidden, vocabulary).bfloat16()


@pytest.mark.parametrize(("tokens", "hidden"), [(12288, 3584), (4096, 8192)], ids=["7B", "72B"])
def test_launches_bytes_and_roofline_of_a_micro_batch(tokens: int, hidden: int) -> None:
    vocabulary, module = 152064, head(152064, hidden)
    states = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="meta", requires_grad=True)
    targets = torch.empty(tokens, dtype=torch.int64, device="meta")
    with Work() as work:
        loss, *_ = module(states, targets, objective=lambda log_probs, entropy, rows: -log_probs)
        loss.backward()
    rows = GPU_HEAD_BYTES // (4 * vocabulary) // 16 * 16
    tiles = -(-tokens // rows)
    assert work.launches <= 4 * tiles + 100
    # What the products have to touch: a weight of two bytes twice a tile, its fp32 sum there and back, fp32 logits
    # written and read, their gradients in two bytes written and read twice, and hidden states and their gradients.
    ideal = vocabulary * hidden * (2 * 2 + 2 * 4) * tiles + tokens * vocabulary * (4 + 4 + 3 * 2) + tokens * hidden * 8
    assert work.bytes <= 3 * ideal
    products = 3 * 2 * tokens * vocabulary * hidden / PRODUCTS
    assert work.seconds <= 2 * products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["plain", "softcap", "truncated", "by entropy", "temperature", "two weights"])
def test_the_figures_are_those_of_float64(way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fused_head, logit_tiles):
        monkeypatch.setattr(module, "on_gpu", lambda tensor: True)
    case = make(23, 150, rank=2 * (way == "two weights"))
    for leaf in case.leaves():
        leaf.data = leaf.data.to(dtype).float()
    if way != "by entropy":
        case.by_entropy.zero_()
    kept = [[target, 3, 77] if row % 2 else [] for row, target in enumerate(case.targets.tolist())]
    options: HeadOptions = {"chunk_tokens": 9, "temperature": 0.7 if way == "temperature" else 1.0}
    options |= {"softcap": 2.0 if way == "softcap" else None}
    options |= {"kept": KeptTokens.from_rows(kept) if way == "truncated" else None}
    expected, spread, gradients, roundings = reference(
        case, options["temperature"], options["softcap"], kept if way == "truncated" else None
    )
    leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in case.leaves()]
    pairs = len(leaves) // 2

    def objective(log_probs: torch.Tensor, entropy: torch.Tensor, part: slice) -> torch.Tensor:
        loss = case.by_log_prob[part] * log_probs
        return loss + case.by_entropy[part] * entropy if way == "by entropy" else loss

    loss, log_probs, entropy = fused_objective(leaves[:pairs], leaves[pairs:], case.targets, objective, **options)
    assert_close(log_probs, expected)
    assert_close(entropy, spread)
    with torch.no_grad():
        for asked in (True, False):
            given = fused_log_probs(leaves[:pairs], leaves[pairs:], case.targets, entropy=asked, **options)
            assert_close(given[0], expected)
            assert_close(given[1], spread if asked else torch.zeros_like(spread))
    for found, exact, rounding in zip(torch.autograd.grad(loss, leaves), gradients, roundings, strict=True):
        assert found.dtype == dtype
        allowed = 2 * rounding if dtype == torch.float32 else 2 * rounding + exact.abs() * 2.0**-8 + 1e-6
        assert ((found - exact).abs() <= allowed).all()
