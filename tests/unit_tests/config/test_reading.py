"""A configuration from a file, the command line and defaults, and back into a file."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit_tests.conftest import GOOD, WriteConfig
from torchtitan.config.job_config import JobConfig, config_to_toml, free_table, known_keys, table_types, value_at
from torchtitan.config.other_names import OTHER_NAMES
from torchtitan.config.reading import Draft, nearest_key, read_command_line
from torchtitan.config.reference import HEADINGS, documentation, markdown
from torchtitan.config.training_tables import LOSS_TYPES
from torchtitan.config.values import Names, Range
from torchtitan.errors import ConfigError
from torchtitan.grpo.loss import loss_settings
from torchtitan.grpo.objectives import ClipRange
from torchtitan.inference.engines.options import engine_words
from torchtitan.preflight.validate import load_config

ROOT = Path(__file__).resolve().parents[3]
# Of files, functions and classes that are called like a table.
SUFFIXES = ("py", "toml", "jsonl", "json", "md")


def test_values_that_are_nested_too_deeply_are_refused(write_config: WriteConfig) -> None:
    arguments, deep = write_config(), "[" * 5000 + "]" * 5000
    with pytest.raises(ConfigError, match="x.toml.* nested too deeply$"):
        Path("x.toml").write_text(f"a = {deep}")
        load_config(["--job.config_file", "x.toml"])
    with pytest.raises(ConfigError, match="rewards.functions: unknown reward function"):
        load_config([*arguments, "--rewards.functions", deep])


@pytest.mark.parametrize(
    ("called", "named"),
    [("/bin/torchtitan-grpo", "torchtitan-grpo"), ("/x/torchtitan/preflight/__main__.py", "run_grpo.sh")],
)
def test_help_names_the_command_that_was_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], called: str, named: str
) -> None:
    monkeypatch.setattr(sys, "argv", [called])
    with pytest.raises(SystemExit):
        read_command_line(["--help"])
    assert capsys.readouterr().out.startswith(f"usage: {named} [--dry-run]")


@pytest.mark.parametrize(
    ("words", "shown", "hidden"),
    [
        (["--help", "weight_sync", "--training.steps", "3"], "--weight_sync.num_slots", "--training"),
        (["--help", "weight_sync"], "[weight_sync.disk]", "[training]"),
        (["--help=[optimizer]"], "--optimizer.lr NUMBER", "--training"),
        (["-h", "optimizer.lr", "grpo.delta"], "--grpo.delta NUMBER", "--optimizer.name"),
    ],
)
def test_help_of_a_table_or_a_key_shows_nothing_else(
    capsys: pytest.CaptureFixture[str], words: list[str], shown: str, hidden: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        read_command_line(words)
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and shown in printed and hidden not in printed


def test_help_of_an_unknown_table_names_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_command_line(["--help", "optimiser"])
    printed = capsys.readouterr()
    assert ended.value.code == 2 and not printed.out
    assert "'optimiser' (nearest: optimizer); the tables are job, metrics, " in printed.err


def test_every_table_has_a_heading() -> None:
    assert list(HEADINGS) == [table for table in table_types() if "." not in table]


def test_every_name_of_others_leads_to_a_key_and_is_none_itself() -> None:
    last_parts = {key.rpartition(".")[2] for key in known_keys()}
    for name, own_name in OTHER_NAMES.items():
        assert own_name.split(" ")[0] in known_keys() and name not in last_parts, name
        for written in (name, f"trainer.{name}"):
            assert nearest_key(written) == f" ({name} is {own_name} here)"


def test_file_then_command_line_then_defaults(write_config: WriteConfig) -> None:
    arguments = write_config()
    config = load_config(arguments)
    assert (config.training.steps, config.grpo.group_size, config.rollout.max_staleness) == (7, 8, 2)
    assert config.job.config_file == "job.toml"
    overrides = [
        "--training.steps",
        "3",
        "--optimizer.lr=1e-3",
        "--rollout.stop_token_ids",
        "1",
        "2",
        "4",
        "--job.name",
        "x-1",
    ]
    overrides += [
        "--rewards.functions",
        "accuracy",
        "format",
        "--rewards.weights",
        "1",
        "-0.5",
        "--training.max_norm",
        "2",
    ]
    config = load_config([*overrides, *arguments])
    assert (config.training.steps, config.optimizer.lr, config.job.name) == (3, 1e-3, "x-1")
    assert config.rollout.stop_token_ids == [1, 2, 4]
    assert (config.rewards.functions, config.rewards.weights) == (["accuracy", "format"], [1.0, -0.5])
    assert isinstance(config.training.max_norm, float)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--grpo.async_weight_update", "false"], False),
        (["--grpo.async_weight_update=false"], False),
        (["--grpo.async-weight-update=False"], False),
        (["--grpo.no-async_weight_update"], False),
        (["--grpo.no_async_weight_update", "--training.steps", "2"], False),
        (["--grpo.async_weight_update"], True),
        (["--grpo.async_weight_update", "true"], True),
        (["--grpo.async_weight_update=false", "--grpo.async_weight_update=true"], True),
    ],
)
def test_booleans(write_config: WriteConfig, words: list[str], expected: bool) -> None:
    assert load_config([*write_config(), *words]).grpo.async_weight_update is expected


@pytest.mark.parametrize("words", [["accuracy", "format"], ['["accuracy", "format"]']], ids=["words", "as TOML"])
def test_lists(write_config: WriteConfig, words: list[str]) -> None:
    assert load_config([*write_config(), "--rewards.functions", *words]).rewards.functions == ["accuracy", "format"]


def test_negative_and_odd_values_pass_through(write_config: WriteConfig) -> None:
    words = [
        "--training.global_batch_size",
        "16",
        "--metrics.completions_per_step",
        "-1",
        "--sft.completion_column=--x = 'y'",
    ]
    config = load_config([*write_config(), *words])
    assert config.metrics.completions_per_step == -1
    assert config.sft.completion_column == "--x = 'y'"


def test_options_of_the_engine_pass_through(write_config: WriteConfig) -> None:
    arguments = write_config(
        more="""
[inference]
backend = "vllm"
[inference.vllm.args]
max_model_len = 1024
enforce-eager = true
enable-log-requests = false
served-model-name = ["a", "b"]
compilation-config = {level = 0, "custom.ops" = ["none"]}
"""
    )
    words = ["--inference.vllm.args.max-model-len", "64", "--inference.vllm.args.no-enable_prefix-caching"]
    words += [
        "--inference.vllm.args.seed=-1",
        "--inference.vllm.args.load-format",
        "dummy",
        "--training.steps",
        "3",
        "--rollout.chat-template-kwargs.enable_thinking=false",
    ]
    config = load_config([*arguments, *words])
    assert config.training.steps == 3
    assert config.rollout.chat_template_kwargs == {"enable_thinking": False}
    assert engine_words(config.inference.engine.args) == [
        *("--max-model-len", "64", "--enforce-eager", "--served-model-name", "a", "b"),
        *("--compilation-config", '{"level": 0, "custom.ops": ["none"]}'),
        *("--no-enable-prefix-caching", "--seed", "-1", "--load-format", "dummy"),
    ]
    draft = Draft()
    draft.add(tomli.loads(config_to_toml(config)), "x.toml")
    assert draft.build() == (config, [])


def test_the_home_folder_is_resolved_once_for_everybody(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    arguments = write_config(GOOD.replace('"checkpoint"', '"~/checkpoint"'), more="[eval]\ndataset = '~/e.jsonl'\n")
    Path("run/checkpoint/step-1").mkdir(parents=True)
    for name in ("run/journal.jsonl", "e.jsonl", "d.jsonl"):
        Path(name).touch()
    words = ["--job.dump_folder=~/out", "--checkpoint.resume=~/run", "--rollout.dataset=~/d.jsonl"]
    config = load_config([*arguments, *words, "--rollout.replay=~/run"])
    assert config.model.hf_assets_path == f"{tmp_path}/checkpoint"
    assert (config.job.dump_folder, config.checkpoint.resume) == (f"{tmp_path}/out", f"{tmp_path}/run")
    assert (config.rollout.dataset, config.eval.dataset) == (f"{tmp_path}/d.jsonl", f"{tmp_path}/e.jsonl")
    assert config.rollout.replay == f"{tmp_path}/run"
    with pytest.raises(ConfigError, match="is not a directory"):
        load_config([*arguments, "--model.hf_assets_path=~nobody-of-this-name/x"])


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.integers(-(2**63), 2**63 - 1)
    if kind is float:
        return st.floats(allow_nan=False)
    if kind is str:
        return st.text(st.characters(exclude_categories=["Cs"]))
    if kind == list[str]:
        return st.lists(values_of(str), max_size=3)
    if kind == list[int]:
        return st.lists(values_of(int), max_size=3)
    if kind == list[float]:
        return st.lists(values_of(float), max_size=3)
    if kind == list[dict[str, Any]]:  # eval.set, whose keys have types of their own
        return st.sampled_from([[], [{"name": "a"}, {"name": "b", "prompts": 2, "environment": {"max_turns": 3}}]])
    if kind == dict[str, Any]:
        scalars = st.one_of(*map(values_of, (bool, int, float, str)))
        deeper = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | tables(inner), max_leaves=5)
        return tables(deeper)
    return st.sampled_from(kind.__args__)


def tables(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(values_of(str), values, max_size=3)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.data())
def test_what_is_written_reads_back(data: st.DataObject) -> None:
    config = JobConfig()
    for name in data.draw(st.lists(st.sampled_from(sorted(known_keys().keys() - {"eval.set"})), max_size=12)):
        table, _, key = name.rpartition(".")
        setattr(value_at(config, table), key, data.draw(values_of(known_keys()[name].annotation)))
    again = tomli.loads(config_to_toml(config))
    assert again | {"source": [], "eval": again["eval"] | {"set": []}} == asdict(config)
    # What is read is what was written, in type too; all that the draft may refuse is a number or name out of bounds.
    draft = Draft()
    draft.add(again, "x.toml")
    read, problems = draft.build()
    assert all(" takes " not in problem.text for problem in problems)
    for problem in problems:
        table, _, key = problem.key.rpartition(".")
        setattr(value_at(read, table), key, value_at(config, problem.key))
    assert read == config


def rules_of(name: str, kind: type) -> list[Any]:
    return [rule for rule in known_keys()[name].metadata if isinstance(rule, kind)]


def test_every_number_has_a_range_and_every_default_is_allowed() -> None:
    for name, info in known_keys().items():
        assert len(rules_of(name, Range)) == (info.annotation in (int, float)), name
    draft = Draft()
    draft.add(asdict(JobConfig()), "defaults")
    assert draft.build() == (JobConfig(), [])


def test_the_reference_is_current_and_complete() -> None:
    assert known_keys().keys() <= documentation().keys() and all(documentation().values())
    command = "python -m torchtitan.config.reference > docs/config.md"
    assert (ROOT / "docs/config.md").read_text(encoding="utf-8") == markdown(), f"out of date: {command}"


@pytest.mark.parametrize(
    "page", [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"], ids=lambda page: page.stem
)
def test_keys_that_pages_name_are_there(page: Path) -> None:
    tables = {name.partition(".")[0] for name in known_keys()}
    named = re.findall(r"`(?:--)?(\w+)((?:\.\w+)+)(?: = [^`]*)?`", page.read_text(encoding="utf-8"))
    keys = {f"{table}{rest}" for table, rest in named if table in tables and rest.rpartition(".")[2] not in SUFFIXES}
    assert not {key for key in keys if key not in known_keys() | table_types() and not free_table(key)}
    if page.stem == "recipes":
        assert len(keys) > 60


def test_known_names_are_those_of_the_code() -> None:
    from torchtitan.grpo.objectives import OBJECTIVES

    assert [rule.known for rule in rules_of("grpo.loss_type", Names)] == [LOSS_TYPES] == [tuple(OBJECTIVES)]


def test_gspo_has_a_clip_range_of_its_own(write_config: WriteConfig) -> None:
    """Review: 0.2 and 0.28 never clip the geometric mean of a sequence."""
    gspo = loss_settings(load_config([*write_config(), "--grpo.loss_type", "gspo"]).grpo)
    assert gspo.options.clip == ClipRange(3e-4, 4e-4, 3.0)
    given = ["--grpo.loss_type", "gspo", "--grpo.epsilon_high", "0.1"]
    assert loss_settings(load_config([*write_config(), *given]).grpo).options.clip == ClipRange(3e-4, 0.1, 3.0)
    assert loss_settings(load_config(write_config()).grpo).options.clip == ClipRange(0.2, 0.28, 3.0)
