"""[[eval.set]]: what it inherits, what is refused, and that it reads back the same."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from torchtitan.config.evaluations import eval_configs, task_configs
from torchtitan.config.job_config import JobConfig, config_to_toml
from torchtitan.config.reward_names import judging_reward
from torchtitan.errors import ConfigError
from torchtitan.preflight.validate import draft_of, validated
from torchtitan.rollout.data.job_rows import load_datasets

GUESS = "torchtitan.rollout.environments.builtin_environments:Guess"
FILE = f"""
[model]
name = "qwen3"
flavor = "0.6B"

[training]
global_batch_size = 56

[rewards]
functions = ["arithmetic", "length"]

[eval]
samples_per_prompt = 8

[[source]]
name = "sums"
rollout.held_out_fraction = 0.25

[[source]]
name = "guess"
rollout.dataset = "guess"
environment = {{ factory = "{GUESS}", step_timeout_s = 3 }}
rewards.functions = []

[[eval.set]]
name = "sums"
source = "sums"
reward_function = "exact_match"
samples_per_prompt = 4
interval = 0

[[eval.set]]
name = "games"
source = "guess"
num_prompts = 32
environment = {{ max_turns = 4 }}

[[eval.set]]
name = "products"
dataset = "products.jsonl"
rollout.max_completion_tokens = 16
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "products.jsonl").write_text('{"prompt": "2*3=", "answer": "6"}\n')
    (tmp_path / "job.toml").write_text(FILE)
    return tmp_path / "job.toml"


def test_a_set_has_what_it_gives_and_the_rest_from_its_source_or_the_tables(path: Path) -> None:
    config = validated(draft_of(path, {}), planning=True)
    before = asdict(config)
    found = dict(eval_configs(config))
    assert list(found) == ["sums", "games", "products"]
    sums, games, products = found.values()
    assert (sums.rollout.held_out_fraction, sums.eval.interval, judging_reward(sums)) == (0.25, 0, "exact_match")
    assert sums.eval.samples_per_prompt == 4
    assert (games.rollout.dataset, games.eval.num_prompts, judging_reward(games)) == ("guess", 32, "Guess")
    assert (games.environment.factory, games.environment.step_timeout_s, games.environment.max_turns) == (GUESS, 3.0, 4)
    assert (products.rollout.dataset, products.eval.dataset) == ("arithmetic", "products.jsonl")
    assert (products.rollout.max_completion_tokens, judging_reward(products)) == (16, "arithmetic")
    # A set and a source of one name are two tasks.
    assert list(task_configs(config)) == ["sums", "guess", "eval/sums", "eval/games", "eval/products"]
    assert asdict(config) == before
    again = path.with_name("again.toml")
    again.write_text(config_to_toml(config))
    assert asdict(validated(draft_of(again, {}), planning=True)) == {
        **before, "job": {**before["job"], "config_file": str(again)}
    }  # fmt: skip


def test_a_set_with_other_columns_is_accepted_and_its_rows_are_what_is_loaded(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(path.parent)
    path.with_name("set_code.py").write_text(
        "def of_training(completions, answer, **kwargs): ...\n"
        "def judge(completions, level, **kwargs): ...\n"
        "class Board:\n    def reset(self, level, **row): ...\n    def step(self, action): ...\n"
    )
    path.with_name("other.jsonl").write_text('{"problem": "2*3=", "level": 1}\n')
    task = 'dataset = "other.jsonl"\nrollout.prompt_column = "problem"\n'
    path.write_text(
        '[model]\nname = "qwen3"\nflavor = "0.6B"\n[rewards]\nfunctions = ["set_code:of_training"]\n'
        "[eval]\nnum_prompts = 1\n"
        f'[[eval.set]]\nname = "other"\nreward_function = "set_code:judge"\n{task}'
        f'[[eval.set]]\nname = "board"\nenvironment.factory = "set_code:Board"\n{task}'
    )
    config = validated(draft_of(path, {}), planning=True)
    for _, set_config in eval_configs(config):
        assert load_datasets(set_config)[1] == [{"problem": "2*3=", "level": 1}]
    # What is missing in the set's own rows is still said.
    path.with_name("other.jsonl").write_text('{"problem": "2*3="}\n')
    with pytest.raises(ConfigError) as caught:
        validated(draft_of(path, {}), planning=True)
    assert [problem.partition(" '")[0] for problem in caught.value.problems] == [
        "[[eval.set]] other: eval.reward_function: reward function",
        "[[eval.set]] board: environment.factory: environment",
    ]


def test_without_sets_there_is_one_for_each_source() -> None:
    config = JobConfig()
    assert eval_configs(config) == [("", config)] and task_configs(config) == {"": config}


@pytest.mark.parametrize(
    ("added", "text"),
    [
        ('name = "sums"', r"name = 'sums' stands more than once"),
        ('name = "x"\nsource = "sum"', r"x: source = 'sum': there is no such source \(nearest: sums\)"),
        ("num_prompts = 3", r"\[\[eval.set\]\] number 4: name is missing"),
        ('name = "x"\nnum_promts = 3', r'\[\[eval.set\]\] "x": unknown key num_promts = 3 \(nearest: num_prompts\)'),
        (
            'name = "x"\nsamples_per_prompt = 0',
            r'\[\[eval.set\]\] "x": eval.samples_per_prompt = 0 is not allowed: must be at least 1',
        ),
        ('name = "x"\nnum_prompts = 0', r"x: num_prompts = 0: leave the set out instead"),
        ('name = "x"\ndataset = "arithmetic"', r"x: eval.dataset = .* must not be the prompts of training"),
        ('name = "x"\nreward_function = "nothing"', r"x: eval.reward_function: unknown reward function"),
        ('name = "x"\nenvironment = { turns = 2 }', r'"x": unknown key environment.turns = 2'),
    ],
)
def test_what_is_refused(path: Path, added: str, text: str) -> None:
    path.write_text(f"{FILE}\n[[eval.set]]\n{added}\n")
    with pytest.raises(ConfigError, match=text):
        validated(draft_of(path, {}), planning=True)
