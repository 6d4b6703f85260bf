"""Draw reward and held-out accuracy of several runs in one figure, as the pictures of the documentation are.

    python scripts/compare_runs.py RUN_A RUN_B --labels asynchronous blocking --output figure.svg

It needs matplotlib, which is among the extras `test`. The page of a single run draws itself (report.html).
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torchtitan.errors import UserError
from torchtitan.report.metrics import METRICS_FILE
from torchtitan.utils.json_lines import read_json_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#2463b4", "#d9622b", "#2e8b57", "#8d4fb0", "#b8860b", "#c03955")


def compare_runs(run_dirs: Sequence[str | Path], output: str | Path, labels: Sequence[str] | None = None) -> Path:
    """Plot training reward and held-out accuracy of several runs, over steps and over time, in one SVG or PNG file.

    Raises:
        UserError: a run has no rows, the number of labels and runs differs, or the file type is not supported.
    """
    output = Path(output)
    if labels is not None and len(labels) != len(run_dirs):
        raise UserError(f"--labels names {len(labels)} runs, and there are {len(run_dirs)}")
    figure = blank_figure(width=10.5, height=6.4)
    panels = (("reward/mean", "Training reward", ""), ("eval/pass@1", "Held-out pass@1 (dotted: greedy)", "o"))
    for (by_step, by_time), (key, title, marker) in zip(figure.subplots(2, 2), panels, strict=True):
        for index, run_dir in enumerate(run_dirs):
            rows = read_json_lines(Path(run_dir) / METRICS_FILE)
            if not rows:
                raise UserError(f"{Path(run_dir) / METRICS_FILE} has no rows to plot")
            clocks = itertools.accumulate((row.get("time/step_s") or 0.0) if "loss" in row else 0.0 for row in rows)
            points: list[tuple[Any, ...]] = [
                (row["step"], now, row[key], row.get("eval/greedy"))
                for row, now in zip(rows, clocks, strict=True)
                if row.get(key) is not None
            ]
            label = labels[index] if labels else Path(run_dir).resolve().name
            for axes, place in ((by_step, 0), (by_time, 1)):
                x, y = [point[place] for point in points], [point[2] for point in points]
                _curve(axes, x, y, COLORS[index % len(COLORS)], label, marker)
                if marker and (greedy := [(point[place], point[3]) for point in points if point[3] is not None]):
                    axes.plot(*zip(*greedy, strict=True), color=COLORS[index % len(COLORS)], linewidth=1, linestyle=":")
        dress(by_step, title, "step")
        dress(by_time, title, "seconds in steps")
    figure.axes[0].legend(frameon=False, fontsize=8)
    write_figure(figure, output, "--output")
    return output


def blank_figure(width: float, height: float) -> Figure:
    """Return a figure that needs no display; width and height are in inches. Raises UserError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(f"figures need matplotlib ({error}): python -m pip install matplotlib") from error

    return Figure(figsize=(width, height), layout="constrained")


def dress(axes: Axes, title: str, x_label: str = "step") -> None:
    """Give a plot its title, axis label and the common style."""
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x_label, fontsize=8, color="#667080")
    axes.tick_params(which="both", labelsize=8, colors="#667080")
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c5cbd3")


def _curve(axes: Axes, x: Sequence[float], y: Sequence[float], color: str, label: str, marker: str = "") -> None:
    """Draw a line; a long one is drawn pale, with its running mean on top."""
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


def write_figure(figure: Figure, output: Path, option: str) -> None:
    """Write an SVG or PNG file. For any other file type, raises UserError that names the command's option."""
    if output.suffix not in (".svg", ".png"):
        raise UserError(f"{option} {output}: the figure must be a .svg or a .png file")
    output.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, output, dpi=130)


def save_figure(figure: Figure, target: Any, **options: Any) -> None:
    """Write an SVG or PNG file (or stream). An SVG file gets no date, so that it is reproducible."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "figure", "svg.fonttype": "none"}):
        figure.savefig(target, metadata=None if str(target).endswith(".png") else {"Date": None}, **options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="folders of the runs")
    parser.add_argument("--labels", nargs="+", help="names of the runs, in their order")
    parser.add_argument("--output", default="compare.svg", help="figure to write: .svg or .png")
    arguments = parser.parse_args(argv)
    try:
        print(compare_runs(arguments.runs, arguments.output, arguments.labels))
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
