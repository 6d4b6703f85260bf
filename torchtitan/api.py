"""Training from Python, in a script or a notebook; `from torchtitan import train` finds it here.

    run = train("train_configs/debug_cpu.toml", {"training.steps": 50})
    print(run.metrics["eval/pass@1"])

The command line (grpo_train.py) runs the same job.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torchtitan.config.derived import world_size
from torchtitan.errors import UserError
from torchtitan.grpo_train import Run, run_job
from torchtitan.preflight import own_code
from torchtitan.preflight.loading import Config, draft_of, ready

Rows = Iterable[Mapping[str, Any]]
Reward = str | Callable[..., Any]


def train(
    config: Config,
    overrides: Mapping[str, Any] | None = None,
    *,
    rewards: Reward | Iterable[Reward] | None = None,
    dataset: str | Rows | Callable[[], Rows] | None = None,
    environment: str | type | None = None,
    tools: Iterable[str | Callable[..., Any]] | None = None,
    loss: str | Callable[..., Any] | None = None,
    advantage: str | Callable[..., Any] | None = None,
    correction: str | Callable[..., Any] | None = None,
    group_filter: str | Callable[..., Any] | None = None,
) -> Run:
    """Run a job in this process, as one rank, until its last step or a stop signal; call it in the main thread.

    SIGINT and SIGTERM save and end the run, a second one ends the process; afterwards they mean what they did before.

    Args:
        config: a TOML file (or the name of a shipped one, such as "debug_cpu"), a dict of its tables, or a JobConfig.
        overrides: values by `table.key`, such as {"training.steps": 3}.
        rewards: for rewards.functions: names, or functions in TRL's call convention, which worker processes run.
        dataset: for rollout.dataset: its name, rows (dicts of columns), or a function that returns them.
        environment: for environment.factory: its name, or the class, of which worker processes make instances.
        tools: for environment.tools: names, or functions, which worker processes run.
        loss, advantage, correction, group_filter: for grpo.loss_type, .advantage, .off_policy_correction and
            .group_filter: a name, or a function, which this process runs (docs/adding_an_objective.md).

    Raises:
        UserError: a mistake in the configuration (ConfigError, with all of them), or what stopped the run early.
    """
    if world_size() > 1:
        raise UserError("train() is one rank; several are started by: torchrun -m torchtitan.grpo_train (run_grpo.sh)")
    if threading.current_thread() is not threading.main_thread():
        raise UserError("train() must be called in the main thread: stop signals reach no other one")
    draft = draft_of(config, overrides or {})
    folder = Path(draft.build()[0].job.dump_folder).resolve() / own_code.FOLDER
    if rewards is not None:
        several = [rewards] if isinstance(rewards, str) or callable(rewards) else rewards
        draft.set("rewards.functions", own_code.names_of(several, folder, "reward function"), "rewards")
    if environment is not None:
        (name,) = own_code.names_of([environment], folder, "environment", type)
        draft.set("environment.factory", name, "environment")
    if tools is not None:
        draft.set("environment.tools", own_code.names_of(tools, folder, "tool"), "tools")
    own = {"loss_type": loss, "advantage": advantage, "off_policy_correction": correction, "group_filter": group_filter}
    for key, function in own.items():
        if function is not None:
            (name,) = own_code.names_of([function], folder, key)
            draft.set(f"grpo.{key}", name, key)
    if dataset is not None:
        rows = dataset() if callable(dataset) else dataset
        name = rows if isinstance(rows, str) else own_code.write_rows(rows, folder)
        draft.set("rollout.dataset", name, "dataset")
    with _as_found(folder):
        return run_job(ready(draft))


@contextlib.contextmanager
def _as_found(folder: Path) -> Iterator[None]:
    """Leave the caller's process as it was: its environment, its log handlers, its import path (plus `folder`)."""
    environment, path, logger = dict(os.environ), list(sys.path), logging.getLogger()
    handlers, level = logger.handlers, logger.level
    logger.handlers = []
    sys.path.append(str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for handler in logger.handlers:
            handler.close()
        logger.handlers, sys.path[:] = handlers, path
        logger.setLevel(level)
        os.environ.clear()
        os.environ.update(environment)
