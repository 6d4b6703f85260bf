"""Data sets and references that a run cannot use: what is wrong with them, and what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit_tests.conftest import WriteConfig
from torchtitan.errors import ConfigError, UserError
from torchtitan.preflight.validate import load_config
from torchtitan.rollout.data.job_rows import load_datasets
from torchtitan.rollout.data.rows import load_rows

ROW = '{"prompt": "01+02=", "answer": "300"}\n'


def write(text: str = ROW) -> Callable[[str], object]:
    return lambda name: Path(name).write_text(text)


FILES: list[tuple[str, Callable[[str], object], tuple[str, ...]]] = [
    ("data.csv", write(), ("or .parquet: convert it", "csv.read_csv('data.csv'), 'data.parquet'")),
    ("missing.csv", lambda name: None, ("convert it",)),
    ("data.json", write(), ("jq -c '.[]' data.json > data.jsonl",)),
    ("data.jsonl.gz", write(), ("gunzip data.jsonl.gz",)),
    ("data.JSONL", write(), ("rename it to data.jsonl",)),
    ("folder.jsonl", os.mkdir, ("it is a folder",)),
    ("fifo.jsonl", os.mkfifo, ("not a regular file",)),
    ("loop.jsonl", lambda name: os.symlink(name, name), ("a link to nothing, or to itself",)),
    ("gone.parquet", lambda name: os.symlink("nothing", name), ("a link to nothing, or to itself",)),
]


@pytest.mark.parametrize(("name", "make", "parts"), FILES, ids=[name for name, *_ in FILES])
@pytest.mark.parametrize("key", ["rollout.dataset", "eval.dataset"])
def test_a_file_that_is_no_dataset_is_refused_with_what_to_do(
    write_config: WriteConfig, key: str, name: str, make: Callable[[str], object], parts: tuple[str, ...]
) -> None:
    arguments = write_config()
    make(name)
    with pytest.raises(ConfigError) as caught:
        load_config([*arguments, f"--{key}", name])
    (problem,) = caught.value.problems
    assert problem.startswith(f'{key} = "{name}" is not allowed: ')
    for part in parts:
        assert part in problem
    with pytest.raises(UserError, match=re.escape(parts[0])):
        load_rows(name)


@pytest.mark.parametrize("key", ["rollout.dataset", "eval.dataset"])
def test_a_function_of_rows_that_is_not_there_is_refused(write_config: WriteConfig, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([*write_config(), f"--{key}", "no_such_module:rows"])
    assert "module no_such_module is not on the Python path" in "".join(caught.value.problems)


def test_a_function_of_rows_does_not_evaluate_what_it_trains(write_config: WriteConfig) -> None:
    rows = "torchtitan.rollout.data.rows:arithmetic_rows"
    with pytest.raises(ConfigError, match="must not be the prompts of training"):
        load_config([*write_config(), "--rollout.dataset", rows, "--eval.dataset", rows])


@pytest.mark.parametrize("name", ["data.jsonl", "./data.jsonl", "link.jsonl", "folder/../data.jsonl"])
def test_the_training_data_under_another_name_is_no_evaluation(write_config: WriteConfig, name: str) -> None:
    arguments = [*write_config(), "--rollout.dataset", "data.jsonl", "--eval.dataset", name]
    Path("data.jsonl").write_text(ROW)
    os.symlink("data.jsonl", "link.jsonl")
    os.mkdir("folder")
    with pytest.raises(ConfigError, match="must not be the prompts of training"):
        load_config(arguments)
    Path("other.jsonl").write_text(ROW)
    load_config([*arguments, "--eval.dataset", "other.jsonl"])


@pytest.mark.parametrize(
    ("functions", "key", "refused"),
    [
        (["arithmetic"], "rollout.dataset", True),
        (["accuracy", "exact_match"], "rollout.dataset", True),
        (["arithmetic"], "eval.dataset", True),
        # Rows of another task: format gives them a reward.
        (["accuracy", "format"], "rollout.dataset", False),
        (["format"], "rollout.dataset", False),
    ],
)
def test_a_null_answer_is_refused_where_nothing_else_gives_a_reward(
    write_config: WriteConfig, functions: list[str], key: str, refused: bool
) -> None:
    arguments = [*write_config(), "--rewards.functions", *functions, f"--{key}", "null.jsonl"]
    Path("null.jsonl").write_text(ROW * 9 + ROW.replace('"300"', "null"))
    if not refused:
        load_datasets(load_config(arguments))
        return
    with pytest.raises(
        UserError, match=rf"{key} = 'null.jsonl', row 10: column 'answer' .* is null, but {functions[0]}"
    ):
        load_datasets(load_config(arguments))
