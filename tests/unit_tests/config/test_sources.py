"""[[source]]: what it inherits, what is refused, and that it reads back the same."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from torchtitan.config.job_config import JobConfig, config_to_toml, known_keys, value_at, with_values
from torchtitan.config.reading import Draft
from torchtitan.config.reference import documentation
from torchtitan.config.reward_names import reward_labels
from torchtitan.config.source_configs import source_configs, source_weights
from torchtitan.config.sources import SOURCE_KEYS, Source, fields_of, is_among
from torchtitan.config.teachers import teacher_id
from torchtitan.config.values import read_toml
from torchtitan.errors import ConfigError
from torchtitan.preflight.plan import describe_plan
from torchtitan.preflight.validate import draft_of, validated
from torchtitan.trainer.run_dir import changed_keys, tables_of

GUESS = "torchtitan.rollout.environments.builtin_environments:Guess"
FILE = f"""
[model]
name = "qwen3"
flavor = "0.6B"

[training]
global_batch_size = 56

[rollout]
held_out_fraction = 0.25
max_completion_tokens = 40

[rewards]
functions = ["arithmetic", "length"]
weights = [1.0, 0.25]

[environment]
max_turns = 3

[[source]]
name = "sums"
weight = 2.5

[[source]]
name = "guess"
rollout.dataset = "guess"
environment = {{ factory = "{GUESS}", step_timeout_s = 3 }}
rewards.functions = []
rollout.max_completion_tokens = 64
required = false
"""


def draft(tables: Any) -> Draft:
    made = Draft()
    made.add(tables, "file")
    return made


def test_a_source_has_what_it_gives_and_the_rest_from_the_tables(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(FILE)
    config, _ = draft_of(str(path), {}).build()
    (first, sums), (second, guess) = source_configs(config)
    assert (first, second) == ("sums", "guess")
    assert sums.rewards == config.rewards and sums.environment == config.environment and sums.rollout == config.rollout
    assert (guess.rewards.functions, guess.rewards.weights) == ([], [])
    assert (guess.environment.factory, guess.environment.max_turns) == (GUESS, 3)
    assert guess.environment.step_timeout_s == 3.0 and isinstance(guess.environment.step_timeout_s, float)
    assert (guess.rollout.max_completion_tokens, guess.rollout.held_out_fraction) == (64, 0.25)
    # The run's own tables are as they were, and one source's configuration stands for itself.
    assert (config.rollout.max_completion_tokens, config.environment.factory) == (40, "")
    assert source_configs(guess)[0][1] == guess and guess.training is config.training
    again = draft_of(str(path), {"rollout.max_completion_tokens": 7}).build()[0]
    assert [source_config.rollout.max_completion_tokens for _, source_config in source_configs(again)] == [7, 64]


def test_without_sources_a_run_has_one_which_is_its_own_configuration() -> None:
    config = JobConfig()
    assert source_configs(config) == [("", config)] and source_configs(config)[0][1] is config
    assert source_weights(config, [5050]) == {"": 1.0}


def test_sources_read_back_the_same_and_changes_are_told(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(FILE)
    config, problems = draft_of(str(path), {}).build()
    assert not problems
    (tmp_path / "again.toml").write_text(config_to_toml(config))
    again = draft_of(str(tmp_path / "again.toml"), {"job.config_file": str(path)}).build()[0]
    assert asdict(again) == asdict(config) == asdict(draft_of(config, {}).build()[0])
    written = read_toml(str(tmp_path / "again.toml"))[0]
    assert changed_keys(written, config) == changed_keys(json.loads(json.dumps(tables_of(config))), config) == {}
    inner = with_values(config, {"environment.sandbox.network": True})
    assert changed_keys(written, inner) == {"environment.sandbox.network": "false -> true"}
    again.source[0].weight = 1.0
    (change,) = changed_keys(written, again).values()
    assert "weight = 2.5" in change and "weight = 1.0" in change


def test_every_key_that_a_source_may_have_is_checked_as_in_its_table() -> None:
    keys = [key for key in known_keys() if is_among(key, SOURCE_KEYS)]
    assert len(keys) > 30 and not is_among("rollout.temperature", SOURCE_KEYS)
    for key in keys:
        value = value_at(JobConfig(), key)
        config, problems = draft({"source": [{"name": "s", key: value}]}).build()
        assert not problems and config.source[0].values == {key: value}
        assert value_at(source_configs(config)[0][1], key) == value
        _, problems = draft({"source": [{"name": "s", key: {1, 2}}]}).build()
        assert problems and key in problems[0].text and '[[source]] "s"' in problems[0].text
    assert all(documentation()[f"source.{key}"] for key in fields_of(Source))


@pytest.mark.parametrize(
    ("sources", "problem"),
    [
        ([{"name": "a", "weight": 0}], r'\[\[source\]\] "a": weight = 0 is not allowed: must be greater than 0'),
        ([{"name": "a", "weight": -1.0}], "must be greater than 0"),
        ([{"name": "a", "epochs": 0}], "must be greater than 0"),
        ([{"name": "a", "rollout": {"datset": "x"}}], r"unknown key rollout.datset .*nearest: rollout.dataset"),
        ([{"name": "a", "rollout.top_p": 0.5}], r'"a": rollout.top_p = 0.5 is not allowed: it stands in its table'),
        ([{"weight": 1}], "number 1: name is missing"),
        ([{"name": "a/b"}], "must be made of letters"),
        ([{"name": "a", "rewards.functions": "x"}], "rewards.functions takes a list, each element a string"),
        ([{"name": "a", "environment": {"max_turn": 0}}], r"unknown key environment.max_turn .*environment.max_turns"),
        ([{"name": "a", "environment": {"max_turns": 0}}], "environment.max_turns = 0 is not allowed: must be"),
        ([{"name": "a", "rollout.max_completion_tokens": 0}], "must be at least 1"),
        ({"name": "a"}, r"must be an array of tables: \[\[source\]\]"),
        ([{"name": "a"}, {"name": "a"}], "'a' stands more than once"),
        ([{"name": "arithmetic"}], "is the name of a reward"),
        ([{"name": "a", "weight": 1, "epochs": 1}], "'a' has weight and epochs"),
        ([{"name": "a", "epochs": 1}, {"name": "b"}], "either all sources have epochs"),
        ([{"name": "a", "rollout.dataset": "nowhere.jsonl"}, {"name": "b"}], "a: rollout.dataset = .* no such file"),
        ([{"name": "a", "rollout": {"max_completion_tokens": 4096}}, {"name": "b"}], "source a: rollout.max_com"),
        ([{"name": "a", "rewards.weights": [1.0, 2.0]}], "rewards.weights = .* must be empty, or have one weight"),
        ([{"name": "a", "environment": {"factory": "x:Y"}}], "environment.factory: .* module x"),
        ([{"name": name, "environment": {"agent": agent, "gateway": {"port": 8123}}}
          for name, agent in (("a", "true"), ("b", "false"))], "gateway.port = 8123 is that of 2 gateways"),
    ],
)  # fmt: skip
def test_mistakes_are_told_with_their_source(sources: Any, problem: str) -> None:
    tables = {"model": {"name": "qwen3", "flavor": "0.6B"}, "source": sources}
    with pytest.raises(ConfigError, match=problem):
        validated(draft(tables), planning=True)


def test_what_all_sources_share_is_told_once() -> None:
    tables = {"model": {"name": "qwen3", "flavor": "0.6B"}, "training": {"seq_len": 64}}
    tables["source"] = [{"name": "a"}, {"name": "b"}]  # type: ignore[assignment]
    with pytest.raises(ConfigError) as refused:
        validated(draft(tables), planning=True)
    message = str(refused.value)
    assert message.count("rollout.max_completion_tokens") == 1 and "source a" not in message


def test_a_dry_run_prints_the_mix(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(FILE)
    config = validated(draft_of(str(path), {}), planning=True)
    printed = describe_plan(config, 1)
    assert "# mix: sums 71.4% (5 groups), guess 28.6% (2 groups) of the first batch" in printed
    for source in config.source:
        source.weight, source.epochs = None, 2.0
    assert "# mix: shares of every batch in relation to sums 2 × its rows" in describe_plan(config, 1)
    assert source_weights(config, [10, 30]) == {"sums": 20.0, "guess": 60.0}
    assert Source(name="x").given() == {"name": "x", "required": True}


def test_a_source_without_a_teacher_has_none_of_the_runs_either() -> None:
    config = JobConfig()
    config.job.stage, config.distill.teacher, config.distill.hint = "distill", "checkpoint", "answer"
    itself = Source("itself", {"distill.teacher": "", "distill.hint": "answer"})
    config.source = [Source("own"), Source("none", {"distill.teacher": ""}), itself]
    teachers = {name: teacher_id(source_config) for name, source_config in source_configs(config)}
    assert teachers == {"own": os.path.realpath("checkpoint"), "none": None, "itself": ""}


def test_rewards_are_called_by_their_own_names_where_these_are_unique() -> None:
    config = JobConfig()
    config.rewards.functions = ["accuracy", "own_9067cb83d8bb:verified", "mine:length", "yours:length", "x:accuracy"]
    assert list(reward_labels(config).values()) == ["accuracy", "verified", "mine:length", "yours:length", "x:accuracy"]
