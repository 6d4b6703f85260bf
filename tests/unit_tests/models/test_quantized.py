"""A base in four bits: against bitsandbytes, float64, transformers and PEFT, over layouts, and merged by actors."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from tests.conftest import make_checkpoint
from tests.distributed_launcher import run_distributed
from tests.roundings import forward_rounding
from tests.unit_tests.inference.test_versions import staged
from tests.unit_tests.models.test_lora import (
    ALONE,
    LENGTHS,
    TOKENS,
    config_of,
    fill,
    hidden_states,
    log_probs,
    merged,
    peft_log_probs,
    synced,
)
from torchtitan.config.job_config import Checkpoint as CheckpointConfig
from torchtitan.config.job_config import JobConfig, Lora, LRScheduler, Optimizer
from torchtitan.distributed.placement import copy_full_
from torchtitan.errors import UserError
from torchtitan.inference.engines.embedded.engine import Engine
from torchtitan.inference.serving.weight_verification import BaseWeights
from torchtitan.models import adapter_math
from torchtitan.models.adapter_math import BASE_BITS, LEVELS, dequantize, is_factor, is_quantized, quantize, rounded
from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_checkpoint import export_policy, load_policy, save_adapter
from torchtitan.models.layers.attention import PackedLayout
from torchtitan.models.lora import QuantizedLinear, adapters_off, base_parameters, merged_weight
from torchtitan.models.parallelize import build_policy
from torchtitan.models.shape.checkpoint_shape import read_args
from torchtitan.models.shape.costs import applied_bytes, estimate_memory, version_bytes
from torchtitan.preflight.validate import validate
from torchtitan.trainer.checkpoint import Checkpointer, collect
from torchtitan.trainer.optimizer import BatchLRScheduler, build_optimizer
from torchtitan.trainer.origins import Origins
from torchtitan.trainer.reference import build_reference
from torchtitan.weight_sync.memory.staging import WeightsRefused


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fp32, so that what is rounded to bfloat16 shows; biases on q, k and v."""
    return make_checkpoint(tmp_path_factory.mktemp("wide"), "qwen2", False, intermediate_size=192)


@pytest.fixture(scope="module")
def checkpoint_bf16(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, rounded: any program quantises the same numbers."""
    directory = tmp_path_factory.mktemp("bf16") / "checkpoint"
    shutil.copytree(checkpoint, directory)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def quantized(directory: Path, **changes: Any) -> Decoder:
    """A policy with adapters that change something on a base of four bits."""
    layout = {"lora.base_bits": 4, "lora.alpha": 4.5, "lora.target_modules": Lora().target_modules}
    policy = build_policy(config_of(str(directory), layout | changes), ALONE)
    fill(policy)
    return policy


def by_bitsandbytes(weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    functional = pytest.importorskip("bitsandbytes.functional")
    packed, state = functional.quantize_4bit(weight.bfloat16(), blocksize=64, quant_type="nf4")
    state.dtype = dtype
    return functional.dequantize_4bit(packed, state)


def base_of_four_bits(directory: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, its projections through bitsandbytes."""
    tensors = load_file(directory / "model.safetensors")
    return {n: by_bitsandbytes(t) if "_proj.weight" in n else t.float() for n, t in tensors.items()}


# Four bits


def matrices() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(301, 1024, generator=generator)
    odd = torch.randn(8, 128, generator=generator) * 10.0 ** torch.arange(-30, 34, 8)[:, None]
    odd[0, :64], odd[1], odd[2, 5], odd[3, 70] = 0.0, -0.25, 1e4, -1e-9
    return [normal * 0.02, normal.bfloat16(), odd, torch.rand(1, 64, generator=generator).half()]


@pytest.mark.parametrize("weight", matrices(), ids=["normal", "bfloat16", "odd", "float16, one block"])
def test_bits_are_those_of_bitsandbytes(weight: torch.Tensor) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    packed, absmax = quantize(weight)
    expected, state = functional.quantize_4bit(weight.bfloat16(), blocksize=64, quant_type="nf4")
    assert torch.equal(packed, expected.view_as(packed))
    assert torch.equal(absmax.float(), state.absmax.view_as(absmax))
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(dequantize(packed, absmax, dtype), by_bitsandbytes(weight, dtype))
    # Older versions of FSDP2 gather in the type that is computed in, bytes too.
    for dtype in (torch.float32, torch.bfloat16):
        cast = dequantize(packed.to(dtype), absmax.to(dtype), torch.float32)
        assert torch.equal(cast, dequantize(packed, absmax, torch.float32))


def test_every_quotient_of_bfloat16_numbers_has_one_nearest_level() -> None:
    """So neither the device nor how a quotient is rounded can decide a bit."""
    significands = torch.arange(128, 256, dtype=torch.float64)
    levels = torch.tensor(LEVELS).double()
    numbers = torch.cat([significands * 2.0**-exponent for exponent in range(12)])
    numbers = torch.cat((numbers, -numbers))
    for largest in significands:
        inside = numbers[numbers.abs() <= largest]
        quotients = inside / largest
        first, second = (quotients[:, None] - levels).abs().topk(2, largest=False).values.unbind(1)
        # fp32 rounds a quotient by 6e-8 of it, times 2 for both distances.
        assert ((second - first) > 2e-6 * quotients.abs()).all()
        row = F.pad(inside, (0, -len(inside) % 63)).view(-1, 63)
        row = torch.cat((row, largest.expand(len(row), 1)), 1)
        nearest = levels[(row[:, :, None] / largest - levels).abs().argmin(-1)]
        assert torch.equal(rounded(row), (nearest.float() * largest.float()))


def test_rounding_again_changes_nothing() -> None:
    for weight in matrices():
        once = rounded(weight)
        assert torch.equal(rounded(once), once)
        assert torch.equal(rounded(once.bfloat16()), once)
    with pytest.raises(ValueError, match="rows of 96 weights"):
        quantize(torch.zeros(2, 96))


# The layer


def layer_of(weight: torch.Tensor, bias: torch.Tensor) -> QuantizedLinear:
    linear = nn.Linear(weight.shape[1], weight.shape[0])
    linear.bias = nn.Parameter(bias, requires_grad=False)
    layer = QuantizedLinear(linear)
    layer.copy_(weight)
    return layer


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_product_and_gradient_in_float64(dtype: torch.dtype, tolerance: float, compiled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(24, 128, generator=generator), torch.randn(24, generator=generator)
    x = torch.randn(3, 5, 128, generator=generator).to(dtype).requires_grad_()
    upstream = torch.randn(3, 5, 24, generator=generator).to(dtype)
    layer = layer_of(weight, bias)
    layer.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
    output = (torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer)(x)
    output.backward(upstream)
    exact = by_bitsandbytes(weight).double()
    assert output.dtype == dtype and x.grad is not None and x.grad.dtype == dtype
    expected = x.detach().double() @ exact.T + layer.bias.double()
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=10 * tolerance)
    torch.testing.assert_close(x.grad.double(), upstream.double() @ exact, rtol=tolerance, atol=10 * tolerance)
    assert all(parameter.grad is None for parameter in layer.parameters())


@pytest.mark.parametrize("compiled", [False, True])
def test_a_quantized_layer_keeps_no_full_weight_for_the_backward(compiled: bool) -> None:
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    layer = layer_of(weight, torch.zeros(96))
    x = torch.randn(2, 128, requires_grad=True)
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run(x.tanh())
    assert kept and sum(tensor.nbytes for tensor in kept) < weight.numel()
    output.sum().backward()
    assert x.grad is not None


def test_bytes_of_the_base(checkpoint: Path) -> None:
    whole = load_policy(checkpoint)
    policy = quantized(checkpoint)
    projections = [name for name, _ in whole.named_parameters() if is_quantized(name)]
    assert len(projections) == 2 * 7
    weights = sum(whole.get_parameter(name).numel() for name in projections)
    held = [p for n, p in policy.named_parameters() if n.endswith((".packed", ".absmax"))]
    assert sum(parameter.nbytes for parameter in held) * 8 == 4.25 * weights
    rest = sum(p.nbytes for n, p in policy.named_parameters() if not is_factor(n)) - sum(p.nbytes for p in held)
    assert rest == sum(p.nbytes for n, p in whole.named_parameters() if n not in projections)


# The policy


def test_policy_computes_with_the_base_of_four_bits(checkpoint: Path) -> None:
    policy = quantized(checkpoint, **{"lora.target_modules": ["q_proj", "down_proj", "lm_head"]})
    plain = load_policy(checkpoint)
    names = dict(plain.named_parameters()).keys()
    assert base_parameters(policy).keys() == names
    base = base_of_four_bits(checkpoint)
    for name, parameter in plain.named_parameters():
        copy_full_(parameter, base[name])
    with adapters_off(policy):
        assert torch.equal(hidden_states(policy), hidden_states(plain))
        for name in names - {f"{n}.weight" for n, m in policy.named_modules() if hasattr(m, "adapter")}:
            assert torch.equal(merged_weight(policy, name), base[name]), name
    torch.testing.assert_close(log_probs(policy), log_probs(merged(policy, checkpoint)), rtol=1e-5, atol=1e-4)
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in policy.named_parameters() if is_factor(name)}
    optimizer = build_optimizer(policy, JobConfig().optimizer)
    saved = {name for name in collect(policy, optimizer, 0) if name.startswith("model.")}
    assert saved == {f"model.{name}" for name in trained}


def test_log_probs_are_those_of_transformers_and_peft_on_bitsandbytes(checkpoint_bf16: Path, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes")
    policy = quantized(checkpoint_bf16)
    save_adapter(policy, tmp_path / "adapter", base_model=str(checkpoint_bf16))
    options = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    load = transformers.AutoModelForCausalLM.from_pretrained
    # Not for inference, where bitsandbytes computes in bfloat16 on some CPUs.
    base = load(checkpoint_bf16, quantization_config=options, dtype=torch.float32).train()
    assert type(base.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    with adapters_off(policy):
        torch.testing.assert_close(peft_log_probs(base), log_probs(policy), rtol=0, atol=1e-4)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    expected = peft_log_probs(model.train())
    torch.testing.assert_close(expected, log_probs(policy), rtol=0, atol=1e-4)
    # The four bits are no trifle, nor is the adapter.
    unquantized = peft.PeftModel.from_pretrained(load(checkpoint_bf16, dtype=torch.float32), tmp_path / "adapter")
    for other in (peft_log_probs(unquantized), peft_log_probs(load(checkpoint_bf16, dtype=torch.float32))):
        assert (other - expected).abs().mean() > 0.1


def exact(policy: Decoder, directory: Path) -> dict[str, torch.Tensor]:
    """Base of four bits + adapter in float64; without a line of the code under test."""
    assert policy.lora is not None
    sent = {name: tensor.double() for name, tensor in policy.named_parameters()}
    result = {name: tensor.double() for name, tensor in base_of_four_bits(directory).items()}
    plain = load_file(directory / "model.safetensors")
    for name in result:
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in policy.lora.modules_to_save:
            result[name] = sent.get(name, plain[name]).double()
        elif f"{module}.lora_A.weight" in sent:
            a, b = sent[f"{module}.lora_A.weight"], sent[f"{module}.lora_B.weight"]
            result[name] = result[name] + policy.lora.alpha / policy.lora.rank * (b @ a)
    return result


def test_export_is_base_of_four_bits_and_adapter(checkpoint: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    policy = quantized(checkpoint)
    export_policy(policy, tmp_path / "parts", max_file_bytes=100_000)
    files = list((tmp_path / "parts").glob("*.safetensors"))
    # A file is as large as what is in it, not as the four bits are.
    assert len(files) > 2 and all(file.stat().st_size < 110_000 for file in files)
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    expected = exact(policy, checkpoint)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name].double(), tensor, rtol=1e-6, atol=1e-6)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "parts")
    torch.testing.assert_close(peft_log_probs(model), log_probs(policy), rtol=0, atol=1e-4)


@pytest.mark.parametrize("saved", [[], ["v_proj", "norm"]])
def test_reference_has_the_base_of_four_bits(checkpoint: Path, saved: list[str]) -> None:
    layout = {"lora.base_bits": 4, "lora.target_modules": ["q_proj", "up_proj"], "lora.modules_to_save": saved}
    config = config_of(str(checkpoint), layout)
    policy = build_policy(config, ALONE)
    before = log_probs(policy)
    fill(policy)
    reference = build_reference(config, ALONE, policy)
    assert (reference.policy is policy) == (not saved)
    with reference.active():
        assert torch.equal(log_probs(reference.policy), before)
    assert not torch.equal(log_probs(policy), before)
    held = {n.rpartition(".")[2] for n, m in reference.policy.named_modules() if isinstance(m, QuantizedLinear)}
    assert held == set(Lora().target_modules) - set(saved)


LAYOUTS = [
    pytest.param({}, id="fsdp"),
    pytest.param(
        {"activation_checkpoint.mode": "full", "compile.enable": True}, id="compiled", marks=pytest.mark.exhaustive
    ),
    pytest.param({"training.dtype": "bfloat16", "training.mixed_precision_param": "bfloat16"}, id="bfloat16"),
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree(checkpoint: Path, tmp_path: Path, layout: dict[str, Any]) -> None:
    layout = {"lora.base_bits": 4} | layout
    # The same types: rounding moves the gradients of this checkpoint's large weights a lot.
    alone = {key: value for key, value in layout.items() if key.partition(".")[0] in ("training", "lora")}
    function = "tests.unit_tests.distributed.test_adapter_layouts:step"
    (expected,) = run_distributed(function, 1, directory=str(checkpoint), layout=alone, scratch=str(tmp_path / "alone"))
    assert expected["norm"] > 0.1
    results = run_distributed(function, 2, directory=str(checkpoint), layout=layout, scratch=str(tmp_path / "two"))
    tolerance = 1e-2 if "bfloat16" in layout.values() else 1e-4
    for result in results:
        assert result == pytest.approx(expected, rel=tolerance)
    for file in ("adapter/adapter_model.safetensors", "merged/model.safetensors"):
        ours, reference = load_file(tmp_path / "two" / file), load_file(tmp_path / "alone" / file)
        assert ours.keys() == reference.keys()
        for name in ours:
            # As a whole: the first step of AdamW moves an element whose gradient is nothing but rounding either way.
            assert (ours[name] - reference[name]).norm() <= tolerance * reference[name].norm(), name


# Actors


def assert_holds(tensors: dict[str, torch.Tensor], policy: Decoder, directory: Path, dtype: torch.dtype) -> None:
    for name, tensor in exact(policy, directory).items():
        rounding = 2 * torch.finfo(dtype).eps * tensor.abs() + 1e-6
        assert tensors[name].dtype == dtype
        # In bfloat16 what the engine's base is rounded to comes on top.
        rounding = rounding + (2**-8 * base_of_four_bits(directory)[name].abs() if dtype == torch.bfloat16 else 0)
        assert ((tensors[name].double() - tensor).abs() <= rounding).all(), name


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_actors_merge_into_the_base_of_the_trainer(checkpoint: Path, dtype: torch.dtype) -> None:
    # Not every projection is adapted, and one is trained whole.
    few: dict[str, Any] = {"lora.target_modules": ["q_proj", "down_proj"], "lora.modules_to_save": ["v_proj", "norm"]}
    first, second = quantized(checkpoint), quantized(checkpoint, **few)
    with torch.no_grad():
        for module in (second.model.norm, second.model.layers[1].self_attn.v_proj):
            module.weight.mul_(1.5)
    engine, base = Engine(load_policy(checkpoint, dtype), 8, 64), BaseWeights(checkpoint)
    for number, policy in enumerate((second, first, second)):
        sent = {name: tensor.to(dtype).float() for name, tensor in policy.named_parameters() if tensor.requires_grad}
        with torch.no_grad():
            for name, tensor in sent.items():
                policy.get_parameter(name).copy_(tensor)
        version = staged(policy, dtype, number)
        assert int(version.tensors[BASE_BITS]) == 4
        engine.apply_weights("epoch", number, version.tensors)
        assert_holds(dict(engine.policy.named_parameters()), policy, checkpoint, dtype)
        figures = engine.weights.figures
        assert figures["adapter_applied_norm"] == pytest.approx(figures["adapter_norm"], rel=0.01)
        whole = base.merged(version).tensors
        assert whole.keys() == base_parameters(policy).keys()
        assert_holds(dict(whole), policy, checkpoint, dtype)
        if dtype == torch.float32:
            torch.testing.assert_close(log_probs(engine.policy), log_probs(policy), rtol=1e-5, atol=1e-4)


def test_an_engine_keeps_to_one_base(checkpoint: Path) -> None:
    policy, plain = quantized(checkpoint), quantized(checkpoint, **{"lora.base_bits": 16})
    assert BASE_BITS not in synced(plain)
    for net, other, error in ((policy, plain, "a base in 16 bits.*in 4"), (plain, policy, "a base in 4 bits.*in 16")):
        engine = Engine(load_policy(checkpoint), 8, 64)
        engine.apply_weights("epoch", 1, synced(net))
        with pytest.raises(WeightsRefused, match=f"{error}: restart this actor"):
            engine.apply_weights("epoch", 2, synced(other))
        assert not engine.poisoned and engine.version == 1
    # Read anew for every version, the files serve both.
    base, name = BaseWeights(checkpoint), "model.layers.0.mlp.up_proj.weight"
    for net in (policy, plain, policy):
        torch.testing.assert_close(base.merged(staged(net)).tensors[name], merged_weight(net, name), rtol=0, atol=1e-5)
    with pytest.raises(WeightsRefused, match="base of 3 bits"):
        engine.apply_weights("epoch", 3, synced(policy) | {BASE_BITS: torch.tensor([3.0])})


@pytest.mark.parametrize(
    ("saved", "resumed", "said"),
    [
        ({"lora.base_bits": 4}, {"lora.base_bits": 16}, "base_bits = 4, .* has 16: resume with lora.base_bits = 4"),
        ({"lora.base_bits": 16}, {"lora.base_bits": 4}, "base_bits = 16, .* has 4: resume with lora.base_bits = 16"),
        ({"lora.alpha": 4.5}, {"lora.alpha": 9.0}, "alpha = 4.5, .* has 9: resume with lora.alpha = 4.5"),
        ({}, {"lora.target_modules": ["q_proj"]}, r"more adapters .* model\.\S+lora_A.weight was trained"),
        (
            {},
            {},
            "has used until now: .* resume with model.hf_assets_path as it stands",
        ),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused(
    checkpoint: Path, tmp_path: Path, saved: dict[str, Any], resumed: dict[str, Any], said: str
) -> None:
    other_base = tmp_path / "another"
    weights = load_file(shutil.copytree(checkpoint, other_base) / "model.safetensors")
    save_file({name: weight + 1e-3 for name, weight in weights.items()}, other_base / "model.safetensors")

    def attach(changes: dict[str, Any], base: Path = checkpoint) -> Checkpointer:
        policy = quantized(checkpoint, **changes)
        optimizer = build_optimizer(policy, Optimizer())
        scheduler = BatchLRScheduler(optimizer, LRScheduler(), total_batches=10)
        origins = Origins(config_of(str(base), {"lora.rank": 4}), policy.args)
        return Checkpointer(CheckpointConfig(), tmp_path, policy, optimizer, scheduler, origins=origins)

    attach(saved).save(3)
    assert attach(saved).load().version == 3
    other = attach(resumed, checkpoint if resumed else other_base)
    for parameter in other.policy.parameters():
        if parameter.requires_grad:
            parameter.detach().zero_()
    with pytest.raises(UserError, match=f"step-3 .*{said}"):
        other.load()
    # Nothing was taken over from it.
    assert not any(parameter.any() for parameter in other.policy.parameters() if parameter.requires_grad)


# The configuration


def test_rows_are_made_of_whole_blocks_or_their_matrix_is_trained_whole(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    directory = shutil.copytree(tiny_checkpoint("qwen3", True), tmp_path / "checkpoint")
    (directory / "tokenizer.json").touch()
    config = config_of(str(directory), {"lora.base_bits": 4, "lora.target_modules": ["q_proj"]})
    (text,) = [problem.text for problem in validate(config) if "base_bits" in problem.text]
    assert "multiple of 64 inputs; down_proj has 96" in text
    config.lora.modules_to_save = ["down_proj"]
    assert not [problem.text for problem in validate(config) if "base_bits" in problem.text]


def test_plan(checkpoint: Path) -> None:
    config = config_of(str(checkpoint), {"lora.base_bits": 4, "lora.target_modules": ["q_proj", "down_proj"]})
    config.training.dtype = "bfloat16"
    args = read_args(checkpoint)
    policy, memory = build_policy(config, ALONE), estimate_memory(config, args, 1)
    assert memory.parameters == sum(parameter.nbytes for parameter in policy.parameters())
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    assert (memory.gradients, memory.optimizer) == (4 * trained, 8 * trained)
    # An actor merges adapters into all weights. The first time it quantises the projections, 16 s per billion of them,
    # where deadlines count 2 s per GB.
    projections = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 192 * 64)
    assert applied_bytes(config, args) == 4 * args.num_parameters() + 8 * projections
    assert version_bytes(config, args) == 4 * trained
    config.lora.modules_to_save, config.training.dtype = ["v_proj", "norm", "input_layernorm", "lm_head"], "float32"
    policy, memory = build_policy(config, ALONE), estimate_memory(config, args, 1)
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    assert version_bytes(config, args) == 4 * trained
    assert memory.parameters == sum(parameter.nbytes for parameter in policy.parameters())
    # One up- or down-projection at a time is there in fp32.
    assert memory.gathered == 4 * 192 * 64


def test_packed_lengths_do_not_matter(checkpoint: Path) -> None:
    """[n, in] of any n: a token's log-prob does not depend on what it is packed with."""
    policy = quantized(checkpoint)
    together = log_probs(policy)[: LENGTHS[0] - 1]
    alone = policy(TOKENS[: LENGTHS[0]], PackedLayout([LENGTHS[0]]), TOKENS.roll(-1)[: LENGTHS[0]])[0][:-1]
    # But the sums of 28 rows and those of 9 may run in another order.
    rounding = forward_rounding(policy.args, alone.abs().max().item())
    torch.testing.assert_close(together, alone, rtol=0, atol=rounding)


def test_the_default_dtype_of_a_foreign_process_changes_nothing() -> None:
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    expected = rounded(weight)
    before = torch.get_default_dtype()
    for cached in (adapter_math._cells, adapter_math._pairs):
        cached.cache_clear()
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert torch.equal(rounded(weight), expected)
    finally:
        torch.set_default_dtype(before)
