"""Plots of runs with matplotlib, without a display: SVG text for the report, files for comparisons."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.errors import UserError
from torchtitan.report.metrics import METRICS_FILE
from torchtitan.utils.json_lines import read_json_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]

COLORS = ("#2463b4", "#d9622b", "#2e8b57", "#8d4fb0", "#b8860b", "#c03955")
TIMES = (
    ("time/data_wait_s", "data wait", "#d9a62b"),
    ("time/train_s", "train", "#2463b4"),
    ("time/snapshot_s", "snapshot", "#8d4fb0"),
    ("time/sync_stall_s", "sync stall", "#c03955"),
)
# More points than this only make the page heavy.
_MAX_POINTS = 800


@dataclass(frozen=True)
class Plot:
    """Some figures of metrics.jsonl over steps, for the report and for the live page."""

    title: str
    keys: tuple[tuple[str, str], ...]
    """(key, label) of each line; a key that ends in * stands for all keys that begin so"""
    spread: str = ""
    """Key of the standard deviation around the first line"""
    log: bool = False
    parts: bool = False
    """The lines are parts of time/step_s, to be drawn on top of each other"""


PLOTS = (
    Plot("Reward", (("reward/mean", "mean"),), spread="reward/std"),
    Plot("Evaluation on held-out prompts", (("eval/pass@*", ""), ("eval/greedy", "greedy"))),
    Plot("Loss", (("loss", "training"), ("eval/loss", "held out"))),
    Plot("KL to the teacher", (("teacher_kl", ""),), log=True),
    Plot("Entropy", (("entropy", ""),)),
    Plot("Mismatch KL (trainer against engine)", (("mismatch_kl", ""),), log=True),
    Plot("Staleness (versions)", (("staleness/mean", "mean"), ("staleness/max", "max"))),
    Plot("Seconds per step", tuple((key, label) for key, label, _ in TIMES), parts=True),
    Plot("Tokens per second", (("tokens_per_s", ""),)),
    Plot("Gradient norm", (("grad_norm", ""),)),
    Plot("Completion length (tokens)", (("completion/length_mean", "mean"),)),
)


def run_plots(rows: list[Row]) -> list[str]:
    """SVG texts of the plots of one run; those without any figure are left out."""
    figures = [_time_split(rows, plot) if plot.parts else _lines(rows, plot) for plot in PLOTS]
    return [svg_text(figure, f"plot{index}") for index, figure in enumerate(figures) if figure is not None]


def compare_runs(run_dirs: Sequence[str | Path], output: str | Path, labels: Sequence[str] | None = None) -> Path:
    """Plot training reward and held-out accuracy of several runs over steps and over time into one SVG or PNG file.

    Raises:
        UserError: a folder without rows, another number of labels than runs, or another kind of file.
    """
    output = Path(output)
    if labels is not None and len(labels) != len(run_dirs):
        raise UserError(f"--labels names {len(labels)} runs, --compare {len(run_dirs)}")
    figure = blank_figure(width=10.5, height=6.4)
    panels = (("reward/mean", "Training reward", ""), ("eval/pass@1", "Held-out pass@1", "o"))
    for (by_step, by_time), (key, title, marker) in zip(figure.subplots(2, 2), panels, strict=True):
        for index, run_dir in enumerate(run_dirs):
            rows = read_json_lines(Path(run_dir) / METRICS_FILE)
            if not rows:
                raise UserError(f"{Path(run_dir) / METRICS_FILE} has no rows to plot")
            clocks = itertools.accumulate((row.get("time/step_s") or 0.0) if "loss" in row else 0.0 for row in rows)
            points = [
                (row["step"], now, row[key]) for row, now in zip(rows, clocks, strict=True) if row.get(key) is not None
            ]
            label = labels[index] if labels else Path(run_dir).resolve().name
            for axes, place in ((by_step, 0), (by_time, 1)):
                x, y = [point[place] for point in points], [point[2] for point in points]
                _curve(axes, x, y, COLORS[index % len(COLORS)], label, marker)
        dress(by_step, title, "step")
        dress(by_time, title, "seconds in steps")
    figure.axes[0].legend(frameon=False, fontsize=8)
    write_figure(figure, output, "--output")
    return output


def blank_figure(width: float = 4.6, height: float = 2.9) -> Figure:
    """A figure without a display; inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def dress(axes: Axes, title: str, x_label: str = "step") -> None:
    """Title, labels and lines as in all plots."""
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x_label, fontsize=8, color="#667080")
    axes.tick_params(labelsize=8, colors="#667080")
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c5cbd3")


def _with_figure(rows: list[Row], *keys: str) -> list[Row]:
    """The rows that have all these figures, thinned out to what a plot can show."""
    found = [row for row in rows if all(row.get(key) is not None for key in keys)]
    return found[:: max(1, -(-len(found) // _MAX_POINTS))]


def _curve(axes: Axes, x: Sequence[float], y: Sequence[float], color: str, label: str, marker: str = "") -> None:
    """A line; a long one pale, with its running mean on top."""
    marker = "o" if len(x) < 3 else marker
    window = len(y) // 40
    if window < 3 or marker:
        axes.plot(x, y, color=color, linewidth=1.2, label=label, marker=marker, markersize=3.5)
        return
    sums = [0.0, *itertools.accumulate(y)]
    smooth = []
    for i in range(len(y)):
        first, behind = max(0, i - window), min(i + window + 1, len(y))
        smooth.append((sums[behind] - sums[first]) / (behind - first))
    axes.plot(x, y, color=color, linewidth=0.7, alpha=0.28)
    axes.plot(x, smooth, color=color, linewidth=1.5, label=label)


def _lines(rows: list[Row], plot: Plot) -> Figure | None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = []
    for key, label in plot.keys:
        found = [name for name in names if name.startswith(key[:-1])] if key.endswith("*") else [key]
        lines += [(name, label or name.removeprefix("eval/"), _with_figure(rows, name)) for name in found]
    lines = [line for line in lines if line[2]]
    if not lines:
        return None
    figure = blank_figure()
    axes = figure.subplots()
    evaluation = lines[0][0].startswith("eval/")
    for (name, label, shown), color in zip(lines, COLORS, strict=False):
        values = [row[name] for row in shown]
        _curve(axes, [row["step"] for row in shown], values, color, label, "o" if evaluation else "")
        if plot.log and max(values) > 0:
            axes.set_yscale("log", nonpositive="mask")
    if plot.spread:
        mean = plot.keys[0][0]
        both = _with_figure(rows, mean, plot.spread)
        low, high = ([row[mean] + sign * row[plot.spread] for row in both] for sign in (-1, 1))
        x = [row["step"] for row in both]
        axes.fill_between(x, low, high, color=COLORS[0], alpha=0.13, linewidth=0, label="± std")
    if len(plot.keys) > 1 or plot.spread:
        axes.legend(frameon=False, fontsize=8)
    if evaluation:
        axes.set_ylim(-0.03, 1.03)
    dress(axes, plot.title)
    return figure


def _time_split(rows: list[Row], plot: Plot) -> Figure | None:
    timed = _with_figure(rows, "time/step_s")
    if not timed:
        return None
    parts = [[row.get(key) or 0.0 for row in timed] for key, _ in plot.keys]
    other = [max(0.0, row["time/step_s"] - sum(part[i] for part in parts)) for i, row in enumerate(timed)]
    labels, colors = [label for _, label, _ in TIMES], [color for _, _, color in TIMES]
    figure = blank_figure()
    axes = figure.subplots()
    steps = [row["step"] for row in timed]
    if len(steps) == 1:  # an area needs two points
        steps, parts, other = [steps[0] - 1, *steps], [part * 2 for part in parts], other * 2
    axes.stackplot(steps, *parts, other, labels=[*labels, "other"], colors=[*colors, "#b9c0c9"], alpha=0.85)
    # The first step may hold start-up; it must not flatten all others.
    whole = sorted(row["time/step_s"] for row in timed)
    axes.set_ylim(0, max(1e-9, 1.15 * whole[min(len(whole) - 1, int(0.98 * len(whole)))]))
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], fontsize=7, loc="upper right", framealpha=0.9)
    dress(axes, plot.title)
    return figure


def svg_text(figure: Figure, salt: str) -> str:
    """The figure as an SVG element; `salt` differs between those of one page."""
    buffer = io.BytesIO()
    save_figure(figure, buffer, format="svg", salt=salt)
    text = buffer.getvalue().decode()
    return text[text.index("<svg") :]  # without the XML head, which has no place inside a page


def write_figure(figure: Figure, output: Path, option: str) -> None:
    """Write an SVG or PNG file. Raises UserError, which names the command's option, for another kind of file."""
    if output.suffix not in (".svg", ".png"):
        raise UserError(f"{option} {output}: the figure must be a .svg or a .png file")
    output.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, output, dpi=130)


def save_figure(figure: Figure, target: Any, salt: str = "figure", **options: Any) -> None:
    """Write an SVG or PNG file (or stream), without the time of day."""
    import matplotlib

    # A salt of its own per plot: ids must not collide where several SVGs stand in one page.
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure.savefig(target, metadata=None if str(target).endswith(".png") else {"Date": None}, **options)
