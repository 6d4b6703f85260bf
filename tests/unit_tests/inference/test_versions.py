"""Adapters merged into a checkpoint's weights for engines that take whole versions: against float64, PEFT and files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.roundings import forward_rounding
from tests.unit_tests.models.test_lora import EVERYTHING, TOKENS, adapted, synced, untied
from torchtitan.config.job_config import Lora
from torchtitan.distributed.placement import copy_full_
from torchtitan.inference.engines.sidecar.applier import Applier, FileLoader
from torchtitan.inference.engines.sidecar.foreign_engine import EngineOptions
from torchtitan.inference.serving import weight_verification as versions
from torchtitan.inference.serving.weight_verification import BaseWeights
from torchtitan.models.adapter_math import ALPHA
from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_checkpoint import export_policy, load_policy, save_adapter
from torchtitan.models.lora import base_parameters
from torchtitan.weight_sync.memory.staging import StagedVersion, WeightsRefused

__all__ = ["untied"]


def staged(policy: Decoder, dtype: torch.dtype = torch.float32, number: int = 3) -> StagedVersion:
    """What an actor receives of `policy`."""
    return StagedVersion("epoch", number, "digest", {name: t.to(dtype) for name, t in synced(policy).items()})


def exact(policy: Decoder, directory: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """base + alpha / rank · B A in float64, of factors in `dtype`; without a line of the code under test."""
    assert policy.lora is not None
    sent = {name: tensor.to(dtype).double() for name, tensor in policy.named_parameters()}
    result = {name: tensor.double() for name, tensor in load_policy(directory).named_parameters()}
    for name in result:
        module = name.removesuffix(".weight")
        if f"{module}.lora_A.weight" in sent:
            a, b = sent[f"{module}.lora_A.weight"], sent[f"{module}.lora_B.weight"]
            result[name] = result[name] + policy.lora.alpha / policy.lora.rank * (b @ a)
        elif module.rpartition(".")[2] in policy.lora.modules_to_save:
            result[name] = sent[name]
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_tensors_are_base_and_adapter(untied: Path, dtype: torch.dtype) -> None:
    base = BaseWeights(untied)
    first = adapted(untied, dropout=0.5)
    second = adapted(untied, ["q_proj", "lm_head"], modules_to_save=["norm", "v_proj"])
    with torch.no_grad():
        for name in ("model.norm", "model.layers.1.self_attn.v_proj"):
            second.get_submodule(name).weight.mul_(1.5)  # type: ignore[union-attr, operator]
    # One after the other: nothing of an earlier version is left in a later one.
    for policy in (first, second, first):
        whole = base.merged(staged(policy, dtype)).tensors
        expected = exact(policy, untied, dtype)
        assert set(whole) == set(expected) == set(base_parameters(policy)) and len(whole) == len(expected)
        for name, tensor in expected.items():
            assert whole[name].dtype == dtype
            rounding = torch.finfo(dtype).eps * tensor.abs() + 1e-6
            assert ((whole[name].double() - tensor).abs() <= rounding).all(), name


@pytest.mark.parametrize(("family", "tied"), [("llama3", False), ("qwen2", True), ("qwen3", True)])
def test_merged_files_are_what_peft_makes_of_our_export(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, family: str, tied: bool
) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    directory = tiny_checkpoint(family, tied)
    saved = ["post_attention_layernorm"]
    policy = adapted(directory, Lora().target_modules if tied else EVERYTHING, modules_to_save=saved)
    for layer in policy.model.layers:
        copy_full_(layer.get_submodule(saved[0]).get_parameter("weight"), torch.linspace(0.5, 1.5, 64))
    save_adapter(policy, tmp_path / "adapter", base_model=str(directory))
    options = EngineOptions("by-files", str(directory), "", "agent", Path(), "", 0, disk_path=str(tmp_path / "disk"))
    read: list[Path] = []

    def read_files(folder: Path, label: str) -> None:
        (tmp_path / "merged").mkdir()
        for file in folder.iterdir():
            (tmp_path / "merged" / file.name).write_bytes(file.read_bytes())
        read.append(folder)

    def pause(mode: str, timeout_s: float) -> bool:
        # The engine stands still from here on: the files are written.
        version.tensors[next(iter(version.tensors))].fill_(torch.nan)
        return True

    control: Any = SimpleNamespace(
        pause=pause, resume=lambda: None, reset_prefix_cache=lambda: None, weights_label=lambda: "epoch/3"
    )
    loader = FileLoader(options, read_files)
    applier = Applier(control, loader, 5.0, base=BaseWeights(directory))
    version = staged(policy)
    applier.apply(applier.new_connection(), version)
    loader.close()

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(TOKENS[None]).logits[0]

    def load(path: Path) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)

    base, reference = load(directory), peft.PeftModel.from_pretrained(load(directory), tmp_path / "adapter")
    assert (logits(reference) - logits(base)).abs().max() > 0.1
    expected = logits(reference)
    # Both compute in float64: all that is rounded to fp32, and once, are the merged weights.
    rounding = forward_rounding(policy.args, expected.abs().max().item()) / 2
    torch.testing.assert_close(logits(load(tmp_path / "merged")), expected, rtol=0, atol=rounding)
    assert len(read) == 1 and ("lm_head.weight" in load_file(tmp_path / "merged" / "model.safetensors")) != tied


def test_every_tensor_is_merged_once_and_when_it_is_asked_for(untied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied: list[torch.Tensor] = []
    product = versions.low_rank_product  # type: ignore[attr-defined]

    def counted(scale: float, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        multiplied.append(a)
        return product(scale, a, b)

    monkeypatch.setattr(versions, "low_rank_product", counted)
    policy = adapted(untied)
    whole = BaseWeights(untied).merged(staged(policy)).tensors
    assert not multiplied
    received = dict(whole.items())
    assert len(multiplied) == 7 * policy.args.num_hidden_layers + 2
    for name, tensor in exact(policy, untied, torch.float32).items():
        torch.testing.assert_close(received[name].double(), tensor, rtol=0, atol=1e-5)


def test_the_base_may_lie_in_several_files_and_carry_more_than_is_needed(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    directory = tiny_checkpoint("qwen2", True)
    policy = adapted(directory, ["q_proj"])
    export_policy(load_policy(directory), tmp_path, max_file_bytes=100_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    parameters = load_file(files[0])
    save_file({**parameters, "lm_head.weight": torch.zeros(2)}, files[0])
    whole = BaseWeights(tmp_path).merged(staged(policy)).tensors
    assert {name: list(tensor.shape) for name, tensor in whole.items()} == {
        name: list(tensor.shape) for name, tensor in base_parameters(policy).items()
    }


def test_whole_versions_pass_and_what_does_not_fit_is_refused(untied: Path, tmp_path: Path) -> None:
    base = BaseWeights(tmp_path / "nowhere")
    plain = StagedVersion("epoch", 1, "digest", dict(load_policy(untied).named_parameters()))
    assert base.merged(plain) is plain
    version = staged(adapted(untied, ["q_proj"]))
    with pytest.raises(WeightsRefused, match="base weights of the adapters cannot be read: .*nowhere"):
        base.merged(version)
    base = BaseWeights(untied)
    tensors = dict(version.tensors)
    factor = "model.layers.0.self_attn.q_proj.lora_A.weight"
    for change, text in (
        ({factor: torch.zeros(3, 5)}, r"factors \[3, 5\]"),
        ({"model.layers.9.mlp.up_proj.lora_A.weight": torch.zeros(3, 64)}, "there is no model.layers.9"),
        ({"model.norm.weight": torch.zeros(5)}, r"model.norm.weight has shape \[5\] instead of \[64\]"),
        ({"model.layers.0.mlp.up_proj.lora_B.weight": torch.zeros(5, 3)}, "has no lora_A"),
    ):
        with pytest.raises(WeightsRefused, match=text):
            base.merged(StagedVersion("epoch", 2, "digest", {**tensors, **change}))
    with pytest.raises(WeightsRefused, match="holds no adapter"):
        base.merged(StagedVersion("epoch", 2, "digest", {ALPHA: tensors[ALPHA]}))
