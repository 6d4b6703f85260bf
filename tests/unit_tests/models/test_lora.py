"""Low-rank adapters: against merged weights, PEFT and transformers, over layouts, and through the engine."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mixtures import make_mixture
from tests.roundings import forward_rounding
from torchtitan.config.job_config import JobConfig, Lora
from torchtitan.distributed.placement import ParallelDims, copy_full_, held_part
from torchtitan.errors import UserError
from torchtitan.inference.engines.embedded.engine import Engine
from torchtitan.inference.engines.embedded.weights import AdapterNotApplied
from torchtitan.models import lora
from torchtitan.models.adapter_math import ALPHA, FACTOR_A, FACTOR_B, is_factor
from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_checkpoint import export_policy, load_adapter, load_into, load_policy, save_adapter
from torchtitan.models.layers.attention import PackedAttention, PackedLayout
from torchtitan.models.lora import (
    adapted_modules,
    adapters_off,
    add_adapters,
    base_parameters,
    initialize_adapters,
    merged_weight,
    synced_parameters,
    whole_weights,
)
from torchtitan.models.parallelize import build_policy
from torchtitan.models.shape.checkpoint_shape import trained_parameters
from torchtitan.models.shape.model_args import read_model_args
from torchtitan.trainer.checkpoint import Checkpointer, collect
from torchtitan.trainer.optimizer import BatchLRScheduler, build_optimizer
from torchtitan.trainer.origins import Origins
from torchtitan.trainer.reference import build_reference
from torchtitan.weight_sync.memory.staging import WeightsRefused

TOKENS = torch.arange(3, 31)
LENGTHS = [9, 12, 7]
ALONE = ParallelDims(1, 1, 1, world_size=1)
FACTORS = (FACTOR_A, FACTOR_B)
EVERYTHING = [*Lora().target_modules, "lm_head", "embed_tokens"]


def fill(policy: Decoder, seed: int = 0) -> None:
    """Adapters that change something, the same on any layout."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.named_parameters():
        if is_factor(name) and parameter.requires_grad:
            copy_full_(parameter, 0.2 * torch.randn(parameter.shape, generator=generator))


def adapted(directory: Path, targets: list[str] = EVERYTHING, **settings: Any) -> Decoder:
    policy = load_policy(directory)
    add_adapters(policy, Lora(rank=3, alpha=4.5, target_modules=targets, **settings))
    initialize_adapters(policy, 0)
    fill(policy)
    return policy


def merged(policy: Decoder, directory: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """A plain policy of the same weights."""
    plain = load_policy(directory).to(dtype)
    for name, parameter in plain.named_parameters():
        copy_full_(parameter, merged_weight(policy, name))
    return plain


def hidden_states(policy: Decoder) -> torch.Tensor:
    layout = PackedLayout(LENGTHS)
    return policy.model(TOKENS, layout.positions, PackedAttention(layout))


def log_probs(policy: Decoder) -> torch.Tensor:
    return policy(TOKENS, PackedLayout(LENGTHS), TOKENS.roll(-1))[0]


@pytest.fixture(scope="module")
def untied(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("qwen2", False)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixture(tmp_path_factory.mktemp("mixture"), "qwen3_moe", mlp_only_layers=[])


@pytest.fixture(params=["untied", "mixture"])
def any_base(request: pytest.FixtureRequest) -> Path:
    base: Path = request.getfixturevalue(request.param)
    return base


def test_base_names_stay_and_only_adapters_are_trained(untied: Path) -> None:
    plain, policy = load_policy(untied), load_policy(untied)
    add_adapters(policy, Lora(rank=2, target_modules=["q_proj", "lm_head"], modules_to_save=["norm"]))
    initialize_adapters(policy, 0)
    assert base_parameters(policy).keys() == dict(plain.named_parameters()).keys()
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    modules = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "lm_head"]
    factors = {f"{module}.lora_{letter}.weight" for module in modules for letter in "AB"}
    assert trained == factors | {"model.norm.weight"}
    load_into(policy, untied)
    torch.testing.assert_close(log_probs(policy), log_probs(plain), rtol=0, atol=0)
    optimizer = build_optimizer(policy, JobConfig().optimizer)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(trained)
    assert {name for name in collect(policy, optimizer, 0) if name.startswith("model.")} == {
        f"model.{name}" for name in trained
    }


def test_weights_are_gathered_in_the_type_that_is_asked_for(untied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what adapters are added to, which is rounded once, at the end."""
    policy, gathered = adapted(untied, ["q_proj"]), list[torch.dtype]()
    names = base_parameters(policy)
    expected = {name: whole.to(torch.bfloat16) for name, whole in whole_weights(policy, names)}
    monkeypatch.setattr(lora, "full_tensor", lambda tensor: gathered.append(tensor.dtype) or tensor)
    found = dict(whole_weights(policy, names, torch.bfloat16))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    # Two layers have one weight with two factors each.
    assert Counter(gathered) == {torch.float32: 2 * 3, torch.bfloat16: len(names) - 2}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_forward_equals_merged_weights_in_float64(untied: Path, dropout: float) -> None:
    policy = adapted(untied, dropout=dropout).double()
    plain = merged(policy, untied, torch.float64)
    policy.eval()
    torch.testing.assert_close(hidden_states(policy), hidden_states(plain), rtol=1e-12, atol=1e-12)
    # The head works in fp32.
    torch.testing.assert_close(log_probs(policy), log_probs(plain), rtol=1e-5, atol=1e-5)
    policy.train()
    assert torch.equal(hidden_states(policy), hidden_states(policy)) == (dropout == 0)
    with adapters_off(policy):
        base = hidden_states(policy)
    torch.testing.assert_close(base, hidden_states(load_policy(untied).double()), rtol=0, atol=0)


def test_gradients_of_the_factors_follow_from_the_merged_weights(any_base: Path) -> None:
    """W = W0 + s B A gives ∂B = s ∂W Aᵀ and ∂A = s Bᵀ ∂W."""
    policy = adapted(any_base)
    plain = merged(policy, any_base)
    assert sum(p.numel() for n, p in policy.named_parameters() if is_factor(n)) == counted(any_base)
    weights = torch.randn(len(TOKENS), generator=torch.Generator().manual_seed(1))
    for model in (policy, plain):
        (model(TOKENS, PackedLayout(LENGTHS), TOKENS.roll(-1))[0] * weights).sum().backward()
    for name, module, adapter in adapted_modules(policy):
        a, b = module.get_parameter("lora_A.weight"), module.get_parameter("lora_B.weight")
        gradient = plain.get_parameter(f"{name}.weight").grad
        assert gradient is not None and a.grad is not None and b.grad is not None
        torch.testing.assert_close(b.grad, adapter.scale * gradient @ a.mT, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(a.grad, adapter.scale * b.mT @ gradient, rtol=1e-4, atol=1e-4)
    assert all(parameter.grad is None for parameter in base_parameters(policy).values())


def counted(directory: Path) -> int:
    """Elements of adapters that a configuration says there are."""
    config = config_of(str(directory), {"lora.target_modules": EVERYTHING})
    return trained_parameters(config, read_model_args(directory))[1]


def config_of(directory: str, settings: dict[str, Any]) -> JobConfig:
    """Of a run with adapters for that checkpoint; settings by `table.key`."""
    config = JobConfig()
    config.model.hf_assets_path = directory
    config.compile.backend = "aot_eager"
    config.lora.rank, config.lora.target_modules = 3, [*Lora().target_modules, "lm_head"]
    for key, value in settings.items():
        section, name = key.split(".")
        setattr(getattr(config, section), name, value)
    return config


# PEFT


def peft_log_probs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits = torch.cat([model(row[None]).logits[0] for row in TOKENS.split(LENGTHS)])
    return logits.float().log_softmax(-1).gather(1, TOKENS.roll(-1)[:, None]).squeeze(1)


@pytest.mark.parametrize("saved", [[], ["norm"]])
def test_peft_loads_what_we_save_and_we_load_what_it_saves(untied: Path, tmp_path: Path, saved: list[str]) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    policy = adapted(untied, modules_to_save=saved)
    if saved:
        copy_full_(policy.model.norm.weight, torch.linspace(0.5, 1.5, 64))
    ours = log_probs(policy).detach()
    rounding = forward_rounding(policy.args, ours.abs().max().item())
    save_adapter(policy, tmp_path / "ours", base_model=str(untied))
    base = transformers.AutoModelForCausalLM.from_pretrained(untied)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "ours")
    torch.testing.assert_close(peft_log_probs(model), ours, rtol=0, atol=rounding)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(0.7)
    model.save_pretrained(tmp_path / "theirs")
    expected = peft_log_probs(model)
    assert (expected - ours).abs().max() > 1e-3
    again = adapted(untied, modules_to_save=saved)
    load_adapter(again, tmp_path / "theirs")
    torch.testing.assert_close(log_probs(again).detach(), expected, rtol=0, atol=rounding)
    # Merged, it is a checkpoint like any other.
    export_policy(again, tmp_path / "merged")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(peft_log_probs(plain), expected, rtol=0, atol=rounding)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "minimax_m2"])
def test_peft_computes_with_adapters_of_experts(family: str, tmp_path: Path) -> None:
    """It makes stacks of them, whose numbers are ours, and the same logits."""
    peft = pytest.importorskip("peft")
    import transformers

    directory = make_mixture(tmp_path / "base", family, **{"mlp_only_layers": []} if family == "qwen3_moe" else {})
    policy = adapted(directory, Lora().target_modules)
    ours = policy.logits(TOKENS[None])[0].detach()
    save_adapter(policy, tmp_path / "adapter", base_model=str(directory))
    base = transformers.AutoModelForCausalLM.from_pretrained(directory)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    with torch.no_grad():
        assert (model(TOKENS[None]).logits[0] - ours).abs().max() <= 1e-5
    state, experts = peft.get_peft_model_state_dict(model), policy.model.layers[1].mlp.experts
    stacks = {n.rpartition("experts.")[2]: x for n, x in state.items() if ".layers.1.mlp.experts." in n}
    a, b = ([getattr(experts, f"{n}_proj").get_parameter(f) for n in ("gate", "up", "down")] for f in FACTORS)
    joint = [torch.block_diag(*pair) for pair in zip(b[0], b[1], strict=True)]
    assert torch.equal(stacks["base_layer.lora_A.weight"], torch.cat(a[:2], 1).flatten(0, 1))
    assert torch.equal(stacks["base_layer.lora_B.weight"], torch.stack(joint, -1).flatten(1))
    assert torch.equal(stacks["lora_A.weight"], a[2].flatten(0, 1))
    assert torch.equal(stacks["lora_B.weight"], torch.stack([*b[2]], -1).flatten(1))
    again = adapted(directory, Lora().target_modules)
    initialize_adapters(again, 7)
    load_adapter(again, tmp_path / "adapter")
    assert torch.equal(again.logits(TOKENS[None])[0], ours)


@pytest.mark.parametrize(("family", "tied"), [("llama3", False), ("qwen2", True), ("qwen3", True)])
def test_merged_export_equals_base_and_adapter_in_transformers(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, family: str, tied: bool
) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    directory = tiny_checkpoint(family, tied)
    policy = adapted(directory, Lora().target_modules if tied else EVERYTHING)
    save_adapter(policy, tmp_path / "adapter", base_model=str(directory))
    export_policy(policy, tmp_path / "merged")

    def load(path: Path) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(TOKENS[None]).logits[0]

    base = logits(load(directory))
    with_adapter = peft.PeftModel.from_pretrained(load(directory), tmp_path / "adapter")
    expected = logits(with_adapter)
    assert (expected - base).abs().max() > 0.1
    # Both compute in float64: all that is rounded to fp32, and once, are the merged weights of the first.
    rounding = forward_rounding(policy.args, expected.abs().max().item()) / 2
    torch.testing.assert_close(logits(load(tmp_path / "merged")), expected, rtol=0, atol=rounding)
    torch.testing.assert_close(logits(with_adapter.merge_and_unload()), expected, rtol=0, atol=rounding)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"layers_to_transform": [0]}, r"adapts q_proj, v_proj in some layers only \(layers_to_transform\)"),
        ({"target_modules": r".*\.[12]\..*(q|v)_proj"}, "adapts q_proj, v_proj in some layers only"),
        ({"exclude_modules": r".*0.*v_proj"}, "adapts v_proj in some layers only"),
        ({"trainable_token_indices": [3]}, r"trainable_token_indices = \[3\] is not supported"),
        ({"trainable_token_indices": {"embed_tokens": [3]}}, "trainable_token_indices = "),
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"layers_to_transform": [0, 1, 2]}, ""),
    ],
)
def test_adapters_of_peft_that_are_no_plain_ones_are_to_be_merged_first(
    untied: Path, tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    settings = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **options}
    base = transformers.AutoModelForCausalLM.from_pretrained(untied)
    peft.get_peft_model(base, peft.LoraConfig(**settings)).save_pretrained(tmp_path)
    policy = adapted(untied, ["q_proj", "v_proj"])
    assert policy.lora is not None
    policy.lora.rank, policy.lora.alpha = 3, 6.0
    if not text:
        load_adapter(policy, tmp_path)
        return
    with pytest.raises(UserError, match=rf"{text}.*: merge it into its base with PEFT"):
        load_adapter(policy, tmp_path)


def test_an_adapter_names_its_base_wherever_it_is_used(
    untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "current").symlink_to(untied)
    monkeypatch.chdir(tmp_path)
    policy = adapted(untied, ["q_proj"])
    assert policy.lora is not None
    save_adapter(policy, tmp_path / "q", base_model="models/current")
    written = json.loads((tmp_path / "q" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(untied.resolve()) and "quantization_config" not in written
    policy.lora.base_bits = 4
    save_adapter(policy, tmp_path / "q")
    written = json.loads((tmp_path / "q" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] is None
    assert written["quantization_config"]["load_in_4bit"]
    assert written["quantization_config"]["bnb_4bit_quant_type"] == "nf4"
    load_adapter(policy, tmp_path / "q")
    assert not caplog.text
    policy.lora.base_bits = 16
    load_adapter(policy, tmp_path / "q")
    assert "was trained on a base in four bits, which lora.base_bits = 4 gives it again" in caplog.text


def test_adapters_that_do_not_fit_are_refused(untied: Path, tmp_path: Path) -> None:
    policy = adapted(untied, ["q_proj"])
    save_adapter(policy, tmp_path / "q")
    with pytest.raises(UserError, match="lacks .*lora.target_modules"):
        load_adapter(adapted(untied, ["q_proj", "k_proj"]), tmp_path / "q")
    save_adapter(adapted(untied, ["q_proj", "k_proj"]), tmp_path / "both")
    with pytest.raises(UserError, match="has .*lora.target_modules"):
        load_adapter(policy, tmp_path / "both")
    config = tmp_path / "q" / "adapter_config.json"
    for change, text in (
        ({"r": 8}, "set lora.rank = 8"),
        ({"lora_alpha": 9}, "lora.alpha = 9"),
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"target_parameters": ["down_proj"]}, "target_parameters"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = 'pissa_niter_4' is not supported"),
        ({"alora_invocation_tokens": [7, 8]}, "alora_invocation_tokens"),
    ):
        before = config.read_text()
        config.write_text(json.dumps(json.loads(before) | change))
        with pytest.raises(UserError, match=text):
            load_adapter(policy, tmp_path / "q")
        config.write_text(before)


# The engine


def synced(policy: Decoder) -> dict[str, torch.Tensor]:
    held = {name: held_part(tensor)[1] for name, tensor in synced_parameters(policy).items()}
    return {name: tensor.detach().clone() for name, tensor in held.items() if tensor is not None}


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: parameter.clone() for name, parameter in engine.policy.named_parameters()}


def assert_holds(engine: Engine, policy: Decoder) -> None:
    for name, parameter in engine.policy.named_parameters():
        torch.testing.assert_close(parameter, merged_weight(policy, name), rtol=0, atol=1e-6, msg=name)


def test_engine_merges_adapters_and_never_accumulates(any_base: Path) -> None:
    engine = Engine(load_policy(any_base), 8, 64)
    first, second = adapted(any_base), adapted(any_base, ["q_proj", "down_proj"], modules_to_save=["norm"])
    copy_full_(second.model.norm.weight, torch.linspace(0.5, 1.5, 64))
    seconds = engine.apply_weights("epoch", 1, synced(first))
    assert seconds > 0 and engine.version == 1
    assert_holds(engine, first)
    figures = engine.weights.figures
    norm = sum((merged_weight(first, n) - p).square().sum() for n, p in load_policy(any_base).named_parameters()) ** 0.5
    assert figures["adapter_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert figures["adapter_applied_norm"] == pytest.approx(float(norm), rel=1e-4)
    once = weights(engine)
    # Other targets: what the first version had adapted is the base's again.
    engine.apply_weights("epoch", 2, synced(second))
    assert_holds(engine, second)
    engine.apply_weights("epoch", 3, synced(first))
    assert all(torch.equal(once[name], tensor) for name, tensor in weights(engine).items())
    # Fewer bytes by far than all weights.
    small = sum(tensor.numel() for tensor in synced(adapted(any_base, ["q_proj"])).values())
    assert small < 0.05 * sum(parameter.numel() for parameter in base_parameters(first).values())


def test_engine_refuses_adapters_that_do_not_fit(untied: Path) -> None:
    engine = Engine(load_policy(untied), 8, 64)
    good = synced(adapted(untied))
    before = weights(engine)
    name = "model.layers.0.mlp.up_proj.lora_B.weight"
    # What else does not fit: test_versions.py.
    with pytest.raises(WeightsRefused, match="and None do not make model.layers.0.mlp.up_proj"):
        engine.apply_weights("epoch", 1, {key: value for key, value in good.items() if key != name})
    assert not engine.poisoned and all(torch.equal(before[n], t) for n, t in weights(engine).items())
    # A whole version takes the base away.
    engine.apply_weights("epoch", 1, before)
    with pytest.raises(WeightsRefused, match="restart this actor"):
        engine.apply_weights("epoch", 2, good)


def test_engine_notices_an_adapter_that_is_not_in_its_weights(untied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(load_policy(untied), 8, 64)
    good = synced(adapted(untied))
    lost = engine.policy.model.layers[1].mlp.down_proj
    with monkeypatch.context() as patch:
        # The engine's forward uses another tensor than the one that is written to.
        aliases = dict(engine.weights.live)
        parameters = {
            name: parameter.clone() if parameter is lost.weight else parameter for name, parameter in aliases.items()
        }

        class Unwritten(torch.Tensor):
            def copy_(self, *arguments: Any, **options: Any) -> torch.Tensor:  # type: ignore[override]
                return self

        parameters["model.layers.1.mlp.down_proj.weight"] = lost.weight.detach().clone().as_subclass(Unwritten)
        patch.setattr(engine.weights.sets, "live", parameters)
        with pytest.raises(AdapterNotApplied, match="layers.1.mlp.down_proj.weight: .* differs from base"):
            engine.apply_weights("epoch", 1, good)
    assert engine.poisoned


def test_bfloat16_carries_alpha_and_merges(untied: Path) -> None:
    policy = adapted(untied)
    policy.lora = Lora(rank=3, alpha=100 / 7)
    sent = {name: tensor.bfloat16() for name, tensor in synced(policy).items()}
    assert float(sent[ALPHA].double().sum()) == pytest.approx(100 / 7, rel=1e-7)
    engine = Engine(load_policy(untied, torch.bfloat16), 8, 64)
    engine.apply_weights("epoch", 1, sent)
    figures = engine.weights.figures
    assert figures["adapter_applied_norm"] == pytest.approx(figures["adapter_norm"], rel=0.01)


# The reference


def test_reference_is_the_base_model(untied: Path) -> None:
    config = config_of(str(untied), {})
    policy = build_policy(config, ALONE)
    fill(policy)
    ours = log_probs(policy)
    plain = log_probs(load_policy(untied))
    reference = build_reference(config, ALONE, policy)
    assert reference.policy is policy and not reference.follows
    with reference.active():
        torch.testing.assert_close(log_probs(reference.policy), plain, rtol=0, atol=0)
    torch.testing.assert_close(log_probs(policy), ours, rtol=0, atol=0)
    # What is trained whole cannot be switched off.
    config.lora.modules_to_save = ["norm"]
    second = build_reference(config, ALONE, policy)
    assert second.policy is not policy and second.policy.lora is None
    assert config.lora.rank == 3


@pytest.mark.parametrize("whole", [[], ["norm"]])
def test_reference_is_what_the_adapters_began_with(untied: Path, tmp_path: Path, whole: list[str]) -> None:
    before = build_policy(config_of(str(untied), {"lora.modules_to_save": whole}), ALONE)
    fill(before)
    save_adapter(before, tmp_path / "start")
    start = log_probs(merged(before, untied))
    settings = {"grpo.kl_coefficient": 0.1, "lora.dropout": 0.5, "lora.adapter_path": str(tmp_path / "start")}
    config = config_of(str(untied), settings | {"lora.modules_to_save": whole})

    def attach() -> tuple[Decoder, Checkpointer]:
        policy = build_policy(config, ALONE)
        optimizer = build_optimizer(policy, config.optimizer)
        scheduler = BatchLRScheduler(optimizer, config.lr_scheduler, 10)
        run = tmp_path / "run"
        return policy, Checkpointer(
            config.checkpoint, run, policy, optimizer, scheduler, origins=Origins(config, policy.args)
        )

    def assert_is_start(policy: Decoder) -> None:
        reference = build_reference(config, ALONE, policy)
        assert (reference.policy is policy) == (not whole)
        with reference.active():
            # Filled like this, logits are so large that what is merged differs by up to 3e-4 on some processors.
            torch.testing.assert_close(log_probs(reference.policy), start, rtol=1e-5, atol=1e-3)

    policy, checkpointer = attach()
    fill(policy, seed=1)
    assert_is_start(policy)
    # Nobody else sees the copies.
    assert synced(policy).keys() == synced(before).keys()
    assert base_parameters(policy).keys() == base_parameters(before).keys()
    checkpointer.save(1)
    save_adapter(policy, tmp_path / "after")
    resumed, other = attach()
    other.load()
    assert_is_start(resumed)
    torch.testing.assert_close(synced(resumed), synced(policy), rtol=0, atol=0)
    for config.lora.adapter_path in ("", str(tmp_path / "after")):
        with pytest.raises(UserError, match="resume with lora.adapter_path as it stands"):
            attach()[1].load()
