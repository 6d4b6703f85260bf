"""Every family of decoders against transformers: logits, gradients, files, and the embedded engine."""

from __future__ import annotations

import functools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.roundings import forward_rounding
from tests.tiny_models import make_tiny
from torchtitan.errors import UserError
from torchtitan.inference.engines.embedded.engine import Engine
from torchtitan.inference.types import GenerateRequest, SamplingParameters
from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_checkpoint import export_policy, load_policy
from torchtitan.models.layers.attention import PackedLayout
from torchtitan.models.layers.elementwise import inverse_frequencies, rotary_tables
from torchtitan.models.shape.families import FAMILIES, Rope, Scaling, read_ropes
from torchtitan.models.shape.model_args import ModelArgs, read_model_args

LAYERS = 4
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
# Model type, and what its config.json says beside sizes. Windows are shorter than the sequences.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, scaled": ("llama", {"rope_parameters": {**YARN, "rope_type": "llama3", **BANDS}}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "mistral": ("mistral", {"sliding_window": 9, "head_dim": 32}),
    "mistral, yarn": ("mistral", {"sliding_window": None, "rope_parameters": YARN}),
    "llama, linear, biases": ("llama", {"rope_parameters": LINEAR, "attention_bias": True, "mlp_bias": True}),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {"sliding_window": 9, "rope_parameters": {"full_attention": YARN, "sliding_attention": DEFAULT}},
    ),
    "smollm3": ("smollm3", {}),
    "glm4": ("glm4", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 20}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 5.0,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {**LINEAR, "rope_theta": 1e6},
                "sliding_attention": DEFAULT,
            },
        },
    ),
    # The experts of this one are compared in test_moe.py.
    "deepseek_v3, dense": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "attention_bias": True,
            "first_k_dense_replace": LAYERS,
            "num_experts_per_tok": 2,
        },
    ),
    "phi3": ("phi3", {"sliding_window": 11}),
    "phi3, partial": ("phi3", {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.1,
            "logits_scaling": 4.0,
            "attention_bias": True,
        },
    ),
}
# Their activation's and soft caps' tanh may differ in the last bit by where in a vector a number lies.
ROUNDED = ("gemma2", "gemma3")


@functools.cache
def make_family_checkpoint(case: str, folder: Path) -> Path:
    """A tiny random checkpoint as transformers writes it, nothing of which is at its default."""
    family, further = CASES[case]
    config = {"num_hidden_layers": LAYERS, **further}
    return make_tiny(folder / case.replace(", ", "-"), family, not FAMILIES[family].zero_norms, **config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def _reference(directory: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )


@pytest.mark.parametrize("case", CASES)
def test_logits_gradients_and_files_are_those_of_transformers(case: str, folder: Path, tmp_path: Path) -> None:
    directory = make_family_checkpoint(case, folder)
    reference, policy = _reference(directory), load_policy(directory)
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(0, 128, (2, 60), generator=generator)
    by = torch.randn(2, 60, 128, generator=generator) / 100
    expected, found = reference(token_ids).logits, policy.logits(token_ids)
    assert expected.abs().max() > 1
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())
    (expected * by).sum().backward()
    (found * by).sum().backward()
    reference_parameters, ours = dict(reference.named_parameters()), dict(policy.named_parameters())
    assert reference_parameters.keys() == ours.keys()
    for name, parameter in ours.items():
        gradient = reference_parameters[name].grad
        assert parameter.grad is not None and gradient is not None and gradient.abs().max() > 0, name
        assert (parameter.grad - gradient).abs().max() <= 1e-5 * max(1.0, gradient.abs().max().item()), name
    export_policy(policy, tmp_path / "export")
    again = load_policy(tmp_path / "export")
    original, written = (load_file(path / "model.safetensors") for path in (directory, tmp_path / "export"))
    assert original.keys() == written.keys() == ours.keys()
    assert all(torch.equal(original[name], written[name]) for name in original)
    assert read_model_args(tmp_path / "export") == read_model_args(directory)
    with torch.no_grad():
        assert torch.equal(again.logits(token_ids), found)
        assert torch.equal(_reference(tmp_path / "export")(token_ids).logits, expected)


# As transformers 4 wrote them, and as these families are published; None: not there.
OLDER: dict[str, dict[str, Any]] = {
    "olmo3": {"rope_theta": 5e5, "rope_scaling": {key: value for key, value in YARN.items() if key != "rope_theta"}},
    "gemma3": {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "deepseek_v3, dense": {"head_dim": None},
    # What stands outside counts.
    "qwen2, tied": {"rope_scaling": YARN, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("case", OLDER)
def test_an_older_config_means_what_transformers_takes_it_for_also_exported(
    case: str, folder: Path, tmp_path: Path
) -> None:
    directory = shutil.copytree(make_family_checkpoint(case, folder), tmp_path / "older")
    config = json.loads((directory / "config.json").read_text()) | OLDER[case]
    gone = {"rope_parameters", *(key for key, value in OLDER[case].items() if value is None)}
    (directory / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key not in gone}))
    policy, token_ids = load_policy(directory), torch.arange(120).view(2, 60)
    export_policy(policy, tmp_path / "export")
    with torch.no_grad():
        expected = _reference(directory)(token_ids).logits
        assert (policy.logits(token_ids) - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())
        assert torch.equal(_reference(tmp_path / "export")(token_ids).logits, expected)


@pytest.mark.parametrize("case", CASES)
def test_head_and_engine_give_the_trainers_log_probs(case: str, folder: Path) -> None:
    directory = make_family_checkpoint(case, folder)
    trainer = load_policy(directory)
    prompts = [[5, 9, 3], list(range(20, 50)), [7] * 12]
    engine = Engine(load_policy(directory), 8, 128, ())
    asked = [GenerateRequest(str(i), prompt, SamplingParameters(24, n=2, seed=i)) for i, prompt in enumerate(prompts)]
    answers = engine.generate(asked)
    ids: list[int] = []
    lengths, places, sampled = [], [], []
    for prompt, group in zip(prompts, answers, strict=True):
        for completion in group:
            places += range(len(ids) + len(prompt) - 1, len(ids) + len(prompt) + len(completion.token_ids) - 1)
            ids += prompt + completion.token_ids
            lengths.append(len(prompt) + len(completion.token_ids))
            sampled += completion.log_probs
    tokens, rows = torch.tensor(ids), torch.tensor(places)
    with torch.no_grad():
        found, _ = trainer(tokens, PackedLayout(lengths), tokens.roll(-1)[rows], rows=rows)
        logits = torch.cat([_reference(directory)(row[None]).logits[0] for row in tokens.split(lengths)])
    expected = logits.log_softmax(-1).gather(-1, tokens.roll(-1)[:, None])[rows, 0]
    allowed = 2 * forward_rounding(trainer.args, float(logits.abs().max()))
    assert (found - expected).abs().max() <= allowed
    difference = (torch.tensor(sampled) - found).abs().max().item()
    print(f"{case}: engine and trainer differ by {difference:.1e}")
    assert difference <= (allowed if case in ROUNDED or engine.sizes.unmet else 0.0)


@pytest.mark.parametrize(
    "parameters",
    [
        LINEAR,
        YARN,
        {**YARN, "attention_factor": 0.9, "beta_fast": 20, "beta_slow": 2},
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False},
        {**YARN, "factor": 40.0, "rope_theta": 150000.0, "original_max_position_embeddings": 4096},
    ],
)
@pytest.mark.parametrize("width", [16, 128])
def test_scaled_positions_are_those_of_transformers(parameters: dict[str, Any], width: int) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(head_dim=width, rope_parameters=dict(parameters), max_position_embeddings=8192)
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
    (rope, _), _ = read_ropes({"model_type": "llama", "rope_parameters": parameters, "max_position_embeddings": 8192})
    torch.testing.assert_close(inverse_frequencies(rope, width, "cpu"), expected, rtol=1e-6, atol=0)
    assert getattr(rope.scaling, "attention_factor", 1.0) == pytest.approx(factor, rel=1e-6)


def test_tables_of_rotary_positions() -> None:
    scaling = Scaling("llama3", 8.0, 64)
    args = ModelArgs("gemma3_text", 8, 16, 8, 2, 2, 2, 8, rope_scaling=scaling, sliding_rope=Rope(100.0))
    (_, _), (cosine, sine) = rotary_tables(args, torch.tensor([3]), torch.float64)
    angle = 3 * 100.0 ** (-2 / 8)
    assert cosine[0, 0, 1].item() == pytest.approx(math.cos(angle), rel=1e-6)
    assert sine[0, 0, 5].item() == -sine[0, 0, 1].item() == pytest.approx(math.sin(angle), rel=1e-6)


SIZES = {
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_of_a_config_are_those_of_transformers(family: str) -> None:
    import transformers

    config = {**SIZES, "num_hidden_layers": 8, "num_experts_per_tok": 1, "num_attention_heads": 64, "hidden_size": 640}
    if family in ("qwen3_moe", "glm4_moe"):
        config["head_dim"] = 4  # every checkpoint of them says it, and transformers has none of its own any more
    config |= {"num_experts": 2, "num_local_experts": 2, "n_routed_experts": 2, "moe_intermediate_size": 8}
    if FAMILIES[family].keys[:1] != ("num_experts",):
        config = {key: value for key, value in config.items() if "expert" not in key and "moe" not in key}
    whole = transformers.AutoConfig.for_model(family, **config).to_dict()
    found, expected = (
        ModelArgs.from_hf_config({**given, "model_type": family, "bos_token_id": None, "eos_token_id": None})
        for given in (config, json.loads(json.dumps(whole)))
    )
    assert found == expected


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' in config.json is not supported; supported: llama, qwen2"),
        ({"quantization_config": {"bits": 4}, "clip_qkv": 8.0}, "clip_qkv = 8.0, quantization_config = {'bits': 4}"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' in config.json is not supported; supported: silu"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types linear_attention in config.json"),
        ({"layer_types": ["full_attention"]}, "names 1 of 2 layers"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' in config.json"),
        ({"rope_parameters": {**YARN, "finetuned": True}}, "finetuned = True in config.json: not honoured"),
        ({"model_type": "glm4_moe", "scoring_func": "softmax"}, "scoring_func = 'softmax' in config.json"),
        (
            {"rms_norm_eps": "1e-6", "head_dim": 4.0},
            "in config.json head_dim must be a whole number, not 4.0, rms_norm",
        ),
        ({"tie_word_embeddings": "false"}, 'tie_word_embeddings must be true or false, not "false"'),
        ({"rms_norm_eps": None, "eos_token_id": ["2"]}, 'numbers, not ["2"], rms_norm_eps must be a number, not null'),
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"rope_scaling": {**LINEAR, "factor": "8"}}, 'factor must be a number, not "8"'),
        (
            {"model_type": "smollm3", "no_rope_layer_interval": 0},
            "no_rope_layer_interval in config.json must be 1 or more",
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers in config.json names 1 of 2 layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 in config.json is not supported for llama"),
        ({"rope_parameters": DEFAULT, "rope_scaling": YARN}, "rope_parameters and rope_scaling in config.json differ"),
        ({"rope_parameters": YARN, "rope_scaling": YARN, "partial_rotary_factor": 1.0}, ""),
        ({"model_type": "granite", "use_sliding_window": False, "attention_multiplier": None}, ""),
        # Text that transformers or another library has noted for itself; other private keys may mean something.
        ({"_model_name_or_path": "org/model", "_attn_implementation": "sdpa"}, ""),
        ({"_window_every": 4}, "_window_every = 4 in config.json: the decoder does not honour that"),
        # SmolLM2
        ({"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}}, ""),
    ],
)
def test_config_keys_without_support_are_refused_by_name(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, **changes}))
    if not said:
        read_model_args(tmp_path)
        return
    with pytest.raises(UserError) as refused:
        read_model_args(tmp_path)
    assert said in str(refused.value)


@pytest.mark.parametrize("case", CASES)
def test_sizes_are_counted(case: str, folder: Path) -> None:
    args = read_model_args(make_family_checkpoint(case, folder))
    with torch.device("meta"):
        policy = Decoder(args)
    assert args.num_parameters() == sum(parameter.numel() for parameter in policy.parameters())
