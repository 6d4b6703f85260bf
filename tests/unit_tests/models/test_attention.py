"""Attention of packs against plain softmax in float64, alone and inside compiled graphs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.mixtures import make_mixture
from torchtitan.config.job_config import JobConfig
from torchtitan.distributed.placement import ParallelDims
from torchtitan.models.decoder import Decoder
from torchtitan.models.layers import attention, forest
from torchtitan.models.layers.attention import PackedAttention, PackedLayout
from torchtitan.models.parallelize import ATTENTION, build_policy
from torchtitan.models.shape.checkpoint_shape import find_flavor


@dataclass
class Layer:
    """What the decoder's attention says of itself."""

    window: int = 0
    scale: float = 0.3
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    index: int = 0


def plain_attention(
    layer: Layer, lengths: list[int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """By the definition: one softmax per query over the keys of its own sequence that it sees."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    place = torch.arange(len(sequence))
    seen = (sequence[:, None] == sequence) & (place[:, None] >= place)
    if layer.window:
        seen &= place[:, None] - place < layer.window
    total = len(sequence)
    scores = torch.einsum("qhd,khd->hqk", q[:total], k[:total]) * layer.scale
    if layer.softcap:
        scores = layer.softcap * (scores / layer.softcap).tanh()
    scores = scores.masked_fill(~seen, -math.inf)
    if layer.sinks is not None:
        scores = torch.cat((scores, layer.sinks[:, None, None].expand(-1, total, 1)), -1)
    weights = scores.softmax(-1)[..., :total]
    out = torch.einsum("hqk,khd->qhd", weights, v[:total])
    return torch.cat((out, out.new_zeros(len(q) - total, *out.shape[1:])))


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    padding=st.integers(0, 3),
    window=st.sampled_from([0, 1, 7, 32]),
    softcap=st.sampled_from([0.0, 0.0, 2.0]),
    with_sinks=st.booleans(),
    key_heads=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 99),
)
def test_a_pack_is_its_sequences_one_by_one(
    lengths: list[int], padding: int, window: int, softcap: float, with_sinks: bool, key_heads: int, seed: int
) -> None:
    _check_pack(lengths, padding, window, softcap, with_sinks, key_heads, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (100, 2.0), (512, 0.0), (700, 2.0)])
def test_sequences_of_several_blocks(window: int, softcap: float) -> None:
    _check_pack([1100, 16, 513], 2, window, softcap, True, 1, 0)


def _check_pack(
    lengths: list[int], padding: int, window: int, softcap: float, with_sinks: bool, key_heads: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    rows = sum(lengths) + padding
    operands = [random(rows, 4, 8), random(rows, key_heads, 8), random(rows, key_heads, 8)]
    sinks = random(4) if with_sinks else None
    layer = Layer(window, 0.4, softcap, sinks)
    leaves = operands + ([] if sinks is None else [sinks])
    layout = PackedLayout(lengths)
    by = torch.randn(operands[0].shape, generator=generator, dtype=torch.float64)
    output, expected = PackedAttention(layout)(layer, *operands), plain_attention(layer, lengths, *operands)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
    found = torch.autograd.grad(output, leaves, by)
    for gradient, other in zip(found, torch.autograd.grad(expected, leaves, by), strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-8, atol=1e-8)
    assert not output[sum(lengths) :].any()
    assert layout.positions.tolist() == [place for length in lengths for place in range(length)]


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (100, 0.0), (0, 20.0)])
def test_gradients_in_half_precision_are_those_of_wide_scores(window: int, softcap: float) -> None:
    """Scores reach 100, where bfloat16 would round them to halves."""
    lengths, layer = [16, 48, 700, 16], Layer(window, 4.0, softcap)
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(sum(lengths), heads, 16, generator=generator).bfloat16() for heads in (4, 2, 2)]
    by = torch.randn(operands[0].shape, generator=generator).bfloat16()
    leaves, wide = ([x.to(dtype).requires_grad_() for x in operands] for dtype in (torch.bfloat16, torch.float64))
    found = torch.autograd.grad(PackedAttention(PackedLayout(lengths))(layer, *leaves), leaves, by)
    expected = torch.autograd.grad(plain_attention(layer, lengths, *wide), wide, by.double())
    for gradient, other in zip(found, expected, strict=True):
        assert (gradient.double() - other).norm() < 8e-3 * other.norm()


def test_further_keys_change_neither_attention_nor_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = PackedLayout([37, 5, 200, 16])
    q, k, v, by = torch.randn(4, layout.total, 4, 8, generator=torch.Generator().manual_seed(0)).unbind()

    def attend(further: int) -> list[torch.Tensor]:
        monkeypatch.setattr(forest, "key_length", lambda length, *_: length + further)
        forest.buckets_of.cache_clear()
        leaves = [q.clone().requires_grad_(), k[:, :2].clone().requires_grad_(), v[:, :2].clone().requires_grad_()]
        out = PackedAttention(layout)(Layer(), *leaves)
        out.backward(by)
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    for found, expected in zip(attend(112), attend(0), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_packed_attention_passes_torchs_operator_checks() -> None:
    """torch's own checks: the fake kernels' shapes, the schema, gradients under the compiler."""
    q, k, v = (torch.randn(12, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    layout = PackedLayout([5, 4, 2])
    arguments = (q, k, v, torch.randn(4, requires_grad=True), layout.cumulative, layout.bounds, 3, 0.4, 0.0)
    torch.library.opcheck(torch.ops.torchtitan.packed_attention.default, arguments)


@pytest.mark.parametrize("parents", [[-1, -1, -1], [-1, 0, 0]], ids=["sequences", "tree"])
@pytest.mark.parametrize("window", [0, 3])
def test_variable_length_kernel_where_it_applies(
    window: int, parents: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel itself needs CUDA; here a stand-in with its interface shows that it gets the right arguments: one
    sequence after the other, whose last query is at the place of its last key."""
    layout, layer = PackedLayout([5, 4, 3], parents=parents), Layer(window, sinks=torch.randn(4))
    q, k, v = (torch.randn(14, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    assert not attention.uses_varlen_flash(q)
    expected = PackedAttention(layout)(layer, q, k, v)
    by = torch.randn(expected.shape)
    gradients = torch.autograd.grad(expected, (q, k, v), by)
    calls: list[str] = []

    def one_by_one(q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        of_queries, of_keys, longest, longest_keys, dropout, causal = rest[:6]
        assert of_queries is layout.cumulative and of_keys.dtype == torch.int32 and of_keys[-1] == len(k) == len(v)
        assert (longest, longest_keys) == (5, max(of_keys.diff().tolist())) and dropout == 0.0
        assert causal == (window == 0) and named["window_size_right"] == 0
        assert named["window_size_left"] == (window - 1 if window else -1)
        outputs, totals = [], []
        for begin, end, first, last in zip(
            of_queries[:-1].tolist(), of_queries[1:].tolist(), of_keys[:-1].tolist(), of_keys[1:].tolist(), strict=True
        ):
            back = torch.arange(end - begin)[:, None] + (last - first) - (end - begin) - torch.arange(last - first)
            seen = (back >= 0) & (back < window) if window else back >= 0
            keys, values = (x[first:last].repeat_interleave(2, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[begin:end], keys) * named["scale"]
            totals.append(scores.masked_fill(~seen, -math.inf).logsumexp(-1))
            weights = (scores - totals[-1][..., None]).exp().masked_fill(~seen, 0.0)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
        return torch.cat(outputs), torch.cat(totals, 1)

    def forward(*arguments: Any, **named: Any) -> Any:
        calls.append("forward")
        return *one_by_one(*arguments, **named), None, None, None

    def backward(g: Any, q: Any, k: Any, v: Any, out: Any, total: Any, *rest: Any, **named: Any) -> Any:
        """As the kernel does it: from the sums and outputs that it is given, which hold the sinks."""
        calls.append("backward")
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            alone, sums = one_by_one(*leaves, *rest, **named)
            # d out / d score with a sink: the share that is left for the keys, for outputs and sums together.
            share = (sums.detach() - total).exp().t()[..., None]
            pull = (g * (share * alone.detach() - out)).sum(-1)
            lost = (g * share * alone.detach()).sum(-1) - (g * out).sum(-1) * share[..., 0]
            assert pull.abs().max() < 1e-5
            return torch.autograd.grad((g * share * alone).sum() + (lost.detach() * sums.t()).sum(), leaves)

    monkeypatch.setattr(attention, "uses_varlen_flash", lambda *_: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    output = PackedAttention(layout)(layer, q, k, v)
    torch.testing.assert_close(output, expected)
    for found, gradient in zip(torch.autograd.grad(output, (q, k, v), by), gradients, strict=True):
        torch.testing.assert_close(found, gradient)
    assert calls == ["forward", "backward"]


@settings(max_examples=40)
@given(
    runs=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 20)), min_size=1, max_size=9),
    window=st.sampled_from([0, 0, 1, 7, 32]),
    softcap=st.sampled_from([0.0, 0.0, 2.0]),
    with_sinks=st.booleans(),
    whole_graph=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_tree_is_its_paths_one_by_one(
    runs: list[tuple[int, int]], window: int, softcap: float, with_sinks: bool, whole_graph: bool, seed: int
) -> None:
    _check_tree(runs, window, softcap, with_sinks, whole_graph, seed)


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 100, 700])
def test_trees_of_several_blocks(window: int) -> None:
    _check_tree([(350, 0), (700, 1), (180, 1), (600, 2), (31, 2)], window, 0.0, True, False, 0)


def _check_tree(
    runs: list[tuple[int, int]], window: int, softcap: float, with_sinks: bool, whole_graph: bool, seed: int
) -> None:
    """runs: tokens of each, and any number for its parent."""
    generator = torch.Generator().manual_seed(seed)
    lengths, parents = [length for length, _ in runs], [any_ % (run + 1) - 1 for run, (_, any_) in enumerate(runs)]
    layout = PackedLayout(lengths, parents=parents)
    operands = [
        torch.randn(layout.total + 1, heads, 8, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (4, 2, 2)
    ]
    sinks = torch.randn(4, generator=generator, dtype=torch.float64).requires_grad_() if with_sinks else None
    layer = Layer(window, 0.4, softcap, sinks)
    leaves = operands + ([] if sinks is None else [sinks])
    by = torch.randn(layout.total, 4, 8, generator=generator, dtype=torch.float64)
    # Every run as the end of a sequence of its own, which is all of its path.
    paths: list[torch.Tensor] = []
    for offset, length, parent in zip(layout.cumulative.tolist(), lengths, parents, strict=False):
        rows = torch.arange(offset, offset + length)
        paths.append(rows if parent < 0 else torch.cat((paths[parent], rows)))
    apart = torch.cat([plain_attention(layer, [len(path)], *(x[path] for x in operands)) for path in paths])
    parts = zip(apart.split([len(path) for path in paths]), lengths, strict=True)
    expected = torch.cat([part[len(part) - length :] for part, length in parts])
    positions = [place for path, length in zip(paths, lengths, strict=True) for place in range(len(path))[-length:]]
    assert layout.positions.tolist() == positions
    found = (
        torch.ops.torchtitan.packed_attention(
            *operands, sinks, layout.cumulative, layout.bounds, window, layer.scale, softcap
        )[0]
        if whole_graph
        else PackedAttention(layout)(layer, *operands)
    )
    assert not found[layout.total :].any()
    torch.testing.assert_close(found[: layout.total], expected, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(found[: layout.total], leaves, by)
    for gradient, other in zip(found, torch.autograd.grad(expected, leaves, by), strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-12 * float(1 + other.abs().max()))


def _losses(policy: Decoder, packs: list[list[int]]) -> list[float]:
    losses = []
    for lengths in packs:
        tokens = torch.arange(sum(lengths)) % policy.args.vocab_size
        log_probs, _ = policy(tokens, PackedLayout(lengths), tokens.roll(-1))
        loss = log_probs.mean()
        loss.backward()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "selective"])
def test_nine_layers_are_one_graph(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without checkpoints: no breaks, no limit of recompilations (8), and the gradients of the plain model."""
    import torch._dynamo

    config = JobConfig()
    config.activation_checkpoint.mode = mode  # type: ignore[assignment]
    config.model.name, config.model.flavor = "qwen3", "debug"
    args = find_flavor("qwen3", "debug")
    monkeypatch.setattr(
        "torchtitan.models.parallelize.read_shape", lambda *_: _with(args, num_hidden_layers=9, vocab_size=256)
    )
    dims = ParallelDims(1, 1, 1, world_size=1)
    packs = [[30, 17, 2], [9] * 4, [64], [5, 80, 41, 33, 2, 7]]
    plain = build_policy(config, dims)
    expected = _losses(plain, packs)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config.compile.enable, config.compile.backend = True, "aot_eager"
    policy = build_policy(config, dims)
    assert _losses(policy, packs) == pytest.approx(expected, abs=1e-5)
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


class _Counted(TorchDispatchMode):
    """How often attention was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += op in ATTENTION
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_layers_are_recomputed_without_attention(family: str, tmp_path: Path) -> None:
    """Gradients are those without checkpoints, bit for bit. Sinks take an operator of our own."""
    config = JobConfig()
    if family == "qwen3":
        config.model.name, config.model.flavor = family, "debug"
    else:
        config.model.hf_assets_path = str(make_mixture(tmp_path, family))
    dims, counts, gradients = ParallelDims(1, 1, 1, world_size=1), {}, {}
    for mode in ("none", "op", "full"):
        config.activation_checkpoint.mode = mode  # type: ignore[assignment]
        policy = build_policy(config, dims)
        with _Counted() as counted:
            _losses(policy, [[30, 17, 2]])
        counts[mode], gradients[mode] = counted.count, {n: parameter.grad for n, parameter in policy.named_parameters()}
    assert counts["op"] == counts["none"] == counts["full"] / 2 > 0
    assert all(torch.equal(gradients["op"][name], gradient) for name, gradient in gradients["none"].items())


def _with(args: Any, **changes: Any) -> Any:
    import dataclasses

    return dataclasses.replace(args, **changes)
