"""Shared by unit tests: a configuration that is good, as a file beside the checkpoint that it names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from torchtitan.models.shape.model_args import ModelArgs

SHAPE = ModelArgs(
    family="qwen3",
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    tie_word_embeddings=True,
    max_position_embeddings=128,
)


GOOD = """
[model]
hf_assets_path = "checkpoint"
[training]
steps = 7
global_batch_size = 32
seq_len = 64
tokens_per_micro_batch = 256
[grpo]
group_size = 8
num_minibatches = 2
[rollout]
max_completion_tokens = 32
"""


def write_stubs(directory: Path) -> None:
    """Write the smallest tokenizer and the smallest file of weights that can be read."""
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


WriteConfig = Callable[..., list[str]]


@pytest.fixture
def write_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteConfig:
    """Write job.toml (the good one, or `text`, plus `more`) beside a checkpoint directory; returns the arguments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(SHAPE.to_hf_config()))
    write_stubs(checkpoint)

    def write(text: str = GOOD, more: str = "") -> list[str]:
        (tmp_path / "job.toml").write_text(text + more, encoding="utf-8")
        return ["--job.config_file", "job.toml"]

    return write
