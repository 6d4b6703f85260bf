"""The text model of a composite checkpoint: against transformers' own composite, which is given text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.composites import COMPOSITES, make_composite
from tests.distributed_launcher import run_distributed
from torchtitan.config.job_config import JobConfig
from torchtitan.distributed import device
from torchtitan.distributed.placement import ParallelDims, copy_full_, full_tensor
from torchtitan.errors import UserError
from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_checkpoint import checkpoint_dtype, export_policy, load_adapter, load_policy, save_adapter
from torchtitan.models.layers.attention import PackedLayout
from torchtitan.models.lora import synced_parameters
from torchtitan.models.parallelize import build_policy
from torchtitan.models.shape.checkpoint_files import tensor_files
from torchtitan.models.shape.checkpoint_shape import FLAVORS, ForeignArgs, model_facts, read_args
from torchtitan.models.shape.composite import text_config
from torchtitan.models.shape.untrained_files import prediction_heads
from torchtitan.trainer.job import TrainingJob
from torchtitan.utils.json_lines import EventLog, read_json_lines

LENGTHS = [37, 5, 60]
TOKENS = torch.randint(2, 128, (sum(LENGTHS),), generator=torch.Generator().manual_seed(5))
# The layers of these are transformers' own.
FOREIGN = ("gemma4",)
# Those of transformers mix the sequences of a pack.
NATIVE = ("qwen3_5", "qwen3_5_moe")
TP = {"parallelism.tensor_parallel_degree": 2}


@pytest.fixture(scope="module", params=list(COMPOSITES))
def composite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_composite(tmp_path_factory.mktemp("composites") / request.param, request.param)


def _config(directory: Path, settings: dict[str, Any] | None = None) -> JobConfig:
    config = JobConfig()
    config.model.hf_assets_path = str(directory)
    for key, value in (settings or {}).items():
        section, name = key.split(".")
        setattr(getattr(config, section), name, value)
    return config


def _load(directory: Path, dtype: torch.dtype) -> Any:
    import transformers

    return transformers.AutoModelForImageTextToText.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def _log_probs(model: Any) -> torch.Tensor:
    logits = torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in TOKENS.split(LENGTHS)])
    return logits.log_softmax(-1).gather(-1, TOKENS.roll(-1)[:, None])[:, 0]


def _gradient_of(gradients: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """That of one of our parameters among those of transformers' composite."""
    name = name.replace(".shared_experts.", ".shared_expert.")
    name = f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name
    stack, in_stack, leaf = name.partition(".mlp.experts.")
    if not in_stack or leaf in ("gate_up_proj", "down_proj"):
        return gradients[name]
    projection = leaf.partition("_proj")[0]
    if projection == "down":
        return gradients[f"{stack}.mlp.experts.down_proj"]
    return gradients[f"{stack}.mlp.experts.gate_up_proj"].chunk(2, 1)[projection == "up"]


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in {*tensor_files(directory).values()} for name, tensor in load_file(path).items()}


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")  # two may add up in another order where a weight lies elsewhere in memory
@pytest.mark.parametrize("implementation", ["auto", pytest.param("transformers", marks=pytest.mark.exhaustive)])
def test_text_of_a_composite_gives_log_probs_gradients_and_exports_as_transformers(
    composite: Path, implementation: str, tmp_path: Path
) -> None:
    config = _config(composite, {"model.implementation": implementation})
    if implementation == "transformers" and composite.name in NATIVE:
        with pytest.raises(UserError, match="linear_attention in config.json"):
            build_policy(config, ParallelDims(1, 1, 1, 1))
        return
    policy = build_policy(config, ParallelDims(1, 1, 1, 1))
    assert isinstance(policy.args, ForeignArgs) == (composite.name in FOREIGN or implementation == "transformers")
    found, _ = policy(TOKENS, PackedLayout(LENGTHS), TOKENS.roll(-1))
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)) / len(TOKENS)
    (found * weights).sum().backward()
    reference, exact = (_load(composite, dtype) for dtype in (torch.float32, torch.float64))
    rounded, expected = (_log_probs(model) for model in (reference, exact))
    assert expected.std() > 0.3
    # transformers' own rounding may be larger.
    assert (found - expected).abs().max() <= max(1e-5, 2 * (rounded - expected).abs().max().item())
    for model in (rounded, expected):
        (model * weights).sum().backward()
    gradients, precise = (
        {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        for model in (reference, exact)
    )
    for name, parameter in policy.named_parameters():
        by, wanted = _gradient_of(gradients, name), _gradient_of(precise, name)
        rounding = 3 * (by - wanted).abs().max().item()
        assert (parameter.grad - wanted).abs().max() <= max(1e-5 * max(1.0, wanted.abs().max().item()), rounding), name

    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(0.5)
    export_policy(policy, tmp_path / "export", assets_from=composite, dtype=torch.bfloat16)
    original, written = _tensors(composite), _tensors(tmp_path / "export")
    assert original.keys() == written.keys()
    untrained = {name for name in original if policy.args.is_untrained(name)}
    assert any("visual" in name or "vision" in name for name in untrained)
    buffers = {part for name, _ in policy.named_buffers() for part, _ in policy.names_in_files(name)}
    for name, tensor in original.items():
        # Halves are exact in bfloat16.
        wanted = tensor if name in untrained | buffers else tensor * 0.5
        assert torch.equal(written[name], wanted.to(written[name].dtype)), name
        assert name in buffers or written[name].dtype == tensor.dtype
    assert (tmp_path / "export" / "config.json").read_bytes().strip() == (
        composite / "config.json"
    ).read_bytes().strip()
    with torch.no_grad():
        found, _ = policy(TOKENS, PackedLayout(LENGTHS), TOKENS.roll(-1))
        assert (_log_probs(_load(tmp_path / "export", torch.float32)) - found).abs().max() <= 4e-5


def test_versions_of_a_composite_are_its_text_under_the_names_of_its_files(composite: Path) -> None:
    policy = build_policy(_config(composite), ParallelDims(1, 1, 1, 1))
    files = {name for name in tensor_files(composite) if not policy.args.is_untrained(name)}
    sent = synced_parameters(policy)
    assert {policy.args.stored_name(name) for name in sent} == files
    if policy.args.stacked_experts is None:
        tensors = _tensors(composite)
        assert {name: tuple(part.shape) for name, part in sent.items()} == {n: tuple(tensors[n].shape) for n in files}


@pytest.mark.parametrize("family", ["qwen3_vl_moe"])
@pytest.mark.parametrize("width", [16, 32, 64])
def test_stacks_of_experts_are_read_in_either_direction(family: str, width: int, tmp_path: Path) -> None:
    """As transformers writes them, and transposed as published. Of these widths one makes either stack square."""
    directory = make_composite(tmp_path / "written", family, moe_intermediate_size=width)
    shutil.copytree(directory, tmp_path / "published")
    tensors = load_file(directory / "model.safetensors")
    stacks = [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert stacks
    for name in stacks:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / "published" / "model.safetensors", metadata={"format": "pt"})
    policy, other = load_policy(directory), load_policy(tmp_path / "published")
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name
    export_policy(other, tmp_path / "export", assets_from=tmp_path / "published", dtype=torch.bfloat16)
    written = _tensors(tmp_path / "export")
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())


def test_files_without_text_are_linked_and_others_copied_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_composite(tmp_path / "composite", "qwen3_5")
    path = directory / "model.safetensors"
    tensors = load_file(path)
    vision = {name for name in tensors if name.startswith("model.visual.")}
    alone = {name: tensors.pop(name) for name in sorted(vision)[::2]}
    save_file(tensors, path, metadata={"format": "pt"})
    save_file(alone, directory / "vision.safetensors", metadata={"format": "pt"})
    path.rename(directory / "text.safetensors")
    (directory / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    monkeypatch.setattr("torchtitan.models.shape.untrained_files.PIECE", 100)
    policy = load_policy(directory)
    export_policy(policy, tmp_path / "export", assets_from=directory, dtype=torch.bfloat16)
    written, files = _tensors(tmp_path / "export"), tensor_files(tmp_path / "export")
    assert all(torch.equal(written[name], tensor) for name, tensor in (tensors | alone).items())
    assert written.keys() == tensors.keys() | alone.keys()
    assert {files[name].stat().st_ino for name in alone} == {(directory / "vision.safetensors").stat().st_ino}
    assert not {files[name] for name in vision - alone.keys()} & {files[name] for name in alone}
    assert (tmp_path / "export" / "preprocessor_config.json").is_file()


def test_a_composite_without_weights_has_a_shape_and_is_not_loaded(tmp_path: Path) -> None:
    directory = make_composite(tmp_path / "composite", "qwen3_5")
    args = read_args(directory)
    (directory / "model.safetensors").unlink()
    assert read_args(directory) == args
    with pytest.raises(UserError, match=r"no \*.safetensors files there"):
        load_policy(directory)


def test_an_export_is_refused_if_the_files_of_its_composite_are_gone_or_others(tmp_path: Path) -> None:
    directory, other = make_composite(tmp_path / "one", "gemma3"), make_composite(tmp_path / "other", "qwen3_5")
    policy = load_policy(directory)
    with pytest.raises(UserError, match="other: the checkpoint's files have changed .*they lack language_model.model."):
        export_policy(policy, tmp_path / "export", assets_from=other)
    (directory / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"one: no \*.safetensors files there"):
        export_policy(policy, tmp_path / "export", assets_from=directory)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["one", "other"]


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3"])
def test_peft_loads_adapters_of_a_composite_and_we_load_its_own(family: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    directory = make_composite(tmp_path / "base", family)
    targets = ["q_proj", "v_proj", "down_proj"]
    config = _config(directory, {"lora.rank": 4, "lora.target_modules": targets, "lora.modules_to_save": ["norm"]})
    policy = build_policy(config, ParallelDims(1, 1, 1, 1))
    _move_adapters(policy)
    found, _ = policy(TOKENS, PackedLayout(LENGTHS), TOKENS.roll(-1))
    save_adapter(policy, tmp_path / "adapter", base_model=str(directory))
    model = peft.PeftModel.from_pretrained(_load(directory, torch.float32), tmp_path / "adapter").eval()
    adapted = [name for name, _ in model.named_parameters() if ".lora_A." in name]
    assert adapted and all(".language_model." in name for name in adapted)
    with torch.no_grad():
        assert (_log_probs(model) - found).abs().max() <= 4e-5
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.mul_(-1)
    model.save_pretrained(tmp_path / "theirs")
    load_adapter(policy, tmp_path / "theirs")
    again, _ = policy(TOKENS, PackedLayout(LENGTHS), TOKENS.roll(-1))
    with torch.no_grad():
        assert (again - found).abs().max() > 0.01
        assert (_log_probs(model) - again).abs().max() <= 4e-5


def _move_adapters(policy: Decoder) -> None:
    generator = torch.Generator().manual_seed(4)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            copy_full_(parameter, torch.randn(parameter.shape, generator=generator) / 10)


def _step(policy: Decoder, scratch: Path, directory: Path, ranks: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a pack, all gradients, and an export after it."""
    log_probs, _ = policy(TOKENS, PackedLayout(LENGTHS), TOKENS.roll(-1))
    (log_probs.mean() / ranks).backward()
    export_policy(policy, scratch, assets_from=directory)
    return log_probs.mean().item(), {name: full_tensor(parameter.grad) for name, parameter in policy.named_parameters()}


def step_in_layouts(directory: str, layouts: list[dict[str, Any]], scratch: str) -> list[list[float]]:
    """On every rank, of every layout: the loss, and the worst error of a gradient."""
    found = []
    expected = load_file(f"{scratch}/gradients.safetensors")
    for number, settings in enumerate(layouts):
        config = _config(Path(directory), settings)
        dims = ParallelDims.from_config(config.parallelism, device.world_size(), device.rank())
        policy = build_policy(config, dims)
        loss, gradients = _step(policy, Path(scratch) / str(number), Path(directory), dims.dp_size)
        assert gradients.keys() == expected.keys()
        error = max(((gradient - expected[n]).norm() / expected[n].norm()).item() for n, gradient in gradients.items())
        found.append([loss, error])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        ("qwen3_5", [TP, {}]),
        ("qwen3_vl_moe", [{**TP, "parallelism.expert_parallel_degree": 2}, {}]),
        ("gemma3", [TP, {}]),
        ("gemma4", [{}]),
    ],
)
def test_two_ranks_train_and_export_a_composite_as_one_does(
    family: str, layouts: list[dict[str, Any]], tmp_path: Path
) -> None:
    directory = make_composite(tmp_path / "composite", family)
    policy = build_policy(_config(directory), ParallelDims(1, 1, 1, 1))
    loss, gradients = _step(policy, tmp_path / "one", directory, 1)
    save_file({name: gradient.contiguous() for name, gradient in gradients.items()}, tmp_path / "gradients.safetensors")
    ranks = run_distributed(
        f"{__name__}:step_in_layouts", 2, directory=str(directory), layouts=layouts, scratch=str(tmp_path)
    )
    for rank in ranks:
        for found, error in rank:
            assert found == pytest.approx(loss, abs=1e-5) and error < 5e-5
    expected = _tensors(tmp_path / "one")
    for number in range(len(layouts)):
        written = _tensors(tmp_path / str(number))
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())


# What published files leave to transformers' defaults, and how older ones describe the same.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma3": {
        "model_type": "gemma3",
        "mm_tokens_per_image": 256,
        "eos_token_id": [1, 106],
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152},
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 128000,
        "max_window_layers": 28,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "vision_token_id": 151654,
        "vision_config": {"depth": 32},
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        "image_token_id": 248056,
        "tie_word_embeddings": False,
        "text_config": {
            "attn_output_gate": True,
            "dtype": "bfloat16",
            "eos_token_id": 248044,
            "full_attention_interval": 4,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144,
            "mlp_only_layers": [],
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "num_attention_heads": 16,
            "num_hidden_layers": 32,
            "num_key_value_heads": 4,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
            "vocab_size": 248320,
        },
        "vision_config": {"depth": 27},
    },
}


@pytest.mark.parametrize("family", list(PUBLISHED))
def test_config_of_a_published_composite_is_read_as_transformers_reads_it(family: str, tmp_path: Path) -> None:
    import transformers

    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[family]))
    prefix = {"gemma3": "language_model.model.", "qwen2_5_vl": "model.", "qwen3_5": "model.language_model."}[family]
    save_file({f"{prefix}embed_tokens.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    args, wanted = read_args(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path).get_text_config()
    for name in ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps"):
        assert getattr(args, name) == getattr(wanted, name), name
    if family == "gemma3":
        assert args.tie_word_embeddings and args.head_dim == wanted.head_dim and args.eos_token_ids == (1, 106)
    if family == "qwen3_5":
        flavor = FLAVORS["qwen3_5_text"]["9B"]
        assert model_facts(replace(args, composite=None)) == model_facts(replace(flavor, eos_token_ids=(248044,)))
    assert [bool(window) for window in args.windows or [0] * args.num_hidden_layers] == [
        kind == "sliding_attention" for kind in wanted.layer_types
    ]


def test_a_run_with_prediction_heads_says_that_they_grow_stale(tmp_path: Path) -> None:
    directory = make_composite(tmp_path / "with", "qwen3_5")
    without = make_composite(tmp_path / "without", "qwen3_vl")
    for folder, kinds in ((directory, ["run_started", "prediction_heads_kept"]), (without, ["run_started"])):
        run = SimpleNamespace(config=_config(folder), version=0)
        # The report shows the events of a run.
        TrainingJob._record_start(run, EventLog(folder / "events.jsonl"))  # type: ignore[arg-type]
        events = read_json_lines(folder / "events.jsonl")
        assert [event["kind"] for event in events] == kinds
    meaning = read_json_lines(directory / "events.jsonl")[-1]["meaning"]
    assert f"prediction in {directory} are not trained: exports keep them" in meaning


def test_a_flavor_with_a_composite_is_read_warned_of_and_exported_as_its_files_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_composite(tmp_path / "composite", "qwen3_5")
    args = read_args(directory)
    public = replace(args, composite=None, source="", rms_norm_eps=0.5)
    monkeypatch.setitem(FLAVORS["qwen3_5_text"], "tiny", public)
    config = _config(directory, {"model.name": "qwen3_5_text", "model.flavor": "tiny"})
    assert "prediction" in prediction_heads(config)
    policy = build_policy(config, ParallelDims(1, 1, 1, 1))
    assert policy.args == args
    export_policy(policy, tmp_path / "export", assets_from=directory, dtype=checkpoint_dtype(policy))
    written, original = _tensors(tmp_path / "export"), _tensors(directory)
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in original.items())
    monkeypatch.setitem(FLAVORS["qwen3_5_text"], "tiny", replace(public, num_hidden_layers=40))
    with pytest.raises(UserError, match=r'model.flavor = "tiny" is not the model in .*num_hidden_layers 40, there 3'):
        build_policy(config, ParallelDims(1, 1, 1, 1))


def test_a_composite_with_quantised_experts_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="'kimi_k25' is not trained here: its experts are published in four bits"):
        text_config({"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2"}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config.update(text_config=3), "text_config in config.json must be an object, not 3"),
        (lambda config: config["text_config"].update(model_type="unheard_of"), "unheard_of"),
        (lambda config: config.update(quantization_config={"bits": 4}), "quantization_config"),
    ],
)
def test_a_composite_that_cannot_be_read_says_why(
    change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    directory = make_composite(tmp_path / "composite", "qwen3_vl")
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        build_policy(_config(directory), ParallelDims(1, 1, 1, 1))
