"""Mixtures of experts: against transformers, in files, in the engine, and their grouped products."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.devices import assert_near
from tests.mixtures import MIXTURES, make_mixture
from tests.policies import check_named_as_files
from torchtitan.inference.engines.embedded.engine import Engine
from torchtitan.inference.types import GenerateRequest, SamplingParameters
from torchtitan.models.hf_checkpoint import export_policy, load_policy
from torchtitan.models.layers import elementwise
from torchtitan.models.layers import mixture as moe
from torchtitan.models.layers.attention import PackedLayout
from torchtitan.models.layers.mixture import grouped_linear, grouped_outer, places_of
from torchtitan.models.lora import synced_parameters
from torchtitan.models.shape.mixture_args import MISSING
from torchtitan.models.shape.model_args import read_model_args

LENGTHS = [37, 5, 70]


@pytest.fixture(scope="module", params=list(MIXTURES))
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixture(tmp_path_factory.mktemp("mixtures") / request.param, request.param)


def _tokens(seed: int = 5) -> torch.Tensor:
    return torch.randint(2, 128, (sum(LENGTHS),), generator=torch.Generator().manual_seed(seed))


def _theirs(directory: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    import transformers

    # torch's grouped product takes no float64.
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **experts)


def _their_logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(sequence[None]).logits[0] for sequence in tokens.split(LENGTHS)])


def _stacked(family: str, name: str, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    """A gradient of theirs under our names: gate and up lie in one stack there, but for gpt-oss here, too."""
    name = name.replace(".mlp.router.", ".mlp.gate.")
    if family == "gpt_oss" or not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: gradient}
    if name.endswith("down_proj"):
        return {f"{name}.weight": gradient}
    gate, up = gradient.chunk(2, dim=1)
    return {f"{name.replace('gate_up', part)}.weight": tensor for part, tensor in (("gate", gate), ("up", up))}


def test_logits_gradients_and_export_agree_with_transformers(mixture: Path, tmp_path: Path) -> None:
    """To 1e-5, or where transformers itself is farther from what it computes in float64, as near as that: some of
    these models multiply rounding, and more of it with the kernels of some processors."""
    tokens, baseline, exact, policy = _tokens(), _theirs(mixture), _theirs(mixture, torch.float64), load_policy(mixture)
    expected, exactly = _their_logits(baseline, tokens), _their_logits(exact, tokens)
    logits = policy(tokens, PackedLayout(LENGTHS))
    assert expected.abs().max() > 3
    assert (logits - expected).abs().max() <= max(1e-5, (expected - exactly).abs().max())
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)) / len(tokens)
    for output in (expected, exactly, logits):
        (output.log_softmax(-1) * weights).sum().backward()
    wanted, true = (
        {n: g for name, p in model.named_parameters() for n, g in _stacked(mixture.name, name, p.grad).items()}
        for model in (baseline, exact)
    )
    ours = {name: p.grad for name, p in policy.named_parameters()}
    assert ours.keys() == wanted.keys()
    for name, gradient in wanted.items():
        bound = max(1e-5 * max(1.0, gradient.abs().max()), (gradient - true[name]).abs().max())
        assert (ours[name] - gradient).abs().max() <= bound, name

    export_policy(policy, tmp_path / "exported")
    original, written = (load_file(folder / "model.safetensors") for folder in (mixture, tmp_path / "exported"))
    assert original.keys() == written.keys()
    assert all(torch.equal(original[name], written[name]) for name in original)
    assert read_model_args(tmp_path / "exported") == policy.args
    assert (_their_logits(_theirs(tmp_path / "exported"), tokens) - expected).abs().max() == 0
    assert policy.args.num_parameters() == sum(tensor.numel() for tensor in original.values())
    # A router's bias moves in steps too small for half precision.
    assert all(buffer.dtype == torch.float32 for buffer in policy.half().buffers())


def test_a_version_is_named_as_the_files_and_copies_no_stack(mixture: Path) -> None:
    check_named_as_files(load_policy(mixture), mixture)


@pytest.mark.slow
def test_the_engine_samples_with_the_trainers_numbers(mixture: Path, tmp_path: Path) -> None:
    """Through a new version under the names of files, and a sleep that drops all weights."""
    trainer = load_policy(make_mixture(tmp_path / "new", mixture.name, seed=1))
    engine = Engine(load_policy(mixture), max_sequences=8, max_length=64)
    version = {
        name: load_file(tmp_path / "new" / "model.safetensors")[name].clone() for name in synced_parameters(trainer)
    }
    assert engine.sleep(level=2)
    engine.wake(["weights", "kv_cache"])
    engine.apply_weights("epoch", 1, version)
    prompts = [[3, 4, 5, 6], [7, 8, 9, 10, 11, 12, 13]]
    requests = [GenerateRequest(str(i), p, SamplingParameters(max_tokens=24, n=3)) for i, p in enumerate(prompts)]
    exact = not engine.sizes.unmet
    for prompt, completions in zip(prompts, engine.generate(requests), strict=True):
        for completion in completions:
            tokens = torch.tensor(prompt + completion.token_ids)
            with torch.no_grad():
                log_probs, _ = trainer(tokens[:-1], PackedLayout([len(tokens) - 1]), tokens[1:])
            difference = (log_probs[len(prompt) - 1 :] - torch.tensor(completion.log_probs)).abs().max()
            assert difference <= (0.0 if exact else 1e-5)


def test_given_routes_are_followed_and_the_gate_still_learns(mixture: Path) -> None:
    """Its own routes change nothing; others do; rows that are missing are the router's own."""
    tokens, policy = _tokens(), load_policy(mixture)
    layers, chosen = policy.args.num_hidden_layers, {}
    mixed = [layer.mlp for index, layer in enumerate(policy.model.layers) if index not in policy.args.dense_layers]
    for block in mixed:
        block.record = lambda index, experts: chosen.__setitem__(index, experts)
    layout = PackedLayout(LENGTHS)
    expected = policy(tokens, layout)
    routes = torch.zeros(len(next(iter(chosen.values()))), layers, 2, dtype=torch.int16)
    for index, experts in chosen.items():
        routes[:, index] = experts.to(torch.int16)
    routes = routes[: len(tokens)]
    for block in mixed:
        block.record = None
    assert torch.equal(policy(tokens, layout, routes=routes), expected)
    other = (routes + 1) % policy.args.experts.count
    assert (policy(tokens, layout, routes=other) - expected).abs().max() > 0.1
    some = torch.where(torch.arange(len(tokens))[:, None, None] < LENGTHS[0], MISSING, other)
    logits = policy(tokens, layout, routes=some)
    assert torch.equal(logits[: LENGTHS[0]], expected[: LENGTHS[0]])
    assert (logits[LENGTHS[0] :] - expected[LENGTHS[0] :]).abs().max() > 0.1
    policy(tokens, layout, routes=other).square().sum().backward()
    assert mixed[0].gate.weight.grad.abs().max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("step", [1, 4])
def test_grouped_products_against_a_loop(dtype: torch.dtype, step: int) -> None:
    """An expert without rows, rows left over at the end, and what torch.compile makes of it in one graph."""
    generator = torch.Generator().manual_seed(0)
    expert = torch.tensor([3, 0, 3, 1, 3, 0, 1, 3, 3])
    x = torch.randn(len(expert), 16, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, 8, 16, generator=generator, dtype=dtype, requires_grad=True)
    places = places_of(expert, 4, step)
    assert places.counts.tolist() == [2, 2, 0, 5] and (places.ends % step == 0).all()

    def grouped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = x.new_zeros(len(places.token), 16).index_copy(0, places.place, x)
        return grouped_linear(rows, weight, places.ends).index_select(0, places.place)

    expected = torch.stack([weight[e] @ row for e, row in zip(expert.tolist(), x, strict=True)])
    gradient = torch.randn(expected.shape, generator=generator, dtype=dtype)
    wanted = torch.autograd.grad(expected, (x, weight), gradient)
    for function in (grouped, torch.compile(grouped, fullgraph=True, backend="aot_eager")):
        torch.testing.assert_close(function(x, weight), expected, rtol=1e-6, atol=1e-5)
        got = torch.autograd.grad(function(x, weight), (x, weight), gradient)
        for actual, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(actual, other, rtol=1e-6, atol=1e-5)
    ends = torch.tensor([2, 4, 4, 9], dtype=torch.int32)
    torch.library.opcheck(grouped_linear, (x, weight, ends))
    torch.library.opcheck(grouped_outer, (gradient, x.detach(), ends))


@pytest.mark.parametrize("gpu", [False, True])
def test_rows_go_to_experts_and_come_back(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of adding a token's rows, against float64; and the same of turning heads."""
    for module in (moe, elementwise):
        monkeypatch.setattr(module, "on_gpu", lambda tensor: gpu)
    generator = torch.Generator().manual_seed(1)
    experts = torch.rand(50, 6, generator=generator).topk(3).indices
    x, weights = (torch.randn(size, generator=generator).requires_grad_() for size in ((50, 16), (50, 3)))
    wide = [operand.detach().double().requires_grad_() for operand in (x, weights)]
    places = places_of(experts, 6, 4)
    rows = moe._Spread.apply(x, places.place, places.token)
    found = moe._Combine.apply(rows * rows, places.place, places.token, weights)
    exact = (wide[0].square()[:, None] * wide[1][..., None]).sum(1)
    along = torch.randn(50, 16, generator=generator)
    compare(found, exact, [x, weights], wide, along)

    heads = torch.randn(50, 4, 16, generator=generator).requires_grad_()
    angles = torch.randn(50, 1, 8, generator=generator)
    cosine, sine = torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    wider = heads.detach().double().requires_grad_()
    turned = wider * cosine.double() + wider.roll(8, -1) * sine.double()
    compare(elementwise.rotate(heads, cosine, sine), turned, [heads], [wider], along.repeat(1, 4).view(50, 4, 16))


def compare(
    found: torch.Tensor, exact: torch.Tensor, ours: list[torch.Tensor], wide: list[torch.Tensor], along: torch.Tensor
) -> None:
    """Results, and their gradients along a direction."""
    assert_near(found, exact, torch.float32)
    got, wanted = torch.autograd.grad(found, ours, along), torch.autograd.grad(exact, wide, along.double())
    for gradient, other in zip(got, wanted, strict=True):
        assert_near(gradient, other, torch.float32)


def test_a_window_of_qwen3_moe_is_that_of_all_layers(tmp_path: Path) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}
    directory, tokens = make_mixture(tmp_path, "qwen3_moe", **windows), _tokens()
    expected = _their_logits(_theirs(directory), tokens)
    assert (load_policy(directory)(tokens, PackedLayout(LENGTHS)) - expected).abs().max() <= 1e-4
