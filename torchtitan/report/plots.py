"""Plots of runs with matplotlib, without a display: SVG text for the report, files for comparisons."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.errors import UserError
from torchtitan.report.metrics import METRICS_FILE
from torchtitan.utils.json_lines import read_json_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]

_COLORS = ("#2463b4", "#d9622b", "#2e8b57", "#8d4fb0", "#b8860b", "#c03955")
TIMES = (
    ("time/data_wait_s", "data wait", "#d9a62b"),
    ("time/train_s", "train", "#2463b4"),
    ("time/snapshot_s", "snapshot", "#8d4fb0"),
    ("time/sync_stall_s", "sync stall", "#c03955"),
)
# More points than this only make the page heavy.
_MAX_POINTS = 800


def run_plots(steps: list[Row], evaluations: list[Row]) -> list[str]:
    """SVG texts of the plots of one run; those without any figure are left out."""
    figures = [
        _lines(steps, "Reward", [("reward/mean", "mean")], spread="reward/std"),
        _evaluation(evaluations),
        _lines(steps, "Loss", [("loss", "")]),
        _lines(steps, "Entropy", [("entropy", "")]),
        _lines(steps, "Mismatch KL (trainer against engine)", [("mismatch_kl", "")], log=True),
        _lines(steps, "Staleness (versions)", [("staleness/mean", "mean"), ("staleness/max", "max")]),
        _time_split(steps),
        _lines(steps, "Tokens per second", [("tokens_per_s", "")]),
        _lines(steps, "Gradient norm", [("grad_norm", "")]),
        _lines(steps, "Completion length (tokens)", [("completion/length_mean", "mean")]),
    ]
    return [svg_text(figure, f"plot{index}") for index, figure in enumerate(figures) if figure is not None]


def compare_runs(run_dirs: Sequence[str | Path], output: str | Path, labels: Sequence[str] | None = None) -> Path:
    """Plot training reward and held-out accuracy of several runs over steps and over time into one SVG or PNG file.

    Raises:
        UserError: a folder without rows, another number of labels than runs, or another kind of file.
    """
    output = Path(output)
    if output.suffix not in (".svg", ".png"):
        raise UserError(f"--output {output}: the figure must be a .svg or a .png file")
    if labels is not None and len(labels) != len(run_dirs):
        raise UserError(f"--labels names {len(labels)} runs, --compare {len(run_dirs)}")
    figure = blank_figure(width=10.5, height=6.4)
    (reward, reward_time), (accuracy, accuracy_time) = figure.subplots(2, 2)
    for index, run_dir in enumerate(run_dirs):
        rows = read_json_lines(Path(run_dir) / METRICS_FILE)
        if not rows:
            raise UserError(f"{Path(run_dir) / METRICS_FILE} has no rows to plot")
        label = labels[index] if labels else Path(run_dir).resolve().name
        clock, elapsed = 0.0, {0: 0.0}
        for row in rows:
            if "loss" in row:
                clock += row.get("time/step_s") or 0.0
            elapsed[row["step"]] = clock
        for axes, key, marker in ((reward, "reward/mean", ""), (accuracy, "eval/pass@1", "o")):
            points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
            x, y = [step for step, _ in points], [value for _, value in points]
            timed = reward_time if axes is reward else accuracy_time
            for target, along in ((axes, x), (timed, [elapsed[step] for step in x])):
                _curve(target, along, y, _COLORS[index % len(_COLORS)], label, marker)
    for axes, title, x_label in (
        (reward, "Training reward", "step"),
        (reward_time, "Training reward", "seconds in steps"),
        (accuracy, "Held-out pass@1", "step"),
        (accuracy_time, "Held-out pass@1", "seconds in steps"),
    ):
        dress(axes, title, x_label)
    reward.legend(frameon=False, fontsize=8)
    output.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, output, dpi=130)
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
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#c5cbd3")


def _points(rows: list[Row], key: str) -> tuple[list[int], list[float]]:
    found = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    found = found[:: max(1, -(-len(found) // _MAX_POINTS))]
    return [step for step, _ in found], [value for _, value in found]


def _curve(axes: Axes, x: Sequence[float], y: Sequence[float], color: str, label: str, marker: str = "") -> None:
    """A line; a long one pale, with its running mean on top."""
    marker = "o" if len(x) < 3 else marker
    window = len(y) // 40
    if window < 3 or marker:
        axes.plot(x, y, color=color, linewidth=1.2, label=label, marker=marker, markersize=3.5)
        return
    sums = [0.0, *itertools.accumulate(y)]
    smooth = [
        (sums[min(i + window + 1, len(y))] - sums[max(0, i - window)])
        / (min(i + window + 1, len(y)) - max(0, i - window))
        for i in range(len(y))
    ]
    axes.plot(x, y, color=color, linewidth=0.7, alpha=0.28)
    axes.plot(x, smooth, color=color, linewidth=1.5, label=label)


def _lines(
    rows: list[Row], title: str, keys: list[tuple[str, str]], spread: str = "", log: bool = False
) -> Figure | None:
    series = [(*_points(rows, key), label) for key, label in keys]
    if not any(x for x, _, _ in series):
        return None
    figure = blank_figure()
    axes = figure.subplots()
    for (x, y, label), color in zip(series, _COLORS, strict=False):
        _curve(axes, x, y, color, label)
    if spread:
        both = [row for row in rows if row.get(spread) is not None and row.get(keys[0][0]) is not None]
        both = both[:: max(1, -(-len(both) // _MAX_POINTS))]
        low = [row[keys[0][0]] - row[spread] for row in both]
        high = [row[keys[0][0]] + row[spread] for row in both]
        axes.fill_between(
            [row["step"] for row in both], low, high, color=_COLORS[0], alpha=0.13, linewidth=0, label="± std"
        )
    if log and any(value > 0 for _, y, _ in series for value in y):
        axes.set_yscale("log", nonpositive="mask")
    if len(keys) > 1 or spread:
        axes.legend(frameon=False, fontsize=8)
    dress(axes, title)
    return figure


def _evaluation(rows: list[Row]) -> Figure | None:
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name.startswith("eval/pass@")]
    names += ["eval/greedy"]
    series = [(name, *_points(rows, name)) for name in names]
    if not any(x for _, x, _ in series):
        return None
    figure = blank_figure()
    axes = figure.subplots()
    for (name, x, y), color in zip(series, _COLORS, strict=False):
        if x:
            axes.plot(x, y, color=color, marker="o", markersize=3.5, linewidth=1.2, label=name.removeprefix("eval/"))
    axes.set_ylim(-0.03, 1.03)
    axes.legend(frameon=False, fontsize=8)
    dress(axes, "Evaluation on held-out prompts")
    return figure


def _time_split(rows: list[Row]) -> Figure | None:
    timed = [row for row in rows if row.get("time/step_s") is not None]
    timed = timed[:: max(1, -(-len(timed) // _MAX_POINTS))]
    if not timed:
        return None
    parts = [[row.get(key) or 0.0 for row in timed] for key, _, _ in TIMES]
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
    dress(axes, "Seconds per step")
    return figure


def svg_text(figure: Figure, salt: str) -> str:
    """The figure as an SVG element; `salt` differs between those of one page."""
    buffer = io.BytesIO()
    save_figure(figure, buffer, format="svg", salt=salt)
    text = buffer.getvalue().decode()
    return text[text.index("<svg") :]  # without the XML head, which has no place inside a page


def save_figure(figure: Figure, target: Any, salt: str = "figure", **options: Any) -> None:
    """Write an SVG or PNG file (or stream), without the time of day."""
    import matplotlib

    # A salt of its own per plot: ids must not collide where several SVGs stand in one page.
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure.savefig(target, metadata=None if str(target).endswith(".png") else {"Date": None}, **options)
