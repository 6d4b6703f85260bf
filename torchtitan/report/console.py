"""What a person sees while a run goes on: log lines, and a live display on a terminal or else one line per step."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan.config.job_config import Metrics as MetricsConfig

logger = logging.getLogger("torchtitan.metrics")

Row = Mapping[str, Any]
_BARS = "▁▂▃▄▅▆▇█"


def set_up_logging(run_dir: Path, rank: int) -> None:
    """Log to stderr and to {run_dir}/logs/rank-N.log; libraries only from warnings on."""
    folder = run_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [
        logging.StreamHandler(),
        logging.FileHandler(folder / f"rank-{rank}.log", encoding="utf-8"),
    ]
    line = "%(asctime)s %(levelname).1s %(name)s: %(message)s"
    logging.basicConfig(level=logging.WARNING, handlers=handlers, force=True, format=line, datefmt="%H:%M:%S")
    logging.getLogger("torchtitan").setLevel(logging.INFO)


def make_console(config: MetricsConfig, total_steps: int, first_step: int = 0) -> Console:
    """The console that metrics.console asks for; auto takes the live one on a terminal."""
    if config.console == "rich" or (config.console == "auto" and sys.stderr.isatty()):
        return LiveConsole(total_steps, first_step)
    return Console(total_steps)


class Console:
    """One log line per step: readable in files, in CI and behind torchrun's --tee."""

    def __init__(self, total_steps: int):
        self.total_steps = total_steps

    def step(self, step: int, row: Row, actors: Mapping[str, str]) -> None:
        """Show a trained batch; actors: name → state."""
        figures = "  ".join(f"{name} {text}" for name, text in describe_step(row).items())
        logger.info("step %d/%d  %s", step, self.total_steps, figures)

    def evaluation(self, step: int, row: Row) -> None:
        """Show an evaluation."""
        logger.info("eval after step %d  %s", step, describe_evaluation(row))

    def close(self) -> None:
        """Leave the terminal as it was. May be called twice."""


class LiveConsole(Console):
    """A display that stays in place, drawn anew with every step; log lines scroll above it."""

    def __init__(self, total_steps: int, first_step: int = 0):
        from rich import progress
        from rich.console import Console as RichConsole
        from rich.live import Live

        super().__init__(total_steps)
        self._progress = progress.Progress(
            progress.TextColumn("step"), progress.BarColumn(None), progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(), progress.TimeRemainingColumn(),
        )  # fmt: skip
        self._task = self._progress.add_task("", total=total_steps, completed=first_step)
        self._rewards: deque[float] = deque(maxlen=40)
        self._evaluation = ""
        # The stream is taken now: Live puts a proxy in its place, and log handlers follow that below.
        self._stream = sys.stderr
        console = RichConsole(file=self._stream, force_terminal=True)
        self._live = Live(self._progress, console=console, auto_refresh=False, transient=False)
        self._live.start()
        self._handlers = [
            handler
            for handler in logging.getLogger().handlers
            if isinstance(handler, logging.StreamHandler) and handler.stream is self._stream
        ]
        for handler in self._handlers:
            handler.setStream(sys.stderr)

    def step(self, step: int, row: Row, actors: Mapping[str, str]) -> None:
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table

        self._progress.update(self._task, completed=step)
        if row.get("reward/mean") is not None:
            self._rewards.append(row["reward/mean"])
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column()
        figures = describe_step(row)
        figures["reward"] += f" ± {figure(row, 'reward/std')}  {bars(self._rewards)}"
        for name, text in figures.items():
            table.add_row(name, text)
        if self._evaluation:
            table.add_row("evaluation", self._evaluation)
        if actors:
            table.add_row("actors", "  ".join(f"{name} {state}" for name, state in actors.items()))
        self._live.update(Panel(Group(self._progress, table), title=f"version {row.get('policy_version')}"))
        self._live.refresh()

    def evaluation(self, step: int, row: Row) -> None:
        self._evaluation = f"{describe_evaluation(row)}  (after step {step})"
        super().evaluation(step, row)

    def close(self) -> None:
        self._live.stop()
        for handler in self._handlers:
            handler.setStream(self._stream)


def number(value: Any) -> str:
    """A number in four significant digits, or a dash; text as it is."""
    if value is None or isinstance(value, str):
        return value or "–"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"


def figure(row: Row, key: str) -> str:
    return number(row.get(key))


def describe_step(row: Row) -> dict[str, str]:
    """The figures of a step that a person wants to see, under a word each."""
    return {
        "reward": figure(row, "reward/mean"),
        "loss": f"{figure(row, 'loss')}  entropy {figure(row, 'entropy')}  kl {figure(row, 'mismatch_kl')}  "
        f"grad {figure(row, 'grad_norm')}",
        "staleness": f"{figure(row, 'staleness/mean')}/{figure(row, 'staleness/max')}",
        "length": f"{figure(row, 'completion/length_mean')}  {figure(row, 'tokens_per_s')} tok/s  "
        f"{figure(row, 'time/step_s')} s (data {figure(row, 'time/data_wait_s')}, "
        f"train {figure(row, 'time/train_s')}, snapshot {figure(row, 'time/snapshot_s')}, "
        f"stall {figure(row, 'time/sync_stall_s')})",
        "published": f"{figure(row, 'weight_sync/versions_published')}, "
        f"skipped {figure(row, 'weight_sync/versions_skipped')}",
    }


def describe_evaluation(row: Row) -> str:
    """All eval/… figures on one line."""
    names = [name for name in row if name.startswith("eval/")]
    return "  ".join(f"{name.removeprefix('eval/')} {figure(row, name)}" for name in names)


def bars(values: deque[float]) -> str:
    """A line of block characters that shows the course of some values."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)
