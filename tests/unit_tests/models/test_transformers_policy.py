"""Models that transformers computes, with our attention of packs and our head: against transformers' own forward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.policies import check_named_as_files
from tests.tiny_models import make_tiny
from tests.unit_tests.distributed.test_parallel import Layout, check_layouts
from torchtitan.config.job_config import JobConfig
from torchtitan.distributed.placement import ParallelDims
from torchtitan.errors import UserError
from torchtitan.models.hf_checkpoint import export_policy, load_into, save_adapter
from torchtitan.models.layers.attention import PackedLayout, packed_attention
from torchtitan.models.lora import synced_parameters
from torchtitan.models.parallelize import build_policy
from torchtitan.models.shape.checkpoint_shape import ForeignArgs, read_args, read_shape
from torchtitan.models.transformers_policy import TransformersPolicy, check_packing
from torchtitan.preflight.check import Check
from torchtitan.preflight.model import check_model, check_stage

LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24}
# Layer norms with biases, multipliers of logits, windows, sinks, latent attention, stacked experts.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "starcoder2": ("starcoder2", {"sliding_window": 9, "residual_dropout": 0.1, "embedding_dropout": 0.1}),
    "cohere": ("cohere", {"logit_scale": 0.25, "tie_word_embeddings": True}),
    "gpt_oss": ("gpt_oss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 4.0}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **LATENT,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "phi3": ("phi3", {"sliding_window": 11}),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 9, "final_logit_softcapping": 5.0},
    ),
    "seed_oss": ("seed_oss", {"head_dim": 16}),
    # Has numbers without a dimension in its files.
    "apertus": ("apertus", {}),
}
LENGTHS = [37, 5, 60]


def make_foreign(case: str, directory: Path, **overrides: Any) -> Path:
    family, further = CASES[case]
    return make_tiny(directory, family, **{**further, **overrides})


def load_foreign(directory: Path) -> TransformersPolicy:
    args = read_args(directory, "transformers")
    assert isinstance(args, ForeignArgs)
    policy = TransformersPolicy(args)
    policy.to_empty(device="cpu")
    policy.tie_weights()
    load_into(policy, directory)
    return policy.train()


@pytest.fixture(scope="module", params=list(CASES))
def foreign(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_foreign(request.param, tmp_path_factory.mktemp("foreign") / request.param)


def test_windows_that_count_are_those_that_layers_ask_for(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def spied(*inputs: Any, window: int, **named: Any) -> torch.Tensor:
        asked.append(window)
        return packed_attention(*inputs, window=window, **named)

    monkeypatch.setattr("torchtitan.models.transformers_policy.packed_attention", spied)
    policy = load_foreign(foreign)
    with torch.no_grad():
        policy(torch.arange(20), PackedLayout([20]), torch.arange(20))
    assert asked == [policy.args.window(layer) for layer in range(len(policy.layers))]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")  # two may add up in another order where a weight lies elsewhere in memory
def test_log_probs_gradients_and_files_are_those_of_transformers(foreign: Path, tmp_path: Path) -> None:
    import transformers

    tokens = torch.randint(2, 128, (sum(LENGTHS),), generator=torch.Generator().manual_seed(5))
    targets = tokens.roll(-1)
    reference, exact = (
        transformers.AutoModelForCausalLM.from_pretrained(
            foreign, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        for dtype in (torch.float32, torch.float64)
    )
    logits, exactly = (
        torch.cat([model(sequence[None], use_cache=False).logits[0] for sequence in tokens.split(LENGTHS)])
        for model in (reference, exact)
    )
    expected, true = (output.log_softmax(-1).gather(-1, targets[:, None])[:, 0] for output in (logits, exactly))
    policy = load_foreign(foreign)
    found, _ = policy(tokens, PackedLayout(LENGTHS), targets)
    assert expected.std() > 0.3
    assert (found - expected).abs().max() <= 2e-5
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)) / len(tokens)
    for log_probs in (expected, true, found):
        (log_probs * weights).sum().backward()
    ours, wanted, precise = (dict(model.named_parameters()) for model in (policy, reference, exact))
    assert ours.keys() == wanted.keys()
    for name, parameter in ours.items():
        by = wanted[name].grad if wanted[name].grad is not None else torch.zeros_like(parameter)
        # Some processors' kernels round so that transformers itself is farther from float64.
        rounding = 0.0 if precise[name].grad is None else (by - precise[name].grad).abs().max().item()
        assert (parameter.grad - by).abs().max() <= max(1e-5 * max(1.0, by.abs().max().item()), rounding), name
    check_packing(policy, 1e-4)

    export_policy(policy, tmp_path / "export")
    original, written = (load_file(folder / "model.safetensors") for folder in (foreign, tmp_path / "export"))
    assert original.keys() == written.keys()
    assert all(torch.equal(original[name], written[name]) for name in original)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export", attn_implementation="eager").eval()
    assert torch.equal(torch.cat([again(x[None], use_cache=False).logits[0] for x in tokens.split(LENGTHS)]), logits)
    assert policy.args.num_parameters() == sum(tensor.numel() for tensor in original.values())


def test_versions_are_named_as_files_and_copy_no_stack(foreign: Path) -> None:
    check_named_as_files(load_foreign(foreign), foreign)


@pytest.mark.slow
def test_ranks_agree_with_one(tmp_path: Path) -> None:
    directory = make_foreign("olmoe", tmp_path / "checkpoint")
    layouts: list[Layout] = [
        {"name": "fsdp, recomputed", "activation_checkpoint.mode": "full"},
        {"name": "replicas", "parallelism.data_parallel_replicate_degree": 2},
    ]
    check_layouts("distributed.test_expert_parallel:compare", 2, directory, layouts, tmp_path)


def test_adapters_are_those_of_peft(tmp_path: Path) -> None:
    import peft
    import transformers

    config = JobConfig()
    config.model.hf_assets_path = str(make_foreign("starcoder2", tmp_path / "base"))
    config.lora.rank, config.lora.target_modules = 4, ["q_proj", "o_proj", "c_fc", "lm_head"]
    policy = build_policy(config, ParallelDims(1, 1, 1, 1))
    for name, parameter in policy.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    save_adapter(policy, tmp_path / "adapter")
    modules = {name.rpartition(".lora_")[0] for name in synced_parameters(policy)} - {"", "lm_head"}
    assert len(modules) == 3 * 3
    assert {f"{module}.weight" for module in modules} <= load_file(tmp_path / "base" / "model.safetensors").keys()
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    reference, tokens = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval(), torch.arange(20)
    with torch.no_grad():
        expected, found = reference(tokens[None]).logits[0], policy(tokens, PackedLayout([20]))
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_head_that_transformers_would_make_anew_is_refused(tmp_path: Path) -> None:
    """Neither config.json nor the files say that it is the embedding, which this family does not take it for."""
    directory = make_foreign("seed_oss", tmp_path)
    config, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    del config["tie_word_embeddings"], tensors["lm_head.weight"]
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="has no head in its files, for which tie_word_embeddings in config.json must"):
        load_foreign(directory)


def test_layers_that_the_file_does_not_name_are_refused_by_name(tmp_path: Path) -> None:
    """Convolutions of LFM2, as its first config.json had them: two tokens of a sequence would see the one before it."""
    make_tiny(tmp_path, "lfm2", full_attn_idxs=[0])
    config = json.loads((tmp_path / "config.json").read_text())
    del config["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"full_attn_idxs": [0]}))
    with pytest.raises(UserError, match="conv in config.json: not trained with"):
        load_foreign(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "linear_attention in config.json: not trained with"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic in config.json: not trained with"),
        ({"quantization_config": {"bits": 4}}, "quantization_config in config.json"),
        ({"hidden_size": None}, "lacks hidden_size: no decoder of text alone"),
        ({"model_type": "no_such_model"}, "cannot make a model of its config.json"),
        ({"rms_norm_eps": "small"}, "cannot make a model of its config.json"),
    ],
)
def test_untrained_features_of_foreign_layers_are_refused_by_name(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    directory = make_foreign("seed_oss", tmp_path)
    config = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=said):
        load_foreign(directory)


@pytest.mark.parametrize(
    ("mixed", "tolerance"),
    # The second one is lost in the mean over all tokens: one of a sequence's sees the one before it.
    [(lambda out: out.cumsum(1), 1e-4), (lambda out: 0.01 * out.roll(1, 1), 0.012)],
)
def test_a_model_that_mixes_sequences_is_refused(mixed: Any, tolerance: float, tmp_path: Path) -> None:
    policy = load_foreign(make_foreign("starcoder2", tmp_path))
    check_packing(policy, 1e-4)
    embed = policy.hf.get_input_embeddings()
    embed.register_forward_hook(lambda _, __, out: out + mixed(out))
    with pytest.raises(UserError, match="'starcoder2' cannot be trained here: two sequences in one pack"):
        check_packing(policy, tolerance)


def test_settings_that_foreign_layers_lack_are_all_refused_at_once(tmp_path: Path) -> None:
    config = JobConfig()
    config.model.hf_assets_path = str(make_foreign("olmoe", tmp_path))
    (tmp_path / "tokenizer.json").touch()
    config.parallelism.tensor_parallel_degree, config.compile.enable, config.training.seq_len = 2, True, 64
    check = Check(config, 2, planning=False)
    check_model(check)
    assert {problem.key for problem in check.problems} == {
        *("parallelism.tensor_parallel_degree", "compile.enable", "inference.backend"),
    }
    args = read_shape(config)
    assert args is not None
    # Two of four experts for each token, and no embedding.
    assert args.weights_per_token()["experts"] == 3 * 2 * 3 * 64 * 96
    assert args.num_parameters() - args.module_parameters()["experts"] < 100_000
    config.model.implementation, config.lora.rank = "transformers", 4
    config.model.hf_assets_path = str(make_foreign("deepseek_v3", tmp_path / "shared"))
    (tmp_path / "shared" / "tokenizer.json").touch()
    check_model(check)
    message = "PEFT has no adapters of these beside the experts of deepseek_v3: leave out gate_proj, up_proj, down_proj"
    assert any(message in problem.text for problem in check.problems)
    config.model.hf_assets_path, config.model.implementation = str(tmp_path), "native"
    with pytest.raises(UserError, match="model_type 'olmoe' in config.json is not supported"):
        read_shape(config)


def test_a_teacher_of_its_layers_refuses_what_they_lack(tmp_path: Path) -> None:
    config = JobConfig()
    config.model.hf_assets_path = str(make_tiny(tmp_path / "policy", "qwen3", head_dim=16))
    config.job.stage, config.distill.teacher = "distill", str(make_foreign("seed_oss", tmp_path / "teacher"))
    (tmp_path / "teacher" / "tokenizer.json").touch()
    config.training.seq_len = 64
    check = Check(config, 2, planning=False)
    check_stage(check)
    keys = {problem.key for problem in check.problems}
    config.parallelism.tensor_parallel_degree, config.compile.enable = 2, True
    check = Check(config, 2, planning=False)
    check_stage(check)
    added = {problem.key for problem in check.problems} - keys
    assert added == {"parallelism.tensor_parallel_degree", "compile.enable"}
