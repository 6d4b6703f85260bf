"""Figures of a run: metrics.jsonl, completions.jsonl, TensorBoard, wandb and the console. Only rank 0 writes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.report.console import make_console
from torchtitan.rollout.types import Batch, Sample
from torchtitan.utils.json_lines import read_json_lines

METRICS_FILE = "metrics.jsonl"
COMPLETIONS_FILE = "completions.jsonl"

# Other tools rely on these: every step's object has them, null where there is no figure.
REQUIRED_KEYS = (
    "step",
    "policy_version",
    "loss",
    "grad_norm",
    "reward/mean",
    "reward/std",
    "entropy",
    "mismatch_kl",
    "staleness/mean",
    "staleness/max",
    "completion/length_mean",
    "completion/truncated_fraction",
    "groups/zero_variance_fraction",
    "time/step_s",
    "time/data_wait_s",
    "time/train_s",
    "time/snapshot_s",
    "time/sync_stall_s",
    "tokens_per_s",
    "weight_sync/versions_published",
    "weight_sync/versions_skipped",
)

Figure = float | int | None


class Decoder(Protocol):
    def decode(self, ids: list[int], skip_special: bool = True) -> str: ...


class MetricsLogger:
    """Writes what a run measures. On ranks other than 0 every method does nothing.

    With resumed_step, rows of later steps (from the life of the run that was interrupted) are cut off first.

    Raises:
        UserError: wandb is asked for and not installed.
    """

    def __init__(self, config: JobConfig, run_dir: str | Path, rank: int = 0, resumed_step: int | None = None):
        self.config = config
        self.run_dir = Path(run_dir)
        self._active = rank == 0
        self._board: Any = None
        self._wandb: Any = None
        if not self._active:
            return
        if config.metrics.enable_wandb:
            self._wandb = _start_wandb(config, self.run_dir)
        for name in (METRICS_FILE, COMPLETIONS_FILE):
            cut_after(self.run_dir / name, -1 if resumed_step is None else resumed_step)
        self._rows = (self.run_dir / METRICS_FILE).open("a", encoding="utf-8")
        self._completions = (self.run_dir / COMPLETIONS_FILE).open("a", encoding="utf-8")
        if config.metrics.enable_tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            purge = None if resumed_step is None else resumed_step + 1
            self._board = SummaryWriter(str(self.run_dir / config.metrics.save_tb_folder), purge_step=purge)
        self._console = make_console(config.metrics, config.training.steps, resumed_step or 0)

    def log_step(self, step: int, figures: Mapping[str, Figure], actors: Mapping[str, str] | None = None) -> None:
        """Write the object of one trained batch; actors (name → state, for the display) as they are now."""
        if not self._active:
            return
        row = dict.fromkeys(REQUIRED_KEYS) | {name: finite(value) for name, value in figures.items()} | {"step": step}
        self._write(step, row)
        if step % self.config.metrics.log_freq == 0 or step == self.config.training.steps:
            self._console.step(step, row, actors or {})

    def log_evaluation(self, step: int, figures: Mapping[str, Figure]) -> None:
        """Write an evaluation as an object of its own, with `eval/…` keys and the step after which it was made."""
        if not self._active:
            return
        row = {"step": step} | {name: finite(value) for name, value in figures.items()}
        self._write(step, row)
        self._console.evaluation(step, row)

    def log_completions(self, step: int, batch: Batch, tokenizer: Decoder) -> None:
        """Write the first samples of a batch in words, at most metrics.completions_per_step."""
        limit = self.config.metrics.completions_per_step
        if not self._active or limit == 0:
            return
        samples = batch.samples if limit < 0 else batch.samples[:limit]
        for sample in samples:
            row = describe_sample(step, batch.version, sample, tokenizer)
            self._completions.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._completions.flush()

    def close(self) -> None:
        """Close the files and the display; calling it again does nothing."""
        if not self._active:
            return
        self._active = False
        self._console.close()
        self._rows.close()
        self._completions.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _write(self, step: int, row: Mapping[str, Figure]) -> None:
        _append(self._rows, row)
        numbers = {name: value for name, value in row.items() if value is not None and name != "step"}
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)


def finite(value: Figure) -> Figure:
    """A number that JSON can hold; None for NaN and infinities."""
    if value is None:
        return None
    if isinstance(value, int):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def describe_sample(step: int, version: int, sample: Sample, tokenizer: Decoder) -> dict[str, Any]:
    """One row of completions.jsonl."""
    return {
        "step": step,
        "trainer_version": version,
        "prompt": tokenizer.decode(sample.prompt_ids, skip_special=False),
        "completion": tokenizer.decode(sample.completion_ids, skip_special=False),
        "reward": finite(sample.reward),
        "rewards": {name: finite(value) for name, value in sample.rewards.items()},
        "advantage": finite(sample.advantage),
        "versions": [{"version": span.version, "tokens": span.end - span.start} for span in sample.spans],
        "finish_reason": sample.finish_reason,
        "tokens": len(sample.completion_ids),
    }


def cut_after(path: Path, step: int) -> None:
    """Drop the rows of later steps, and a line that a kill cut off, from a JSON-lines file. In one rename."""
    if not path.is_file():
        return
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for row in read_json_lines(path):
            if row["step"] <= step:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    os.replace(temporary, path)


def _append(file: TextIO, row: Mapping[str, Any]) -> None:
    file.write(json.dumps(row, allow_nan=False) + "\n")
    file.flush()


def _start_wandb(config: JobConfig, run_dir: Path) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise UserError(
            "metrics.enable_wandb = true needs the wandb extra: pip install 'torchtitan-grpo[wandb]' "
            "(from a checkout: pip install -e '.[wandb]'), or set metrics.enable_wandb = false"
        ) from error
    try:
        return wandb.init(
            project=config.job.name,
            name=run_dir.name,
            id=run_dir.name,
            dir=str(run_dir),
            config=dataclasses.asdict(config),
            resume="allow",
        )
    except (wandb.errors.Error, OSError) as error:
        raise UserError(
            f"wandb could not start: {error}. Log in with `wandb login`, set WANDB_MODE=offline, or set "
            "metrics.enable_wandb = false"
        ) from error
