"""Functions and rows from Python as files: what is written, that it stands alone, and what is refused."""

from __future__ import annotations

import linecache
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.policies import make_debug_checkpoint
from torchtitan import train
from torchtitan.api import names_of, write_rows
from torchtitan.config.job_config import JobConfig
from torchtitan.config.reading import Draft, Problem
from torchtitan.errors import ConfigError, UserError
from torchtitan.grpo_train import Run
from torchtitan.preflight.validate import draft_of, load_config
from torchtitan.rollout.data.rows import load_rows
from torchtitan.rollout.rewards import load_reward
from torchtitan.rollout.rewards.builtin_rewards import arithmetic

CELL = """
import math as m
import re
import xml.dom.minidom
from collections import Counter
from torchtitan.rollout.rewards.builtin_rewards import texts

raise_if_run_again = print("this line is no definition")
PATTERN = re.compile("[0-9]+", re.ASCII)
WEIGHTS = {"a": (1, 2.5)}
TABLE = open("/dev/null")

class Counting:
    pass

def even(n):
    return n == 0 or odd(n - 1)

def odd(n: TABLE, m: "TABLE" = None) -> TABLE:
    return n != 0 and is_even(n - 1)

is_even = even

def mine(completions, **kwargs) -> "list[float]":
    TABLE = 0  # a name of its own
    found = [even(len(PATTERN.findall(text))) + Counter(text)["x"] + TABLE for text in texts(completions)]
    return [WEIGHTS["a"][1] + m.floor(1.5) + number for number in found]

def in_tags(completions, **kwargs):
    documents = [xml.dom.minidom.parseString(text) for text in completions]
    return [len(document.getElementsByTagName("answer")) for document in documents]

def opens(completions: TABLE, **kwargs):
    return [len(TABLE.read())]

def make(scale):
    def closure(completions, **kwargs):
        return [scale]
    return closure

closure = make(2)
nameless = lambda completions, **kwargs: [1.0]
"""


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of a notebook's cell: its source is in linecache, as IPython has it, and there is no file."""
    names: dict[str, Any] = {"__name__": "__main__"}
    linecache.cache["<ipython-input-1>"] = (len(CELL), None, CELL.splitlines(keepends=True), "<ipython-input-1>")
    main = type(sys)("__main__")
    main.__dict__.update(names)
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(CELL, "<ipython-input-1>", "exec"), main.__dict__)
    return main.__dict__


def test_a_cells_function_is_written_with_all_that_it_uses(cell: dict[str, Any], tmp_path: Path) -> None:
    (name,) = names_of([cell["mine"]], tmp_path / "new", "reward function")
    module, _, function = name.partition(":")
    text = (tmp_path / "new" / f"{module}.py").read_text()
    assert function == "mine" and "this line" not in text and "/dev/null" not in text
    code = f"import {module}; print({module}.mine(completions=['1 2', '1x']))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "new", env={"PYTHONPATH": f"{Path.cwd()}"},
        capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(cell["mine"](completions=["1 2", "1x"])) == "[4.5, 4.5]"
    assert names_of([cell["mine"]], tmp_path / "new", "reward function") == [name]


def test_modules_inside_of_a_package_come_along(cell: dict[str, Any], tmp_path: Path) -> None:
    (name,) = names_of([cell["in_tags"]], tmp_path, "reward function")
    module, _, function = name.partition(":")
    code = f"import {module}; print({module}.{function}(completions=['<x><answer/><answer/></x>']))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={}, capture_output=True, text=True, timeout=PATIENCE_S,
        check=False,
    )  # fmt: skip
    assert done.stdout == "[2]\n", done.stderr


def test_a_command_line_finds_what_a_run_from_python_has_written(
    cell: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = names_of([cell["mine"]], tmp_path / "out" / "from_python", "reward function")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    words = ["--job.config_file", "debug_cpu", "--rewards.functions", name]
    with pytest.raises(ConfigError, match="is not on the Python path"):
        load_config([*words, "--job.dump_folder", str(tmp_path / "another")])
    assert load_config([*words, "--job.dump_folder", str(tmp_path / "out")]).rewards.functions == [name]
    assert load_reward(name)(completions=["1 2"]) == [4.5]


def test_a_scripts_class_comes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    text = "BASE = 2\nclass Points:\n    each = BASE\ndef mine(completions, **kwargs):\n    return [Points.each]\n"
    script.write_text(text)
    main = type(sys)("__main__")
    main.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(text, str(script), "exec"), main.__dict__)
    (name,) = names_of([main.mine], tmp_path, "reward function")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_reward(name)(completions=["x"]) == [2]


def test_what_can_be_imported_stays_where_it_is(tmp_path: Path) -> None:
    names = names_of(["accuracy", arithmetic], tmp_path, "reward function")
    assert names == ["accuracy", "torchtitan.rollout.rewards.builtin_rewards:arithmetic"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("opens", "reward function opens: uses TABLE, a TextIOWrapper that exists only in this process"),
        ("closure", "reward function closure: it is a closure over scale"),
        ("nameless", "a lambda has no name"),
        ("Counting", "must be a function"),
    ],
)
def test_what_cannot_stand_alone_is_refused(cell: dict[str, Any], tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        names_of([cell[name]], tmp_path, "reward function")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("other_text", ["", "import sys; exec(sys.stdin.readline())\n"])
def test_a_function_without_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_text: str) -> None:
    if other_text:
        # Python 3.13 and later keep the text of `python -c` so, under the name that exec() gives to code.
        lines = other_text.splitlines(keepends=True)
        monkeypatch.setitem(linecache.cache, "<string>", (len(other_text), None, lines, "<string>"))
    else:
        monkeypatch.delitem(linecache.cache, "<string>", raising=False)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("def typed(completions, **kwargs): return [1.0]", names)
    with pytest.raises(UserError, match="source of typed cannot be read"):
        names_of([names["typed"]], tmp_path, "reward function")


def test_rows_are_written_as_json_lines(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": [{"role": "user", "content": "\u2028ä"}], "answer": None}]
    assert load_rows(write_rows(iter(rows), tmp_path)) == rows


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([], "no rows"),
        (["1+1="], "row 1: must be a dict"),
        ([{"prompt": "a"}, {"prompt": b"a"}], "row 2: JSON cannot hold it"),
        ([{"prompt": "a", "weight": float("nan")}], "row 1: JSON cannot hold it"),
    ],
)
def test_rows_that_no_file_can_hold(tmp_path: Path, rows: list[Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        write_rows(rows, tmp_path)


def test_a_dict_may_have_tables_and_dotted_keys() -> None:
    options = {"inference.backend": "vllm", "inference": {"vllm": {"args": {"max_model_len": 8}, "memory_gb": 2}}}
    draft = draft_of({"training.steps": 3, "training": {"seed": 4}, "model.hf_assets_path": Path("x"), **options}, {})
    config, problems = draft.build()
    assert not problems
    assert (config.training.steps, config.training.seed, config.model.hf_assets_path) == (3, 4, "x")
    assert config.inference.engine.args == {"max_model_len": 8} and config.inference.engine.memory_gb == 2.0


def slip(config: JobConfig) -> JobConfig:
    config.training.stepz = 3  # type: ignore[attr-defined]
    config.grpo.group_size = 1
    return config


@pytest.mark.parametrize(
    ("config", "overrides", "parts"),
    [
        (lambda: "nope.toml", {}, ['"nope.toml" does not exist']),
        (lambda: {"trainin": {}, "eval": {"greedy": 1}}, {}, ["config: unknown table", "eval.greedy = 1"]),
        (lambda: {"model.hf_asets_path": "x"}, {}, ['config: unknown key model.hf_asets_path = "x" (nearest: ']),
        (dict, {"training.stepz": 1, "eval.greedy": "no"}, ["overrides: unknown key training.stepz", '"no"']),
        (lambda: slip(JobConfig()), {}, ["unknown key training.stepz", "grpo.group_size = 1 is not allowed"]),
        (lambda: replace(JobConfig(), training={"stepz": 1}, eval=3), {}, ["key training.stepz", "eval = 3 must be"]),
        (lambda: "debug_cpu", {"training.steps": 0}, ["overrides: training.steps = 0 is not allowed"]),
        (lambda: "debug_cpu", {"source": [{"name": "a", "weigth": 2}]}, ['[[source]] "a": unknown key weigth = 2']),
        (lambda: "debug_cpu", {"steps": 3}, ["overrides: steps = 3 stands outside a table (nearest: training.steps)"]),
    ],
)
def test_mistakes_of_python_callers_come_together(
    config: Callable[[], Any], overrides: dict[str, Any], parts: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError) as caught:
        train(config(), overrides)
    for part in parts:
        assert any(part in problem for problem in caught.value.problems), caught.value
    assert not list(tmp_path.iterdir())


def test_train_is_refused_where_it_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    caught: list[BaseException] = []

    def call() -> None:
        try:
            train("debug_cpu")
        except UserError as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(PATIENCE_S)
    assert "main thread" in str(caught[0])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="torchrun"):
        train("debug_cpu")


def test_a_model_is_a_directory_or_the_hint_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[JobConfig] = []

    def run(config: JobConfig) -> Run:
        started.append(config)
        return Run(tmp_path, 0, 0)

    monkeypatch.setattr("torchtitan.api.run_job", run)
    monkeypatch.chdir(tmp_path)
    rows, model = [{"prompt": f"{n}+1=", "answer": f"{n + 1}"} for n in range(20)], tmp_path / "model"
    make_debug_checkpoint(model)
    small = {"training.seq_len": 32, "rollout.max_completion_tokens": 4}
    train(model=model, overrides=small, dataset=rows)
    train(str(model), small, dataset=rows)
    assert [config.model.hf_assets_path for config in started] == [str(model)] * 2
    with pytest.raises(UserError, match="hf download HuggingFaceTB/SmolLM2-135M"):
        train(model="HuggingFaceTB/SmolLM2-135M", overrides=small, dataset=rows)


def test_tables_as_arguments_of_train_are_nested_overrides_and_the_configuration_is_built_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[JobConfig] = []
    builds: list[Draft] = []
    build = Draft.build

    def run(config: JobConfig) -> Run:
        started.append(config)
        return Run(tmp_path, 0, 0)

    def counted_build(draft: Draft) -> tuple[JobConfig, list[Problem]]:
        builds.append(draft)
        return build(draft)

    monkeypatch.setattr("torchtitan.api.run_job", run)
    monkeypatch.setattr(Draft, "build", counted_build)
    monkeypatch.chdir(tmp_path)
    make_debug_checkpoint(tmp_path / "model")
    small = {"training.seq_len": 32, "rollout.max_completion_tokens": 4}
    train(
        tmp_path / "model",
        small,
        inference={"num_actors": 1},
        weight_sync={"transport": "disk", "disk": {"delta": True}},
    )
    (config,) = started
    assert config.weight_sync.transport == "disk" and config.weight_sync.table.delta
    assert config.inference.num_actors == 1 and len(builds) == 1
    with pytest.raises(ConfigError, match=r"unknown table \[inferense\]"):
        train(tmp_path / "model", small, inferense={"num_actors": 1})
    with pytest.raises(ConfigError, match=r"inference\.vllm\.memory_gb = 2 has no effect"):
        train(tmp_path / "model", small, inference={"vllm": {"memory_gb": 2}})
