"""Rows of prompts (the built-in tasks, a .jsonl or .parquet file, a Hugging Face dataset) and their held-out share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchtitan.config.derived import has_engines, judging_reward
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.rollout.environments import builtin
from torchtitan.rollout.rewards import NEEDS_ANSWER

Row = dict[str, Any]

FILE_ENDINGS = (".jsonl", ".parquet")
LARGEST_OPERAND = 99


def load_datasets(config: JobConfig) -> tuple[list[Row], list[Row]]:
    """Training rows and held-out rows of a job.

    The held-out rows are those of eval.dataset, or else rollout.held_out_fraction of the training data; the split
    depends on the data alone, not on training.seed, so that runs with several seeds are compared on the same prompts.

    Raises:
        UserError: a file, column or package is missing, or a row is malformed.
    """
    rollout, evaluation = config.rollout, config.eval
    # Demonstrations are judged only where evaluations sample.
    trained_on = set(config.rewards.functions) if config.job.stage != "sft" else set()
    judging = {judging_reward(config)} if evaluation.enable and has_engines(config) else set()
    rows = load_rows(rollout.dataset, rollout.dataset_split)
    # The held-out share of the training rows is judged by both.
    functions = trained_on if evaluation.dataset else trained_on | judging
    _check_rows(rows, config, rollout.dataset, "rollout.dataset", functions)
    if not evaluation.dataset:
        train, held_out = hold_out(rows, rollout.held_out_fraction, rollout.prompt_column)
        if not train:
            raise UserError(
                f"rollout.held_out_fraction = {rollout.held_out_fraction} leaves no training prompt of "
                f"the {len(rows)} rows of {rollout.dataset}"
            )
        return train, held_out
    held_out = load_rows(evaluation.dataset, evaluation.dataset_split)
    _check_rows(held_out, config, evaluation.dataset, "eval.dataset", judging)
    return rows, held_out


def load_rows(dataset: str, split: str = "train") -> list[Row]:
    """All rows of `dataset`: a built-in task, a .jsonl or .parquet path, or a Hugging Face name (`name` or
    `name:config`).

    Raises:
        UserError: the file is missing, empty or malformed, or the dataset cannot be loaded.
    """
    if dataset in BUILT_IN:
        return BUILT_IN[dataset]()
    if not dataset.endswith(FILE_ENDINGS):
        return _load_hugging_face(dataset, split)
    path = Path(dataset).expanduser()
    if not path.is_file():
        raise UserError(f"dataset file {path} does not exist (looked in {Path.cwd()})")
    rows = _read_jsonl(path) if path.suffix == ".jsonl" else _read_parquet(path)
    if not rows:
        raise UserError(f"dataset file {path} has no rows")
    return rows


def arithmetic_rows() -> list[Row]:
    """The built-in task, two-digit addition with the digits of the sum reversed, so that the carry runs left to right.

    All 5,050 pairs a <= b as rows {"prompt": "12+34=", "answer": "640"}, always in the same order.

    Operands are padded to two digits, the sum to three and then reversed (12 + 34 = 046, reversed 640). A pair stands
    here in one order only, so that its mirror image cannot leak from training into evaluation.
    """
    return [
        {"prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"[::-1]}
        for a in range(LARGEST_OPERAND + 1)
        for b in range(a, LARGEST_OPERAND + 1)
    ]


BUILT_IN: dict[str, Callable[[], list[Row]]] = {
    "arithmetic": arithmetic_rows,
    "calculator": builtin.calculator_rows,
    "guess": builtin.guess_rows,
}


def hold_out(
    rows: Sequence[Row], fraction: float, prompt_column: str = "prompt", seed: int = 0
) -> tuple[list[Row], list[Row]]:
    """Split rows into (training, held out), both in the order of `rows`, the same on every machine.

    Whole prompts are held out, `fraction` of the different ones: rows with the same prompt stay on the same side.
    """
    keys = [_prompt_key(row[prompt_column], seed) for row in rows]
    ordered = sorted(set(keys))
    held = set(ordered[: round(fraction * len(ordered))])
    train = [row for row, key in zip(rows, keys, strict=True) if key not in held]
    return train, [row for row, key in zip(rows, keys, strict=True) if key in held]


def _prompt_key(prompt: Any, seed: int) -> bytes:
    text = json.dumps(prompt, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(f"{seed}:{text}".encode(), digest_size=16).digest()


def _read_jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{path}, line {number}: not valid JSON ({error})") from error
            if not isinstance(row, dict):
                raise UserError(f"{path}, line {number}: expected a JSON object, found {type(row).__name__}")
            rows.append(row)
    return rows


def _read_parquet(path: Path) -> list[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(f"reading {path} needs pyarrow: EXTRAS=data in front of ./run_grpo.sh installs it") from error
    try:
        return parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as parquet: {error}") from error


def _load_hugging_face(dataset: str, split: str) -> list[Row]:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"rollout.dataset or eval.dataset = {dataset!r} is neither built in nor a .jsonl or .parquet file, and "
            "loading it by its Hugging Face name needs the package datasets: EXTRAS=data in front of ./run_grpo.sh "
            "installs it"
        ) from error
    name, _, subset = dataset.partition(":")
    try:
        loaded = datasets.load_dataset(name, subset or None, split=split)
    except Exception as error:  # the library raises many kinds: no network, no such name, split or subset
        raise UserError(f"Hugging Face dataset {dataset!r} (split {split!r}) cannot be loaded: {error}") from error
    return [dict(row) for row in loaded]


def _check_rows(rows: Sequence[Row], config: JobConfig, dataset: str, key: str, functions: set[str]) -> None:
    """Every row must have a usable prompt, and the reference answer where one of these reward functions needs it."""
    wanted = {config.rollout.prompt_column: "rollout.prompt_column"}
    if NEEDS_ANSWER & functions:
        wanted[config.rewards.answer_column] = "rewards.answer_column"
    for number, row in enumerate(rows, start=1):
        for column, setting in wanted.items():
            if column not in row:
                there = ", ".join(map(repr, row)) or "none"
                raise UserError(
                    f"{key} = {dataset!r}, row {number}: no column {column!r} ({setting}); there are {there}"
                )
        problem = _prompt_problem(row[config.rollout.prompt_column])
        if problem:
            raise UserError(f"{key} = {dataset!r}, row {number}, column {config.rollout.prompt_column!r}: {problem}")
        if config.job.stage == "sft" and (problem := _completion_problem(row, config)):
            raise UserError(f"{key} = {dataset!r}, row {number}: {problem}")


def _completion_problem(row: Row, config: JobConfig) -> str | None:
    prompt, column = row[config.rollout.prompt_column], config.sft.completion_column
    if row.get(column) is None:
        if isinstance(prompt, list) and any(message["role"] == "assistant" for message in prompt):
            return None
        there = ", ".join(map(repr, row))
        return f"no column {column!r} (sft.completion_column), and no chat with answers in it; there are {there}"
    problem = _prompt_problem(row[column])
    return problem and f"column {column!r}: {problem}".replace("a prompt", "a completion").replace("the prompt", "it")


def _prompt_problem(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return None if prompt else "the prompt is empty"
    if isinstance(prompt, list) and prompt:
        if all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt):
            return None
        return "a chat message needs the keys 'role' and 'content'"
    return f"a prompt must be text or a list of chat messages, found {type(prompt).__name__}"
