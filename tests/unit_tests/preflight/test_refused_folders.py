"""Folders and an environment that a configuration names: what they lack is said at the start."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.chat_models import write_chat_tokenizer
from tests.unit_tests.conftest import WriteConfig
from torchtitan.config.reading import Draft
from torchtitan.errors import ConfigError
from torchtitan.preflight.validate import load_config, validated


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "no config.json"),
        ("tokenizer.json", None, "no tokenizer.json"),
        ("model.safetensors", None, "no *.safetensors"),
        ("config.json", "{", "config.json"),
        ("config.json", "[]", "config.json"),
        ("config.json", '{"model_type": "gpt2"}', "gpt2"),
        ("config.json", '{"model_type": "qwen3", "num_attention_heads": 4}', "config.json lacks vocab_size"),
    ],
)
def test_a_checkpoint_that_lacks_something(
    write_config: WriteConfig, file: str, content: str | None, message: str
) -> None:
    arguments = write_config()
    Path("checkpoint", file).unlink()
    if content is not None:
        Path("checkpoint", file).write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_config(arguments)
    assert len(caught.value.problems) == 1
    assert message in caught.value.problems[0]


def test_folders_that_cannot_be_written_are_found_by_a_dry_run(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*write_config(), "--dry-run", "--job.dump_folder"]
    with pytest.raises(ConfigError, match="job.toml is not a folder"):
        load_config([*arguments, "job.toml/runs/mine"])
    assert load_config([*arguments, "new/runs"])
    # Root may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: path != Path.cwd())
    with pytest.raises(ConfigError, match=f"must be a folder that can be written: {Path.cwd()} cannot"):
        load_config([*arguments, "new/runs"])


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_a_device_that_is_none_is_refused(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch, dry_run: list[str]
) -> None:
    monkeypatch.setenv("TORCHTITAN_DEVICE", "gpu")
    with pytest.raises(ConfigError, match="TORCHTITAN_DEVICE='gpu': allowed are cpu and cuda"):
        load_config([*write_config(), *dry_run])


def test_resume_and_replay_folders_are_found(write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, asked, glob = write_config(), [], Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, pattern: (asked.append(path), glob(path, pattern))[1])
    Path("outputs/run-1/checkpoint/step-4").mkdir(parents=True)
    Path("outputs/latest").symlink_to("run-1")
    Path("outputs/run-1/journal.jsonl").touch()
    for folder in ("latest", "outputs/run-1", "outputs/latest/checkpoint/step-4"):
        words = ["--checkpoint.resume", folder, "--rollout.replay", "outputs/latest"]
        config = load_config([*arguments, *words])
        assert config.checkpoint.resume == folder
        # The link will soon be this run's.
        assert config.rollout.replay == str(Path("outputs/run-1").resolve())
    # There may be thousands of other runs.
    assert asked and Path("outputs") not in asked


@pytest.mark.parametrize("recorded", ["", "[rollout]\ntemperature = 1.0\n", "[rollout]\ntemperature = 0.6\n"])
def test_a_replay_has_the_temperature_of_its_samples(write_config: WriteConfig, recorded: str) -> None:
    arguments = [*write_config(), "--rollout.replay", "outputs/run-1"]
    Path("outputs/run-1").mkdir(parents=True)
    Path("outputs/run-1/journal.jsonl").touch()
    Path("outputs/run-1/config.toml").write_text(recorded)
    if "0.6" not in recorded:
        load_config(arguments)
        return
    with pytest.raises(ConfigError, match="rollout.temperature = 1.0 .*must be 0.6, as of the samples of rollout.repl"):
        load_config(arguments)
    assert load_config([*arguments, "--rollout.temperature", "0.6"]).rollout.temperature == 0.6


def test_a_broken_link_to_the_latest_run_names_the_runs_that_are_there(write_config: WriteConfig) -> None:
    arguments = write_config()
    Path("outputs/run-1/checkpoint/step-4").mkdir(parents=True)
    Path("outputs/run-2").mkdir()
    Path("outputs/latest").symlink_to("gone")
    with pytest.raises(ConfigError, match="outputs/latest is a link to nothing; runs with checkpoints: outputs/run-1$"):
        load_config([*arguments, "--checkpoint.resume", "latest"])


def test_the_folder_of_a_run_stands_for_its_last_export(write_config: WriteConfig, tmp_path: Path) -> None:
    arguments = write_config()
    for step in (9, 10):
        shutil.copytree("checkpoint", tmp_path / "run" / "hf" / f"step-{step}")
    (tmp_path / "latest").symlink_to("run")
    for named, meant in (("latest", "run/hf/step-10"), ("latest/hf/step-9", "run/hf/step-9")):
        config = load_config([*arguments, "--model.hf_assets_path", str(tmp_path / named)])
        # The link will soon be another run's.
        assert config.model.hf_assets_path == str((tmp_path / meant).resolve())


UNREAD_TEMPLATE = """
{%- for message in messages %}
    {%- for call in message.tool_calls or [] %}~{{ call.function | tojson }}{%- endfor %}{{ message.content }}
{%- endfor %}{{ tools and tools | tojson }}"""


@pytest.mark.parametrize(("parser", "refused"), [("auto", True), ("hermes", False), ("bracket_calls", False)])
def test_agents_with_a_template_whose_calls_nothing_reads_need_a_parser(
    write_config: WriteConfig, tmp_path: Path, parser: str, refused: bool
) -> None:
    """It may be one of their own."""
    arguments = write_config()
    folder = tmp_path / "model"
    shutil.copytree("checkpoint", folder)
    write_chat_tokenizer(folder, UNREAD_TEMPLATE)
    builtin = "torchtitan.rollout.environments.builtin_environments:"
    options = {
        "model.hf_assets_path": str(folder),
        "environment.agent": f"{__name__}:play",
        "environment.tool_parser": builtin + parser if parser == "bracket_calls" else parser,
        "rewards.functions": "[]",
    }
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    with pytest.raises(ConfigError) as caught:  # its model has fewer tokens than this tokenizer
        load_config([*arguments, *words])
    assert ("writes calls of tools as" in str(caught.value)) is refused
    assert ("environment.tool_parser" in str(caught.value)) is refused


def play(key: str) -> float:
    """An agent, which no test starts."""
    return 0.0


def test_mistakes_in_the_environment_are_all_named(tmp_path: Path) -> None:
    tables = {
        "model": {"hf_assets_path": str(tmp_path / "assets" / "debug_guess")},
        "environment": {
            "factory": "torchtitan.rollout.environments.builtin_environments:Gues",
            "tools": ["no.such.module:tool"],
            "tool_parser": "torchtitan.rollout.environments.builtin_environments:bracket",
            "max_turns": 0,
        },
        "rewards": {"functions": []},
    }
    draft = Draft()
    draft.add(tables, "test")
    with pytest.raises(ConfigError) as caught:
        validated(draft, planning=True)
    text = str(caught.value)
    for words in (
        "Gues",
        "(nearest: Guess)",
        "module no.such.module",
        "bracket_calls",
        "max_turns",
    ):
        assert words in text, text
    assert "rewards.functions" not in text
