"""The training loop, from Python or from the command line.

    from torchtitan import train
    run = train("train_configs/debug_cpu.toml", {"training.steps": 50})

    torchrun --nproc_per_node=2 -m torchtitan.grpo_train --job.config_file train_configs/debug_cpu.toml

Reads like the picture of a step in docs/how_a_step_flows.md: a command arrives (normally a batch), the policy trains on
it, the new version is offered to the actors, and the next command is asked for. Every rank runs this same loop.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torchtitan.config.command_line import read_command_line
from torchtitan.config.derived import world_size
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.preflight import own_code
from torchtitan.preflight.loading import Config, draft_of, ready, validated
from torchtitan.preflight.plan import describe_plan
from torchtitan.utils.json_lines import read_json_lines
from torchtitan.utils.machine import leave

Rows = Iterable[Mapping[str, Any]]
Reward = str | Callable[..., Any]


@dataclass(frozen=True)
class Run:
    """What a run has done."""

    folder: Path
    """Its run folder: metrics, checkpoints, report (docs/quick_start.md)"""
    version: int
    """Trained batches"""
    exit_code: int
    """0, or 128 + the signal that stopped it, such as 130 after Ctrl-C"""

    @property
    def metrics(self) -> dict[str, Any]:
        """The last value of every metric in metrics.jsonl, of steps and evaluations."""
        return {name: value for line in read_json_lines(self.folder / "metrics.jsonl") for name, value in line.items()}


def train(
    config: Config,
    overrides: Mapping[str, Any] | None = None,
    *,
    rewards: Reward | Iterable[Reward] | None = None,
    dataset: str | Rows | Callable[[], Rows] | None = None,
) -> Run:
    """Run a job in this process, as one rank, until its last step or a stop signal; call it in the main thread.

    SIGINT and SIGTERM save and end the run, a second one ends the process; afterwards they mean what they did before.

    Args:
        config: a TOML file (or the name of a shipped one, such as "debug_cpu"), a dict of its tables, or a JobConfig.
        overrides: values by `table.key`, such as {"training.steps": 3}.
        rewards: for rewards.functions: names, or functions in TRL's call convention, which worker processes run.
        dataset: for rollout.dataset: its name, rows (dicts of columns), or a function that returns them.

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
        draft.set("rewards.functions", own_code.names_of_rewards(several, folder), "rewards")
    if dataset is not None:
        rows = dataset() if callable(dataset) else dataset
        name = rows if isinstance(rows, str) else own_code.write_rows(rows, folder)
        draft.set("rollout.dataset", name, "dataset")
    with _as_found(folder):
        return run_job(ready(draft))


def run_job(config: JobConfig) -> Run:
    """Run a validated job on this rank. Raises UserError for what stopped it early."""
    from torchtitan.trainer.commands import Kind
    from torchtitan.trainer.job import Job

    with Job(config) as job:
        job.start()
        while (command := job.next_command()).kind is not Kind.STOP:
            if command.kind is Kind.SNAPSHOT:
                job.publish_pending()
            elif command.generation is not None:
                job.generate(command.generation)
            elif command.kind is Kind.EXPORT:
                job.export_on_demand()
            elif command.batch is not None:
                result = job.trainer.train_batch(command.batch, job.sync)
                job.version += 1
                job.publish(result)
                job.log_step(command.batch, result)
                job.save_if_due()
        job.finish()
        return Run(job.run_dir, job.version, job.exit_code)


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


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code. Mistakes of the user's are printed without a traceback."""
    draft, dry_run = read_command_line(sys.argv[1:] if argv is None else argv)
    try:
        if dry_run:
            print(describe_plan(validated(draft, planning=True), world_size()))
            return 0
        return run_job(ready(draft)).exit_code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def entry_point() -> NoReturn:
    """`torchtitan-grpo`, and `python -m torchtitan.grpo_train`."""
    leave(main())


if __name__ == "__main__":
    entry_point()
