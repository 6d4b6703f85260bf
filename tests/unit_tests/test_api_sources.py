"""Sources from Python: what becomes of functions, classes and rows, and reasoning-gym's tasks as sources."""

from __future__ import annotations

import asyncio
import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import torchtitan.api
from torchtitan import Source, train
from torchtitan.config.source_configs import source_configs
from torchtitan.errors import UserError
from torchtitan.preflight.validate import draft_of, validated
from torchtitan.rollout.data.job_rows import load_datasets
from torchtitan.rollout.environments.builtin_environments import Guess, add
from torchtitan.rollout.rewards.reward_pool import RewardPool
from torchtitan.rollout.types import Prompt, Trajectory

ROOT = Path(__file__).resolve().parents[2]
MODEL = {"model": {"name": "qwen3", "flavor": "0.6B"}}


def short(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text) < 3) for text in completions]


def test_a_source_from_python_is_a_table_of_the_configuration(tmp_path: Path) -> None:
    rows = [{"prompt": str(i), "answer": "x"} for i in range(20)]
    sources = [
        Source("own", dataset=rows, rewards=[short, "exact_match"], weight=2, values={"rewards.weights": [1.0, 0.5]}),
        Source("made", dataset=lambda: rows, rewards=short),
        Source("game", dataset="guess", environment=Guess, rewards=[], required=False),
        Source("tool", environment={"max_turns": 3}, tools=add, rewards="arithmetic", weight=0.5),
    ]
    draft = draft_of(MODEL, {"eval.num_prompts": 0})
    draft.set_sources([source.table(tmp_path) for source in sources], "sources")
    configs = dict(source_configs(validated(draft, planning=True)))
    assert load_datasets(configs["own"])[0] + load_datasets(configs["own"])[1]
    assert configs["own"].rollout.dataset == configs["made"].rollout.dataset
    assert configs["own"].rewards.functions == [f"{__name__}:short", "exact_match"]
    assert configs["own"].rewards.weights == [1.0, 0.5] and configs["made"].rewards.weights == []
    builtin = "torchtitan.rollout.environments.builtin_environments"
    assert configs["game"].environment.factory == f"{builtin}:Guess"
    assert configs["tool"].environment.tools == [f"{builtin}:add"] and configs["tool"].environment.max_turns == 3
    given = {name: config.source[0] for name, config in configs.items()}
    assert [given[source_name].weight for source_name in ("own", "made", "tool")] == [2.0, None, 0.5]
    assert not given["game"].required and given["tool"].required
    with pytest.raises(UserError, match="row 1: must be a dict"):
        Source("bad", dataset=[1]).table(tmp_path)  # type: ignore[list-item]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs the extra real")
def test_five_tasks_of_reasoning_gym_are_five_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(torchtitan.api, "train", lambda *arguments, **named: called.append((arguments, named)))
    monkeypatch.setattr(sys, "argv", ["several.py", "model"])
    runpy.run_path(str(ROOT / "examples" / "real" / "several.py"), run_name="several")
    (((_, settings), named),) = called
    draft = draft_of(MODEL, {**settings, "eval.num_prompts": 0})
    monkeypatch.syspath_prepend(tmp_path)
    sources = [task for task in named["sources"] if task.name in ("spell_backward", "number_sorting", "chain_sum")]
    assert len(named["sources"]) == 5 and len(sources) == 3
    draft.set_sources([source.table(tmp_path) for source in sources], "sources")
    config = validated(draft, planning=True)

    async def scores() -> list[list[float | None]]:
        pool = RewardPool(config)
        await pool.start()
        found = []
        for name, source_config in source_configs(config):
            row = load_datasets(source_config)[0][0]
            prompt = Prompt(0, row["prompt"], [1], {"entry": row["entry"]}, source=name)
            trajectories = [Trajectory([], "stop", text) for text in (f" {row['entry']['answer']} ", "no")]
            monkeypatch.setattr(Trajectory, "completion_ids", [1])
            found.append([reward for reward, _ in await pool.score(prompt, trajectories)])
        await pool.close()
        return found

    for right, wrong in asyncio.run(scores()):
        assert right == 1.0 and wrong is not None and wrong < 0.1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"config": 3}, "config: must be a TOML file, a dict of tables or a JobConfig, found int"),
        ({"overrides": ["training.steps"]}, "overrides: must be a dict, .* found list"),
        ({"config": "Qwen/Qwen3-0.6B"}, "no file Qwen/Qwen3-0.6B; for a model of the Hub: model='Qwen/Qwen3-0.6B'"),
        ({"rewards": 1.0}, "rewards: must be a name, a function, or a list of these, found float"),
        ({"dataset": 3}, "dataset: must be a name, rows, or a function that returns them, found int"),
        ({"dataset": lambda: None}, "dataset: must be a name, rows, or a function .*, found NoneType"),
        ({"tools": 3}, "tools: must be a name, a function, or a list of these, found int"),
        ({"sources": {"name": "sums"}}, "sources: must be a list of Source, found str"),
        ({"sources": 3}, "sources: must be a list of Source, found int"),
        ({"sources": Source("sums", rewards=3)}, "rewards: must be a name, a function, or a list of these, found int"),
    ],
)
def test_an_argument_of_no_possible_type_is_named(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        train(**arguments)


def test_a_model_in_memory_is_refused_with_what_to_do() -> None:
    with pytest.raises(UserError, match=r"a LoadedModel in memory cannot be trained, .* save_pretrained\(FOLDER\)"):
        train("debug_cpu", model=type("LoadedModel", (), {})())
