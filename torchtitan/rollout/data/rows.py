"""The rows of a dataset: a built-in task, a file, a function or a name on the Hugging Face Hub; the held-out split."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torchtitan.errors import UserError, blaming, load_object
from torchtitan.models.shape.checkpoint_files import pointer_problem
from torchtitan.rollout.environments import builtin_environments as builtin
from torchtitan.rollout.environments.agent_worker import FUNCTION

Row = dict[str, Any]
FILE_ENDINGS = (".jsonl", ".parquet")
# Endings of other files -> how people make a .jsonl or .parquet file of them.
CONVERSIONS = {
    ".csv": 'convert it: python -c "from pyarrow import csv, parquet; '
    "parquet.write_table(csv.read_csv('{name}'), '{stem}.parquet')\"",
    ".gz": "unpack it: gunzip {name}",
    ".json": "write one object of its list per line: jq -c '.[]' {name} > {stem}.jsonl",
}
LARGEST_OPERAND = 99
# The address in the default repr of an object, such as an image, which differs in every process.
ADDRESS = re.compile(" at 0x[0-9a-fA-F]+")


def load_rows(dataset: str, split: str = "train") -> list[Row]:
    """Return all rows of `dataset`: a built-in task, a .jsonl or .parquet path, those of a function
    `package.module:function`, or `owner/name` or `owner/name:config` on the Hugging Face Hub, with `split` unless the
    name ends with another one in brackets.

    Raises:
        UserError: the file is missing, empty or malformed, or the dataset cannot be loaded.
    """
    if dataset in BUILT_IN:
        return BUILT_IN[dataset]()
    if FUNCTION.fullmatch(dataset):
        function = load_object(dataset, "dataset")
        with blaming(dataset, "dataset"):  # while it returns, and while a generator yields
            made = function()
            rows: list[Row] = list(made) if isinstance(made, Iterable) else []
        if not rows or not all(isinstance(row, dict) for row in rows):
            raise UserError(f"dataset {dataset!r} must return rows, each a dict of columns")
        return rows
    if problem := file_problem(dataset):
        raise UserError(f"dataset {dataset}: {problem}")
    if not dataset.endswith(FILE_ENDINGS):
        return _load_hugging_face(dataset, split)
    path = Path(dataset).expanduser()
    if not path.is_file():
        raise UserError(f"dataset file {path} does not exist (looked in {Path.cwd()})")
    rows = _read_jsonl(path) if path.suffix == ".jsonl" else _read_parquet(path)
    if not rows:
        raise UserError(f"dataset file {path} has no rows")
    return rows


def file_problem(dataset: str) -> str | None:
    """Return why a file of this name cannot be a dataset, and what to do; None for one that may be, or is missing, and
    for other names."""
    path = Path(dataset).expanduser()
    if not dataset.endswith(FILE_ENDINGS):
        ending = path.suffix.lower()
        how = f"rename it to {path.with_suffix(ending)}" if ending in FILE_ENDINGS else CONVERSIONS.get(ending)
        says = "a dataset file is .jsonl, with one JSON object per line, or .parquet: "
        return how and says + how.format(name=path, stem=path.with_suffix(""))
    if os.path.isdir(path):
        return "it is a folder, not a file"
    if os.path.exists(path):
        return pointer_problem(path) if os.path.isfile(path) else "it is not a regular file"
    return "it is a link to nothing, or to itself" if os.path.islink(path) else None


def split_of(dataset: str, usual: str) -> tuple[str, str]:
    """(the name without a split, the split) of a Hugging Face dataset such as openai/gsm8k:main[test]; `usual`: the
    split of a name without one."""
    name, _, split = dataset.removesuffix("]").partition("[")
    return name, split or usual


def arithmetic_rows() -> list[Row]:
    """Return the built-in task: two-digit addition, with the sum's digits reversed so that carries run left to right.

    The rows are all 5,050 pairs a <= b as {"prompt": "12+34=", "answer": "640"}, always in the same order.

    Operands are padded to two digits; the sum is padded to three and then reversed (12 + 34 = 046, reversed 640). Each
    pair appears in one order only, so that its mirror image cannot leak from training into evaluation.
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
    """Split rows into (training, held out), both in the order of `rows` and the same on every machine.

    `fraction` of the distinct prompts are held out; rows with the same prompt stay on the same side.
    """
    keys = [_prompt_key(row[prompt_column], seed) for row in rows]
    ordered = sorted(set(keys))
    held = set(ordered[: round(fraction * len(ordered))])
    train = [row for row, key in zip(rows, keys, strict=True) if key not in held]
    return train, [row for row, key in zip(rows, keys, strict=True) if key in held]


def _prompt_key(prompt: Any, seed: int) -> bytes:
    text = json.dumps(prompt, sort_keys=True, ensure_ascii=False, default=described)
    return hashlib.blake2b(f"{seed}:{text}".encode(errors="replace"), digest_size=16).digest()


def described(value: Any) -> str:
    """Return text for a value that JSON cannot represent, the same in every process."""
    return ADDRESS.sub("", str(value))


def _read_jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}, line {number}: not valid JSON ({error})") from error
            if not isinstance(row, dict):
                raise UserError(f"{path}, line {number}: expected a JSON object, found {type(row).__name__}")
            rows.append(row)
    return rows


def _read_parquet(path: Path) -> list[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UserError(f"{path}: parquet files need pyarrow, which is not installed (pip install pyarrow)") from None
    try:
        return parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as parquet: {error}") from error


def _load_hugging_face(dataset: str, usual_split: str) -> list[Row]:
    whole, split = split_of(dataset, usual_split)
    name, _, subset = whole.partition(":")
    if Path(dataset).expanduser().is_file():
        raise UserError(f"dataset file {dataset} must end with {' or '.join(FILE_ENDINGS)}: convert it")
    try:
        import datasets

        loaded = datasets.load_dataset(name, subset or None, split=split)
    except Exception as error:  # the library raises many kinds: no network, no such name, split or subset
        raise UserError(f"Hugging Face dataset {dataset!r} (split {split!r}) cannot be loaded: {error}") from error
    return [dict(row) for row in loaded]
