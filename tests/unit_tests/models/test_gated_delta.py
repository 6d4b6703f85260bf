"""Gated DeltaNet against transformers, a recurrence token by token in float64, and other layouts of the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.delta_models import DELTA_FAMILIES, make_delta
from tests.distributed_launcher import run_distributed
from torchtitan.config.job_config import JobConfig
from torchtitan.distributed import device
from torchtitan.distributed.placement import ParallelDims, copy_full_, full_tensor
from torchtitan.errors import UserError
from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_checkpoint import export_policy, load_policy
from torchtitan.models.layers.attention import PackedLayout
from torchtitan.models.layers.delta_rule import (
    _by_terms,
    delta_rule,
    gradients_in_few_launches,
    places_of,
    scan_in_few_launches,
)
from torchtitan.models.parallelize import build_policy
from torchtitan.models.shape.checkpoint_shape import trained_parameters
from torchtitan.models.shape.costs import Passes, model_flops
from torchtitan.models.shape.model_args import ModelArgs, read_model_args

LENGTHS = [5, 64, 1, 130, 63]


@pytest.fixture(scope="module", params=DELTA_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_delta(tmp_path_factory.mktemp(family), family)


def _reference(directory: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )


def _close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    difference = (found - expected).abs().max().item()
    assert difference <= 1e-5 * max(1.0, expected.abs().max().item()), (what, difference)


def test_logits_gradients_and_files_are_those_of_transformers(checkpoint: Path, tmp_path: Path) -> None:
    reference, policy = _reference(checkpoint), load_policy(checkpoint)
    generator = torch.Generator().manual_seed(1)
    # transformers does not keep the sequences of a pack apart, so each is computed by itself.
    for length in (1, 2, 63, 64, 65, 130):
        token_ids = torch.randint(0, 128, (1, length), generator=generator)
        by = torch.randn(1, length, 128, generator=generator) / 100
        reference.zero_grad()
        policy.zero_grad()
        expected, found = reference(token_ids).logits, policy.logits(token_ids)
        assert expected.abs().max() > 1
        _close(found, expected, f"logits of {length} tokens")
        (expected * by).sum().backward()
        (found * by).sum().backward()
        expected_parameters = {
            name.replace(".shared_expert.", ".shared_experts."): p for name, p in reference.named_parameters()
        }
        compared = 0
        for name, parameter in policy.named_parameters():
            assert parameter.grad is not None
            if ".mlp.experts." in name:
                gate_up, down = (
                    expected_parameters[f"{name.partition('.experts.')[0]}.experts.{part}_proj"].grad
                    for part in ("gate_up", "down")
                )
                parts = dict(zip(("gate", "up"), gate_up.chunk(2, 1), strict=True)) | {"down": down}
                expected_gradient = parts[name.rpartition("_proj")[0].rpartition(".")[2]]
            else:
                expected_gradient = expected_parameters[name].grad
            _close(parameter.grad, expected_gradient, f"{name} of {length} tokens")
            compared += parameter.grad.abs().max().item() > 0
        assert compared == len(list(policy.parameters())) or length < 60
    export_policy(policy, tmp_path / "export")
    original, written = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "export"))
    assert original.keys() == written.keys()
    assert all(torch.equal(original[name], written[name]) for name in original)
    assert read_model_args(tmp_path / "export") == policy.args
    with torch.no_grad():
        assert torch.equal(_reference(tmp_path / "export")(token_ids).logits, expected)
    total = sum(parameter.numel() for parameter in policy.parameters())
    assert policy.args.num_parameters() == total == sum(tensor.numel() for tensor in original.values())


def test_a_pack_gives_every_sequence_what_it_gets_alone(checkpoint: Path) -> None:
    policy = load_policy(checkpoint)
    assert not policy.invariant_sizes().unmet
    token_ids = torch.randint(0, 128, (sum(LENGTHS),), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole = policy(token_ids, PackedLayout(LENGTHS))
        for packed, sequence in zip(whole.split(LENGTHS), token_ids.split(LENGTHS), strict=True):
            assert torch.equal(packed, policy(sequence, PackedLayout([len(sequence)])))


def _token_by_token(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """The rule as delta_rule.py states it: [T, heads, ...] and a state [heads, Dk, Dv] -> [T, heads, Dv]."""
    out, share = [], v.shape[1] // k.shape[1]
    q, k = (heads.repeat_interleave(share, 1) for heads in (q, k))
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        written = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * written[:, None]
        out.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(out)


def _compare_with_recurrence(lengths: list[int], padding: int, chunk: int, generator: torch.Generator) -> None:
    total = sum(lengths)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(total + padding, *shape, generator=generator, dtype=torch.float64)

    operands = [some(3, 8), F.normalize(some(3, 8), dim=-1), some(6, 12), -some(6).abs() / 4, some(6).sigmoid()]
    initial = torch.randn(len(lengths), 6, 8, 12, generator=generator, dtype=torch.float64)
    leaves = [operand.requires_grad_() for operand in operands]
    layout = PackedLayout(lengths)
    q, k, v, decay, beta = leaves
    places = places_of(layout.cumulative, total + padding, chunk)
    found, _ = delta_rule(q, k, v, decay, beta, places, initial, chunk)
    parts = zip(*(leaf[:total].split(lengths) for leaf in leaves), initial, strict=True)
    expected = torch.cat([_token_by_token(*part) for part in parts])
    torch.testing.assert_close(found[:total], expected, rtol=1e-12, atol=1e-12)
    by = some(6, 12)[:total]
    gradients, expected_gradients = (
        torch.autograd.grad((output * by).sum(), leaves) for output in (found[:total], expected)
    )
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("counts", [[1], [2, 1, 3], [1] * 9, [40, 1, 27], [130]])
def test_the_scan_in_few_launches_is_the_one_step_by_step(counts: list[int]) -> None:
    """What GPUs run, in float64 on a CPU: sequences of so many chunks, with and without initial states."""
    generator, heads, size, width, tokens = torch.Generator().manual_seed(len(counts)), 2, 6, 5, 4
    chunks = sum(counts) + 3  # some belong to no sequence

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(chunks, heads, *shape, generator=generator, dtype=torch.float64)

    new, decay, gradient = some(tokens, width), some().sigmoid(), some(size, width)
    read, key = F.normalize(some(tokens, size), dim=-1) / 2, F.normalize(some(tokens, size), dim=-1) / 2
    first = F.pad(torch.tensor(counts).cumsum(0), (1, 0))
    ends = (torch.arange(chunks) >= first[-1]).index_fill(0, first[1:] - 1, True)
    key[ends], decay[ends] = 0.0, 0.0
    initial = torch.randn(len(counts), heads, size, width, generator=generator, dtype=torch.float64)
    for start in (None, initial):
        states = torch.ops.torchtitan.delta_scan(new, read, key, decay, start, first)
        found = scan_in_few_launches(new, read, key, decay, start, first)
        torch.testing.assert_close(found, states, rtol=1e-12, atol=1e-12)
    expected = torch.ops.torchtitan.delta_scan_backward(gradient, new, read, key, decay, states, first)
    after = gradients_in_few_launches(gradient, read, key, decay)
    for by_term, wanted in zip(_by_terms(after, new, read, key, states), expected, strict=True):
        torch.testing.assert_close(by_term[~ends], wanted[~ends], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lengths", [[1], [3, 4, 5], [1, 1, 30, 8, 1], [129]])
def test_gradients_of_a_gpus_scan_are_those_of_the_recurrence(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What GPUs run, in float64 on a CPU, with chunks of four tokens: sequences that end before, at and behind one."""
    monkeypatch.setattr("torchtitan.models.layers.delta_rule.few_launches", lambda _: True)
    _compare_with_recurrence(lengths, padding=3, chunk=4, generator=torch.Generator().manual_seed(len(lengths)))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_every_size_of_chunks_is_the_recurrence(chunk: int) -> None:
    generator = torch.Generator().manual_seed(chunk)
    _compare_with_recurrence([5, 64, 1, 33, 14], padding=3, chunk=chunk, generator=generator)
    if chunk == 16:
        # torch's own checks: the schema, the fake kernels' shapes, gradients under the compiler.
        shapes = [(5, 2, 4, 3), (5, 2, 4, 6), (5, 2, 4, 6), (5, 2)]
        terms = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
        arguments = (*terms, torch.randn(2, 2, 6, 3), torch.tensor([0, 3, 4]))
        torch.library.opcheck(torch.ops.torchtitan.delta_scan.default, arguments)


def _config(directory: str, settings: dict[str, Any]) -> JobConfig:
    config = JobConfig()
    config.model.hf_assets_path = directory
    config.compile.backend = "aot_eager"
    for key, value in settings.items():
        section, name = key.split(".")
        setattr(getattr(config, section), name, value)
    return config


def _trained(policy: Decoder, packs: int = 1) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of two packs, and the gradients of both together; as many ranks as `packs` compute each."""
    losses = []
    for lengths in (LENGTHS, [40, 9, 70, 3, 100]):
        tokens = torch.arange(sum(lengths)) * 7 % policy.args.vocab_size
        log_probs, _ = policy(tokens, PackedLayout(lengths), tokens.roll(-1))
        # Ranks add up their gradients.
        (log_probs.mean() / packs).backward()
        losses.append(log_probs.mean().item())
    found = {n: full_tensor(p.grad) for n, p in policy.named_parameters() if p.grad is not None}
    return losses, found


@pytest.mark.slow
def test_a_compiled_checkpointed_layer_is_one_graph(tmp_path: Path) -> None:
    import torch._dynamo

    directory = str(make_delta(tmp_path / "model", "qwen3_5_text"))
    dims = ParallelDims(1, 1, 1, world_size=1)
    plain = build_policy(_config(directory, {}), dims)
    losses, gradients = _trained(plain)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    settings = {"compile.enable": True, "activation_checkpoint.mode": "full"}
    policy = build_policy(_config(directory, settings), dims)
    own_losses, own_gradients = _trained(policy)
    assert own_losses == pytest.approx(losses, abs=1e-5)
    for name, gradient in own_gradients.items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-5)
    # Layers with a state are alike, and so are those with attention.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not torch._dynamo.utils.counters["graph_break"]
    tokens = torch.arange(70)[None]
    with torch.no_grad():
        _close(policy.logits(tokens), plain.logits(tokens), "logits without gradients")


TP: dict[str, Any] = {"parallelism.tensor_parallel_degree": 2}


def _built(config: JobConfig, dims: ParallelDims) -> Decoder:
    """With adapters, where there are any, that change something."""
    policy, generator = build_policy(config, dims), torch.Generator().manual_seed(4)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            copy_full_(parameter, torch.randn(parameter.shape, generator=generator) / 10)
    return policy


def compare_layouts(directory: str, layouts: list[dict[str, Any]], reference: str, scratch: str) -> list[Any]:
    """On every rank, of every layout: the losses, the worst error of a gradient, of an export and of logits."""
    results, expected = [], load_file(reference)
    logits = expected.pop("logits")
    for number, settings in enumerate(layouts):
        config = _config(directory, settings)
        dims = ParallelDims.from_config(config.parallelism, device.world_size(), device.rank())
        policy = _built(config, dims)
        folder = Path(scratch) / f"{device.world_size()}-{number}"
        export_policy(policy, folder)
        original, written = (
            load_file(Path(folder_of_export) / "model.safetensors") for folder_of_export in (f"{scratch}/one", folder)
        )
        # Compiled, these are of the graphs that training takes: others would be traced for as long again.
        with torch.set_grad_enabled(config.compile.enable):
            apart = (policy.logits(torch.arange(70).view(2, 35)).detach() - logits).abs().max().item()
        losses, gradients = _trained(policy, dims.dp_size)
        assert gradients.keys() == expected.keys() and original.keys() == written.keys()
        error = {n: ((gradient - expected[n]).norm() / expected[n].norm()).item() for n, gradient in gradients.items()}
        same = all(torch.equal(original[name], written[name]) for name in original)
        results.append([losses, max(error.values()), apart, same])
    return results


SELECTIVE = {"activation_checkpoint.mode": "selective"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "ranks", "adapted", "layouts"),
    [
        ("qwen3_next", 2, [], [SELECTIVE, {**TP, "parallelism.expert_parallel_degree": 2}]),
        ("qwen3_next", 2, ["q_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"], [SELECTIVE, TP]),
        ("qwen3_5_moe_text", 4, [], [TP]),
        pytest.param(
            *("qwen3_5_text", 2, []),
            [{**TP, "activation_checkpoint.mode": "full", "compile.enable": True}],
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["experts", "adapters", "four", "compiled"],
)
def test_ranks_agree_with_one(
    family: str, ranks: int, adapted: list[str], layouts: list[dict[str, Any]], tmp_path: Path
) -> None:
    directory = make_delta(tmp_path / "model", family, linear_num_key_heads=2)
    settings: dict[str, Any] = {"lora.rank": 3, "lora.target_modules": adapted} if adapted else {}
    config = _config(str(directory), settings)
    policy = _built(config, ParallelDims(1, 1, 1, 1))
    export_policy(policy, tmp_path / "one")
    with torch.no_grad():
        logits = policy.logits(torch.arange(70).view(2, 35))
    losses, gradients = _trained(policy)
    save_file(gradients | {"logits": logits}, tmp_path / "expected.safetensors")
    results = run_distributed(
        f"{__name__}:compare_layouts",
        ranks,
        directory=str(directory),
        layouts=[settings | layout for layout in layouts],
        reference=str(tmp_path / "expected.safetensors"),
        scratch=str(tmp_path),
    )
    for rank_losses, error, apart, same in (layout for rank in results for layout in rank):
        assert rank_losses == pytest.approx(losses, abs=1e-6)
        assert error < 2e-5 and apart < 1e-5 * logits.abs().max() and same
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    assert not adapted or trained_parameters(config, policy.args)[1] == trained


def test_operations_of_a_layer() -> None:
    """Three products of the state and a vector for each token; full attention in the other layers alone."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    args = ModelArgs.from_hf_config({"model_type": "qwen3_5_text", "vocab_size": 128, **sizes})
    assert args.delta_layers == (0, 1, 2) and args.delta is not None
    weights = 2 * sum(args.weights_per_token().values()) * 100
    attention = 2 * 2 * 4 * 256 * 5050
    assert model_flops(args, [100], 0, Passes(0, scored=1)) == weights + attention + 3 * 100 * 32 * 3 * 2 * 128 * 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_value_heads": 24}, "linear_num_key_heads = 16 in config.json must divide linear_num_value_heads"),
        ({"layer_types": ["linear_attention"] * 4}, "the decoder needs a layer with full attention"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types sliding_attention in config.json"),
        ({"attn_output_gate": False}, "attn_output_gate = False in config.json"),
        ({"linear_key_head_dim": None}, "linear_key_head_dim must be a whole number, not null"),
    ],
)
def test_an_unsupported_delta_config_is_refused(changes: dict[str, Any], message: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    with pytest.raises(UserError, match=message):
        ModelArgs.from_hf_config({"model_type": "qwen3_5_text", "vocab_size": 128, **sizes, **changes})
