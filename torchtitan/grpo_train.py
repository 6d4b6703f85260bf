"""The training loop.

    torchrun --nproc_per_node=2 -m torchtitan.grpo_train --job.config_file train_configs/debug_cpu.toml

Like the diagram in docs/how_a_step_flows.md: a command arrives (normally a batch), the policy trains on it, the new
version is offered to the actors, and the next command is requested. Every rank runs this same loop.
"""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":
    # Handles Ctrl-C during the imports below, and until a run handles it.
    signal.signal(signal.SIGINT, lambda *_: sys.exit(128 + signal.SIGINT))

from torchtitan.errors import another_package

if problem := another_package():
    sys.exit(problem)

import os
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torchtitan.config.job_config import JobConfig
from torchtitan.config.reading import read_command_line
from torchtitan.errors import DISK_ERRORS, EXIT_RETRYABLE, UserError
from torchtitan.inference.engines.registry import engine_of
from torchtitan.preflight.dry_run import describe_dry_run
from torchtitan.preflight.validate import ready, validated
from torchtitan.utils.child_process import LAUNCHER_VARIABLE, end_with_parent
from torchtitan.utils.json_lines import read_json_lines
from torchtitan.utils.logs import print_page
from torchtitan.utils.machine import leave, sleep_between_regions, without_collector
from torchtitan.utils.ranks import from_torchrun, world_size

if TYPE_CHECKING:
    from torchtitan.trainer.commands import Command
    from torchtitan.trainer.job import TrainingJob


@dataclass(frozen=True)
class Run:
    """The result of a run."""

    folder: Path
    """The run folder with metrics, checkpoints and report (docs/quick_start.md)"""
    version: int
    """The number of trained batches"""
    exit_code: int
    """0, or 128 + the signal that stopped it, such as 130 after Ctrl-C"""

    @property
    def metrics(self) -> dict[str, Any]:
        """The last value of every metric in metrics.jsonl, from steps and evaluations."""
        return {name: value for line in self.history for name, value in line.items()}

    @property
    def history(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, one per step and evaluation; `pandas.DataFrame(run.history)` makes a table."""
        return read_json_lines(self.folder / "metrics.jsonl")


def run_job(config: JobConfig) -> Run:
    """Run a validated job on this rank. Raises UserError for whatever stopped it early."""
    try:
        return _run(config)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise UserError(
            f"{config.job.dump_folder} can no longer be written: {error}. Once it can, continue from the newest whole "
            "checkpoint with checkpoint.resume"
        ) from error


def _run(config: JobConfig) -> Run:
    sleep_between_regions()  # before torch is imported
    engine = engine_of(config)
    if from_torchrun("RANK", "0") == 0:
        engine.prepare(config)  # it loads the engine while this process loads the trainer
    try:
        with without_collector():
            import torch._dynamo  # noqa: F401 — every optimizer of torch imports it when it is made

            from torchtitan.trainer.job import TrainingJob

        with TrainingJob(config) as job:
            job.start()
            follow_commands(job)
            job.finish()
            return Run(job.run_dir, job.version, job.exit_code)
    finally:
        engine.release()


def follow_commands(job: TrainingJob) -> Command:
    """Do what the controller says until it says STOP or DONE, and return that command (collective)."""
    from torchtitan.trainer.commands import Kind

    while (command := job.next_command()).kind not in (Kind.STOP, Kind.DONE):
        if command.kind is Kind.SNAPSHOT:
            job.publish_pending()
        elif command.generation is not None:
            job.generate(command.generation)
        elif command.kind is Kind.EXPORT:
            job.export_on_demand()
        elif command.kind is Kind.EVALUATE and command.batch is not None:
            job.evaluate(command.batch)
        elif command.batch is not None:
            result = job.trainer.train_batch(command.batch, job.sync)
            job.version += 1
            job.publish(result)
            job.log_step(command.batch, result)
            job.save_if_due()
    return command


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code. User errors are printed without a traceback."""
    draft, dry_run = read_command_line(sys.argv[1:] if argv is None else argv)
    try:
        if dry_run:
            config = validated(draft, planning=True)
            print_page(describe_dry_run(draft, config, world_size()))
            return 0
        return run_job(ready(draft)).exit_code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def entry_point() -> NoReturn:
    """`torchtitan-grpo`, and `python -m torchtitan.grpo_train`."""
    if not getattr(sys.flags, "safe_path", False) and sys.path[0] not in ("", os.getcwd()):
        sys.path.insert(0, os.getcwd())  # the user's modules are found where the user stands, as with `python -m`
    if LAUNCHER_VARIABLE in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        # A launcher that is killed cannot end its ranks. The run saves, if EXIT_SECONDS are enough for that.
        end_with_parent(int(os.environ.get(LAUNCHER_VARIABLE, os.getppid())))
    try:
        code = main()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT  # no run exists yet to handle it
    except Exception:
        # A defect, or a collective that another rank has left: the launcher restarts all ranks if it may.
        traceback.print_exc()
        code = EXIT_RETRYABLE
    leave(code)


if __name__ == "__main__":
    entry_point()
