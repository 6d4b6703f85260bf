"""Columns on their way to reward functions: which one is compared, which names are taken, what cannot be read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.unit_tests.rollout.test_prompts import Characters, make_config, write_jsonl
from torchtitan.errors import UserError
from torchtitan.rollout.data.job_rows import load_datasets
from torchtitan.rollout.data.prompts import PromptMaker
from torchtitan.rollout.rewards import ARGUMENTS
from torchtitan.rollout.rewards import reward_worker as worker
from torchtitan.rollout.rewards.references import unreadable
from torchtitan.rollout.workers.inside import HEADER, read_message, written

OWN = "tests.unit_tests.rollout.reward_examples:echo"


def test_the_configured_answer_column_is_the_one_that_is_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(
        dataset=write_jsonl(tmp_path / "a.jsonl", {"prompt": "2+2", "answer": "by adding", "final": "4"})
    )
    config.rewards.answer_column, config.rewards.functions = "final", ["exact_match"]
    config.rollout.held_out_fraction = 0.0
    with caplog.at_level(logging.INFO):
        rows, _ = load_datasets(config)
    assert "column 'final' (rewards.answer_column), not 'answer'" in caplog.text
    columns = PromptMaker(config, Characters()).make(rows[0], 0).columns
    assert columns == {"answer": "4", "final": "4"}


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_a_column_that_an_argument_would_hide_is_refused(tmp_path: Path, name: str) -> None:
    def config_of(function: str, **rollout: Any) -> Any:
        row = {"prompt": "2+2", "answer": "4", name: "4"}
        config = make_config(dataset=write_jsonl(tmp_path / "a.jsonl", row), **rollout)
        config.rewards.functions = [function]
        config.rollout.held_out_fraction = 0.0
        return config

    with pytest.raises(UserError, match=f"would not see column '{name}'.*rename"):
        load_datasets(config_of(OWN))
    # Built-in functions read no such column, and the columns of prompt and answer are handed over anyway.
    load_datasets(config_of("accuracy"))
    load_datasets(config_of(OWN, prompt_column=name))
    config = config_of(OWN)
    config.rewards.answer_column = name
    load_datasets(config)
    # An environment's own reward is no function; beside it, a function's arguments count as before.
    config = config_of("accuracy")
    config.environment.factory, config.rewards.functions = "tests.environments:Guess", []
    load_datasets(config)
    config.rewards.functions = [OWN]
    with pytest.raises(UserError, match=f"would not see column '{name}'"):
        load_datasets(config)


def test_a_function_gets_these_arguments_and_the_columns() -> None:
    names = ("completions", "completion_ids", "finish_reasons", "thoughts", "final_texts", "well_formed")
    samples = {name: [0] for name in names} | {"environments": [{"score": 1}], "prompt": "", "columns": {"level": 3}}
    samples |= {"prefill": "", "max_completion_tokens": 1}
    message = {"function": OWN, "samples": samples, "state": {}}
    arguments, _ = worker.begin(lambda **arguments: arguments, message)
    assert arguments.keys() == {"level", *ARGUMENTS}
    # Only the built-in format gets well_formed; another function gets the column of that name.
    samples["columns"] = {"well_formed": "a column"}
    for name, expected in ((OWN, "a column"), ("format", 0)):
        assert worker.begin(lambda well_formed, **_: well_formed, {**message, "function": name})[0] == [expected]


UNREADABLE = [float("nan"), float("inf"), {"value": 4}, ["4", "5"], [["4"]], [], b"4"]
UNREADABLE_MATHEMATICS = ["", r"\frac{1}{", "x^2 +", r"\{x \mid x > 2\}", "because " * 20]
READABLE = [
    None,
    4,
    4.5,
    True,
    ["4"],
    ["$2$"],
    [2],
    "72",
    "#### 72",
    "yes",
    "New York",
    "红色",
    "24小时",
    "1, 2",
    r"\frac{1}{2}",
    "x^2+1",
    "(C)",
]


def test_references_that_nothing_can_read_are_found() -> None:
    references = [*READABLE, *UNREADABLE, *UNREADABLE_MATHEMATICS]
    wrong = range(len(READABLE), len(references))
    assert unreadable(references, as_mathematics=True) == [*wrong]
    assert unreadable(references, as_mathematics=False) == [*wrong[: len(UNREADABLE)]]


@pytest.mark.parametrize(
    ("function", "references", "refused"),
    [
        ("accuracy", [{"value": 1}, float("nan")], True), ("exact_match", [["4", "5"], []], True),
        ("accuracy", ["4", float("nan")], False), ("format", [float("nan")], None), ("accuracy", ["4", "5"], None),
    ],
)  # fmt: skip
def test_unreadable_references_are_refused_or_named(
    tmp_path: Path, function: str, references: list[Any], refused: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": str(i), "answer": reference} for i, reference in enumerate(references)]
    config = make_config(dataset=write_jsonl(tmp_path / "a.jsonl", *rows))
    config.rewards.functions, config.eval.num_prompts, config.rollout.held_out_fraction = [function], 0, 0.0
    if refused:
        with pytest.raises(UserError, match=rf"2 of 2 references are nothing that {function} can read \(rows 1, 2"):
            load_datasets(config)
        return
    load_datasets(config)
    assert ("1 of 2 references are nothing that accuracy can read (rows 2; such as 'nan')" in caplog.text) is (
        refused is not None
    )


def test_bytes_arrive_as_bytes(tmp_path: Path) -> None:
    message = {"row": {"image": {"bytes": b"\x89PNG", "path": None}, "text": b"4", "level": 3}}
    data = written(message)
    assert json.loads(data)
    (tmp_path / "message").write_bytes(HEADER.pack(len(data)) + data)
    with (tmp_path / "message").open("rb") as file:
        assert read_message(file) == message


@pytest.mark.parametrize("result", [{0: 1.0, 1: 0.0}, {1.0, 0.0}, "10", b"10", None, 1.0], ids=repr)
def test_only_a_sequence_of_rewards_is_taken(result: Any) -> None:
    log = worker.Log(2)
    assert f"returned {type(result).__name__}" in worker.reply(result, log)["error"]
    if result not in (None, 1.0):
        with pytest.raises(ValueError, match=f"not a {type(result).__name__}"):
            log.extra("why", result)
    assert worker.reply((value for value in (1, 0.0)), log)["values"] == [1.0, 0.0]
