"""Functions and classes of the user's that the run could not call: told before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit_tests.conftest import WriteConfig
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import ConfigError, UserError
from torchtitan.preflight.validate import load_config
from torchtitan.rollout.data.job_rows import load_datasets

MODULE = '''
"""A module that fails where it is run."""
import functools
raise SystemExit("it was run")
def without_kwargs(completions, answer): ...
def positional(completions, /, **kwargs): ...
def other_column(completions, answr, **kwargs): ...
def good(completions, answer, level=1, *, log_metric, **kwargs): ...
async def asked(prompts, completions, **kwargs): ...
@functools.cache
def decorated(completions): ...
class Judge:
    async def __call__(self, completions, **kwargs): ...
judge = Judge()
def changed(completions): ...
changed = functools.partial(good)
class NoReset:
    def step(self, action): ...
class OtherRow:
    def reset(self, board, **row): ...
    def step(self, action): ...
class NoAction:
    def reset(self, **row): ...
    def step(self): ...
class Game:
    def reset(self, prompt, answer, seed=0, **row): ...
    def step(self, action): ...
class Inherits(Game):
    pass
def undocumented(x: int): ...
def untyped(x):
    """Doubles x."""
def told(x: int): ...
told.__doc__ = "Doubles x."
class Mended:
    def step(self, action): ...
Mended.reset = lambda self, **row: ""
def loss(log_probs, advantages): ...
def sequence_loss(log_probs, log_ratio, advantages, options, sequences): ...
def rows(path): ...
'''


@pytest.fixture
def arguments(write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    words = write_config()
    Path("signatures.py").write_text(MODULE)
    monkeypatch.syspath_prepend(Path.cwd())
    return words


@pytest.mark.parametrize(
    ("option", "name", "reason"),
    [
        ("rewards.functions", "without_kwargs", "signatures.py, line 5): it must end with **kwargs, because it also"),
        ("rewards.functions", "positional", "its arguments are passed by name: leave out the `/`"),
        ("rewards.functions", "other_column", "no row of the dataset has a column 'answr' (nearest: answer); there"),
        ("eval.reward_function", "other_column", "eval.reward_function: reward function 'signatures:other_column'"),
        ("environment.factory", "NoReset", "it has no method reset(self, **row)"),
        ("environment.factory", "OtherRow", "no row has a column 'board'; there are answer, prompt"),
        ("environment.factory", "NoAction", "step cannot be called with (self, action): too many positional"),
        ("environment.tools", "undocumented", "it needs a docstring"),
        ("environment.tools", "untyped", "parameter x needs a type annotation"),
        (
            "grpo.loss_type",
            "loss",
            "cannot be called with (log_probs, log_ratio, advantages, options, and sequences if",
        ),
        ("grpo.advantage", "loss", ""),
        ("grpo.group_filter", "loss", "cannot be called with (group): missing a required argument: 'advantages'"),
        ("rollout.sampler", "loss", "cannot be called with (means, variances, groups, typical): too many"),
        ("rollout.dataset", "rows", "cannot be called with (): missing a required argument: 'path'"),
    ],
)
def test_what_cannot_be_called_is_refused_before_a_start(
    arguments: list[str], option: str, name: str, reason: str
) -> None:
    words = [*arguments, "--grpo.allow_uncorrected", "true", f"--{option}", f"signatures:{name}"]
    if not reason:
        assert load_config(words)
        return
    with pytest.raises(ConfigError) as caught:
        load_config(words)
    (problem,) = caught.value.problems
    assert problem.startswith(option) and reason in problem


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("rewards.functions", ["good", "asked", "decorated", "judge", "changed"]),
        ("environment.factory", ["Game"]),
        ("environment.factory", ["Inherits"]),
        ("environment.factory", ["Mended"]),
        ("environment.tools", ["told"]),
        ("grpo.loss_type", ["sequence_loss"]),
    ],
)
def test_what_may_be_called_or_only_running_it_would_tell_is_accepted(
    arguments: list[str], option: str, names: list[str]
) -> None:
    words = [*arguments, "--grpo.allow_uncorrected", "true", f"--{option}", *(f"signatures:{name}" for name in names)]
    assert load_config(words)


def test_columns_of_a_file_are_looked_at_and_all_of_them_where_it_is_loaded(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"{number}", "answer": "1"} for number in range(9)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [*arguments, "--rollout.dataset", "rows.jsonl", "--rewards.functions", "signatures:other_column"]
    with pytest.raises(ConfigError, match="has a column 'answr'"):
        load_config(words)
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"prompt": "", "answr": 2, "answer": 1}])))
    assert load_config(words)
    with pytest.raises(ConfigError, match='prompt_column = "question" .*"rows.jsonl" has no such column'):
        load_config([*words, "--rollout.prompt_column", "question"])
    # Only the beginning of a large file is looked at: a column may be in later rows alone.
    monkeypatch.setattr("torchtitan.rollout.data.peek.BYTES", 99)
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert load_config(words)
    with pytest.raises(ConfigError, match="has no such column; there are answer, prompt"):
        load_config([*words, "--rollout.prompt_column", "question"])
    # Where nothing is known before the rows are loaded, they tell.
    config = JobConfig()
    config.rollout.dataset, config.rewards.functions = "signatures:rows_of", ["signatures:other_column"]
    monkeypatch.setattr("torchtitan.rollout.data.job_rows.load_rows", lambda *_, **__: rows)
    with pytest.raises(UserError, match="'signatures:rows_of': reward function .* has a column 'answr'"):
        load_datasets(config)
