"""The console of a run: one line per step, or a display that stays in place on a terminal."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.panel import Panel

# The line of a step has to fit in 160 columns, with this name.
logger = logging.getLogger("torchtitan")

Row = Mapping[str, Any]
# What is shown of a step: label → metric. All other metrics are in metrics.jsonl.
SHOWN = {
    "loss": "loss", "kl": "reference_kl", "mismatch": "mismatch_kl", "length": "completion/length_mean",
    "tokens/s": "tokens_per_s", "s/step": "time/step_s",
}  # fmt: skip
PASS_AT_1 = "eval/pass@1"
# The time left follows from that many of the last lines.
RATE_LINES = 20
BARS = "▁▂▃▄▅▆▇█"


def make_console(total_steps: int, first_step: int = 0) -> Console:
    """Return the live console on a terminal that can move its cursor, elsewhere the one of lines."""
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        return LiveConsole(total_steps, first_step)
    return Console(total_steps)


class Console:
    """Writes one log line per step, which stays readable in files, in CI and with torchrun's --tee."""

    def __init__(self, total_steps: int):
        self.total_steps = total_steps
        self._pass_at_1: float | None = None
        """Of the last evaluation"""
        self._moments: deque[tuple[int, float]] = deque(maxlen=RATE_LINES)
        """The last steps that were shown, and when"""

    def step(self, step: int, row: Row, actors: Mapping[str, str]) -> None:
        """Show a trained batch; actors: name → state."""
        figures = "  ".join(f"{name} {text}" for name, text in self._describe_step(step, row).items())
        logger.info("step %d/%d  %s", step, self.total_steps, figures)

    def evaluation(self, step: int, row: Row) -> None:
        """Show an evaluation."""
        self._pass_at_1 = row.get(PASS_AT_1)
        logger.info("eval after step %d  %s", step, describe_evaluation(row))

    def close(self) -> None:
        """Restore the terminal. May be called twice."""

    def _describe_step(self, step: int, row: Row) -> dict[str, str]:
        """Return what is shown of a step (label → text), without what is missing."""
        shown = {"reward": number(row["reward/mean"])} if row.get("reward/mean") is not None else {}
        if self._pass_at_1 is not None:
            shown["pass@1"] = number(self._pass_at_1)
        shown |= {label: number(row[key]) for label, key in SHOWN.items() if row.get(key) is not None}
        if "kl" in shown:
            shown.pop("mismatch", None)  # the policy is held near a reference, whose KL says more
        self._moments.append((step, time.monotonic()))
        left = seconds_left(self._moments, self.total_steps)
        if left is not None:
            shown["left"] = duration(left)
        return shown


class LiveConsole(Console):
    """A display that stays in place and is redrawn at every step; log lines scroll above it."""

    def __init__(self, total_steps: int, first_step: int = 0):
        from rich import progress
        from rich.console import Console as RichConsole
        from rich.live import Live

        super().__init__(total_steps)
        self._progress = progress.Progress(
            progress.TextColumn("step"), progress.BarColumn(None), progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
        )  # fmt: skip
        self._task = self._progress.add_task("", total=total_steps, completed=first_step)
        self._rewards: deque[float] = deque(maxlen=40)
        self._row: Row = {}
        self._figures: dict[str, str] = {}
        self._actors: Mapping[str, str] = {}
        self._evaluation = ""
        # Keep the original stream: Live replaces sys.stderr by a proxy, which the log handlers use from below on.
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
        self._progress.update(self._task, completed=step)
        self._row, self._actors, self._figures = row, actors, self._describe_step(step, row)
        if row.get("reward/mean") is not None:
            self._rewards.append(row["reward/mean"])
        self._draw()

    def evaluation(self, step: int, row: Row) -> None:
        self._evaluation = f"{describe_evaluation(row)}  (after step {step})"
        super().evaluation(step, row)
        self._draw()

    def close(self) -> None:
        self._live.stop()
        for handler in self._handlers:
            handler.setStream(self._stream)

    def _draw(self) -> None:
        self._live.update(self._panel())
        self._live.refresh()

    def _panel(self) -> Panel:
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column()
        for name, text in self._figures.items():
            spread = f" ± {number(self._row.get('reward/std'))}  {bars(self._rewards)}" if name == "reward" else ""
            table.add_row(name, text + spread)
        if self._evaluation:
            table.add_row("evaluation", self._evaluation)
        if self._actors:
            table.add_row("actors", "  ".join(f"{name} {state}" for name, state in self._actors.items()))
        return Panel(Group(self._progress, table), title=f"version {self._row.get('policy_version', 0)}")


def number(value: Any) -> str:
    """Format a number with three significant digits (12.3k), two below .001, or None as a dash; return text
    unchanged."""
    if value is None or isinstance(value, str):
        return value or "–"
    for limit, unit, letter in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / unit:.3g}{letter}"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.2g}"


def duration(seconds: float) -> str:
    """Format seconds as minutes and seconds, or hours and minutes: 2:41, 3h05."""
    rounded = round(seconds)
    if rounded >= 3600:
        return f"{rounded // 3600}h{rounded % 3600 // 60:02d}"
    return f"{rounded // 60}:{rounded % 60:02d}"


def seconds_left(moments: deque[tuple[int, float]], total_steps: int) -> float | None:
    """Return the seconds that the remaining steps take, as fast as between the given (step, time in seconds); None: it
    is not known yet."""
    if len(moments) < 2 or moments[-1][0] <= moments[0][0]:
        return None
    (first, begin), (last, end) = moments[0], moments[-1]
    return (total_steps - last) * (end - begin) / (last - first)


def describe_evaluation(row: Row) -> str:
    """Format an evaluation on one line; pass@1 has its interval."""
    shown = []
    for name, value in row.items():
        if not _is_shown(name, value):
            continue
        text = f"{name.removeprefix('eval/')} {number(value)}"
        if name == PASS_AT_1 and row.get("eval/interval_low") is not None:
            text += f" ({number(row['eval/interval_low'])} to {number(row['eval/interval_high'])})"
        shown.append(text)
    return "  ".join(shown)


def _is_shown(name: str, value: Any) -> bool:
    """Whether the line of an evaluation has this metric: of the whole evaluation what counts, and failures if there are
    any; of a single set pass@1."""
    if not name.startswith("eval/"):
        return False
    figure = name.removeprefix("eval/")
    if "/" in figure:
        return figure.endswith("/pass@1")
    if figure in ("failed", "lost", "unscored"):
        return bool(value)
    return figure.startswith("pass@") or figure in ("greedy", "loss")


def bars(values: deque[float]) -> str:
    """Return a sparkline of block characters for some values."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)
