"""Files of checkpoints that are not what they seem: found at the start and by --dry-run, and named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer

from tests.chat_models import write_chat_tokenizer
from tests.unit_tests.conftest import SHAPE, WriteConfig
from torchtitan.errors import UserError
from torchtitan.models.shape.model_args import read_model_args
from torchtitan.preflight.__main__ import main
from torchtitan.preflight.checkpoint import unusual_tokens
from torchtitan.preflight.validate import load_config
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.data.demonstrations import Demonstrations
from torchtitan.rollout.data.job_rows import load_datasets
from torchtitan.rollout.data.prompts import PromptMaker
from torchtitan.rollout.data.unknown_text import refuse_surplus_tokens

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one problem that a start and --dry-run find alike."""
    errors = []
    for words in (arguments, ["--dry-run", *arguments]):
        assert main(words) == 2
        errors.append(capsys.readouterr().err)
    assert errors[0] == errors[1] and errors[0].startswith("error: configuration problem:\n"), errors
    return errors[0]


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("model.safetensors", POINTER, "model.safetensors: it is a Git LFS pointer, not the file itself: run `git lfs"),
        ("tokenizer.json", POINTER, "tokenizer.json: it is a Git LFS pointer"),
        ("chat_template.jinja", POINTER, "chat_template.jinja: it is a Git LFS pointer"),
        ("config.json", POINTER, "config.json: it is a Git LFS pointer"),
        ("model.safetensors", "", "model.safetensors: not a readable safetensors file"),
        ("model.safetensors", "<html>Access denied</html>", "model.safetensors: not a readable safetensors file"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}',
            "model-2.safetensors: file missing, though",
        ),
        ("tokenizer.json", "", "tokenizer.json cannot be read as a tokenizer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not readable JSON"),
    ],
)
def test_a_file_that_is_not_what_its_name_says(
    write_config: WriteConfig, capsys: pytest.CaptureFixture[str], file: str, content: str, problem: str
) -> None:
    arguments = write_config()
    Path("checkpoint", file).write_text(content)
    text = refused(arguments, capsys)
    assert "model.hf_assets_path = " in text and problem in text


def test_a_pointer_in_place_of_a_dataset_or_adapter(
    write_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text("{}")
    for file in ("rows.jsonl", "adapter/adapter_model.safetensors"):
        Path(file).write_text(POINTER)
    arguments = write_config()
    for words, place in (
        (["--rollout.dataset", "rows.jsonl"], "rollout.dataset = "),
        (["--lora.rank", "2", "--lora.adapter_path", "adapter"], "adapter_model.safetensors: "),
    ):
        assert f"{place}" in (text := refused([*arguments, *words], capsys)) and "it is a Git LFS pointer" in text


def test_a_pointer_among_others_counts_them(write_config: WriteConfig, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = write_config()
    for file in ("model.safetensors", "tokenizer.json"):
        Path("checkpoint", file).write_text(POINTER)
    assert "model.safetensors (and 1 others): it is a Git LFS pointer" in refused(arguments, capsys)


def write_tokens(shape: int, eos: str | None = "<|im_end|>", **settings: Any) -> None:
    """Write a tokenizer with 256 bytes, <|endoftext|>, <|im_start|>, <|im_end|> = 258 and more, and a model's shape."""
    write_chat_tokenizer(Path("checkpoint"))
    for file, more in (("tokenizer_config.json", {"eos_token": eos}), ("config.json", {"vocab_size": shape})):
        old = json.loads(Path("checkpoint", file).read_text())
        Path("checkpoint", file).write_text(json.dumps(old | more | settings))


@pytest.mark.parametrize(
    ("words", "shape", "settings", "problem"),
    [
        ([], 300, {"eos": "</s>"}, "eos_token '</s>' is not in its vocabulary, and no other token ends a completion"),
        ([], 258, {}, r"ends completions with number 258 \('<\|im_end\|>'\), but its model has 258 tokens"),
        ([], 260, {"eos_token_id": [3, 264]}, r"ends completions with number 264 \('</think>'\)"),
        ([], 300, {"eos_token_id": 300}, r"ends completions with number 300 \(''\)"),
        (["--rollout.chat_template"], 257, {"eos": "+"}, r"template writes number 257 \('<\|im_start\|>'\)"),
    ],
)
def test_tokens_that_the_model_does_not_have(
    write_config: WriteConfig, capsys: pytest.CaptureFixture[str], words: list[str], shape: int,
    settings: dict[str, Any], problem: str,
) -> None:  # fmt: skip
    arguments = [*write_config(), *words]
    write_tokens(shape, **settings)
    assert re.search(problem, refused(arguments, capsys))


def test_rows_that_hold_such_tokens(write_config: WriteConfig, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*write_config(), "--rollout.dataset", "rows.jsonl", "--rollout.held_out_fraction", "0"]
    arguments += ["--eval.num_prompts", "0"]
    write_tokens(260, eos="<|im_end|>")
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "<think>1+1=", "answer": "2"}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    message = r"a row of the dataset \('<think>1\+1='\) holds the token '<think>', number 263"
    assert main(["--dry-run", *arguments]) == 2 and re.search(message, capsys.readouterr().err)
    config = load_config(arguments)
    tokenizer = Tokenizer("checkpoint")
    with pytest.raises(UserError, match=message):
        refuse_surplus_tokens(load_datasets(config)[0], PromptMaker(config, tokenizer), 260)
    config.job.stage, config.sft.completion_column = "sft", "answer"
    with pytest.raises(UserError, match=message):
        Demonstrations(config, tokenizer, 1)
    Path("rows.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert main(["--dry-run", *arguments]) == 0
    warning = "the tokenizer of checkpoint has 265 tokens, of which the model has the first 260: rows with others"
    assert warning in capsys.readouterr().out and warning in unusual_tokens(load_config(arguments))


def test_a_checkpoint_without_any_end_token_is_named(
    write_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = write_config()
    write_tokens(300, eos=None)
    assert main(["--dry-run", *arguments]) == 0
    assert "WARNING: the files of checkpoint name no token that ends a completion" in capsys.readouterr().out
    for words in (["--rollout.stop_token_ids", "3"], []):
        warning = unusual_tokens(load_config([*arguments, *words]))
        assert bool(warning) == (not words)
    write_tokens(300, eos="</s>")
    load_config([*arguments, "--rollout.stop_token_ids", "3"])


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("scaling", "lacking"),
    [
        (LLAMA3 | {"factor": None}, "factor"),
        ({key: LLAMA3[key] for key in ("rope_type", "factor")}, "low_freq_factor, high_freq_factor"),
        ({"rope_type": "linear"}, "factor"),
        ({"type": "linear", "factor": None}, "factor"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 64}, "factor"),
    ],
)
def test_incomplete_rotary_parameters(
    write_config: WriteConfig, capsys: pytest.CaptureFixture[str], key: str, scaling: dict[str, Any], lacking: str
) -> None:
    arguments = write_config()
    config = {name: value for name, value in SHAPE.to_hf_config().items() if name != "rope_scaling"} | {key: scaling}
    Path("checkpoint/config.json").write_text(json.dumps(config))
    kind = scaling.get("rope_type", "linear")
    message = f"rope_scaling of rope_type {kind} in config.json lacks {lacking}: take the published file"
    assert message in refused(arguments, capsys)
    with pytest.raises(UserError, match=message):
        read_model_args("checkpoint")


def test_the_real_tokenizer_has_the_ids_that_these_cases_name(write_config: WriteConfig) -> None:
    write_config()
    write_tokens(300)
    tokenizer = FastTokenizer.from_file("checkpoint/tokenizer.json")
    assert [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<tool_call>", "<think>")] == [258, 259, 263]
