"""What an export has besides weights, and of which type these are: used elsewhere, it is the policy of the run."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from scripts.make_debug_checkpoint import write_tokenizer
from torchtitan.config.job_config import JobConfig
from torchtitan.config.source_configs import stop_tokens
from torchtitan.config.sources import Source
from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_checkpoint import export_policy, load_policy
from torchtitan.rollout.conversation.tokenizer import Tokenizer


@pytest.fixture
def model(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> Path:
    return Path(shutil.copytree(tiny_checkpoint("qwen3", tied=False), tmp_path / "model"))


@pytest.mark.parametrize(
    ("generation", "asked", "written"),
    [
        (None, [], None),
        (None, [1], None),  # config.json says so
        (None, [1, 7], [1, 7]),
        ({"eos_token_id": 1, "temperature": 0.6}, [1], 1),
        ({"eos_token_id": [1, 2], "temperature": 0.6}, [2, 5], [1, 2, 5]),
        ({"temperature": 0.6}, [5], 5),
    ],
)
def test_an_export_ends_where_the_run_ends_completions(
    model: Path, tmp_path: Path, generation: dict[str, Any] | None, asked: list[int], written: Any
) -> None:
    file = model / "generation_config.json"
    file.unlink(missing_ok=True)
    if generation is not None:
        file.write_text(json.dumps(generation))
    export_policy(load_policy(model), tmp_path / "export", assets_from=model, end_token_ids=asked)
    found = tmp_path / "export" / file.name
    assert found.exists() == (written is not None)
    if written is not None:
        settings = json.loads(found.read_text())
        assert settings["eos_token_id"] == written
        assert settings.get("temperature") == (generation or {}).get("temperature")
        transformers = pytest.importorskip("transformers")
        exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
        assert exported.generation_config.eos_token_id == written
    # Which the next run reads.
    write_tokenizer(tmp_path / "export")
    assert {*asked} <= {*Tokenizer(tmp_path / "export").eos_token_ids} or not found.exists()


def test_stop_tokens_are_those_of_all_sources() -> None:
    config = JobConfig()
    config.rollout.stop_token_ids = [3]
    assert stop_tokens(config) == [3]
    config.source = [
        Source(name="a"),
        Source("b", {"rollout.stop_token_ids": [5, 3]}),
        Source("c", {"rollout.stop_token_ids": []}),
    ]
    assert stop_tokens(config) == [3, 5]


def test_further_chat_templates_are_in_the_export(model: Path, tmp_path: Path) -> None:
    folder = model / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("with tools")
    for _ in range(2):  # an older export is replaced
        export_policy(load_policy(model), tmp_path / "export", assets_from=model)
        assert (tmp_path / "export" / folder.name / "tool_use.jinja").read_text() == "with tools"


@pytest.mark.parametrize(
    ("name", "factor", "fits"),
    [
        ("model.norm.weight", 1.0, True),
        ("model.norm.weight", 0.0, True),
        ("model.norm.weight", 1e5, False),  # beyond 65504
        ("model.layers.1.mlp.up_proj.weight", 1e6, False),
        ("lm_head.weight", 1e-3, True),
        ("lm_head.weight", 1e-7, False),  # zero, or of one bit
    ],
)
def test_weights_out_of_float16s_range_are_exported_as_float32(
    model: Path, tmp_path: Path, name: str, factor: float, fits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    policy = load_policy(model)
    weight = dict(policy.named_parameters())[name]
    with torch.no_grad():
        weight *= factor
    with caplog.at_level(logging.WARNING):
        export_policy(policy, tmp_path / "export", dtype=torch.float16)
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    written = torch.float16 if fits else torch.float32
    assert {tensor.dtype for tensor in tensors.values()} == {written}
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == str(written).partition(".")[2]
    torch.testing.assert_close(tensors[name].float(), weight.float(), rtol=2**-10, atol=2**-24 * fits)
    assert (f"float16 cannot hold the values of {name}" in caplog.text) == (not fits)


def test_a_failed_export_leaves_nothing(model: Path, tmp_path: Path) -> None:
    (model / "generation_config.json").write_text("{")
    with pytest.raises(Exception, match="not readable JSON"):
        export_policy(load_policy_without(model), tmp_path / "runs" / "export", assets_from=model, end_token_ids=[3])
    assert not any((tmp_path / "runs").iterdir())


def load_policy_without(model: Path) -> Decoder:
    """The policy of a directory whose generation_config.json is broken."""
    broken = model / "generation_config.json"
    text = broken.read_text()
    broken.unlink()
    policy = load_policy(model)
    broken.write_text(text)
    return policy
