"""Plots of runs with matplotlib, without a display: SVG text for the report, and files for comparisons."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.errors import UserError
from torchtitan.report.metrics import METRICS_FILE
from torchtitan.report.timeline import SNAPSHOTS, SYNC, TRAINER, Moment, Timeline, Track
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
# More points than this only make the page larger.
_MAX_POINTS = 800
SOURCE = "{source}"
STEPS = 12
MAX_RANKS = 2
MAX_ACTORS = 6
# Height of one process in the plot, without the gap between two of them.
LANE = 1.6
# Kinds of spans that are drawn, in the order of the legend. Generation spans alternate between two tints by version.
TIMELINE_COLORS = {label: color for _, label, color in TIMES} | {
    "rollout": "#b7d3f2", "commit": "#5b2a86", "evaluation": "#8a97a8", "wake": "#e8c468", "checkpoint": "#b9c0c9",
    "transfer": "#d9622b", "apply": "#2e8b57", "drain": "#9fd3b4", "pause": "#10151c", "failed": "#c03955",
}  # fmt: skip
_FAILED = ("aborted", "refused", "poisoned", "evicted")
_TINTS = ("#b7d3f2", "#d6e6f7")
# Weight synchronisation incidents and run events that are drawn, with their markers.
_SHAPES = {
    "late": "<", "forged": "P", "lost its snapshot": "v", "evicted": "X", "poisoned": "P", "actor_evicted": "d",
    "actor_restarting": "^", "shard server lost": "s", "registry restarted": "s",
}  # fmt: skip
_THIN = {"snapshot", "transfer", "apply", "drain", "failed"}


@dataclass(frozen=True)
class Plot:
    """A plot of metrics from metrics.jsonl over steps, for the report and the live page."""

    title: str
    keys: tuple[tuple[str, str], ...]
    """(key, label) of each line; one with * stands for all keys of this form, and one with SOURCE for those of all
    sources, whose names are the labels"""
    spread: str = ""
    """Key of the standard deviation around the first line"""
    log: bool = False
    parts: bool = False
    """The lines are parts of time/step_s and are drawn as a stacked plot"""


PLOTS = (
    Plot("Reward", (("reward/mean", "mean"),), spread="reward/std"),
    Plot("Reward by source", ((f"reward/{SOURCE}/mean", ""),)),
    Plot("Completion length by source (tokens)", ((f"completion/{SOURCE}/length_mean", ""),)),
    Plot("Evaluation on held-out prompts", (("eval/pass@*", ""), ("eval/*/pass@1", ""), ("eval/greedy", "greedy"))),
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
    """Return the plots of one run as SVG texts; plots without data are left out."""
    figures = [_time_split(rows, plot) if plot.parts else _lines(rows, plot) for plot in PLOTS]
    return [svg_text(figure, f"plot{index}") for index, figure in enumerate(figures) if figure is not None]


def compare_runs(run_dirs: Sequence[str | Path], output: str | Path, labels: Sequence[str] | None = None) -> Path:
    """Plot training reward and held-out accuracy of several runs, over steps and over time, in one SVG or PNG file.

    Raises:
        UserError: a run has no rows, the number of labels and runs differs, or the file type is not supported.
    """
    output = Path(output)
    if labels is not None and len(labels) != len(run_dirs):
        raise UserError(f"--labels names {len(labels)} runs, --compare {len(run_dirs)}")
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
    """Return a figure that needs no display; width and height are in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _small_figure() -> tuple[Figure, Axes]:
    """Return a small figure and its axes. A layout that measures all labels would take as long again as drawing them,
    for each of the figures that the end of a run draws."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 2.9))
    return figure, figure.add_axes((0.165, 0.15, 0.79, 0.7))


def dress(axes: Axes, title: str, x_label: str = "step") -> None:
    """Give a plot its title, axis label and the common style."""
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x_label, fontsize=8, color="#667080")
    axes.tick_params(which="both", labelsize=8, colors="#667080")
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c5cbd3")


def _with_figure(rows: list[Row], *keys: str) -> list[Row]:
    """Return the rows that have all these keys, subsampled to at most _MAX_POINTS."""
    found = [row for row in rows if all(row.get(key) is not None for key in keys)]
    return found[:: max(1, -(-len(found) // _MAX_POINTS))]


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


def _lines(rows: list[Row], plot: Plot) -> Figure | None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = []
    sources = [name[len("groups/") : -len("/trained")] for name in names if fnmatchcase(name, "groups/*/trained")]
    for key, label in plot.keys:
        if SOURCE in key:
            lines += [(name, own, _with_figure(rows, name)) for own in sources for name in [key.replace(SOURCE, own)]]
            continue
        found = [name for name in names if fnmatchcase(name, key)] if "*" in key else [key]
        lines += [(name, label or name.removeprefix("eval/"), _with_figure(rows, name)) for name in found]
    lines = [line for line in lines if line[2]]
    if not lines:
        return None
    figure, axes = _small_figure()
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
    if len(lines) > 1 or plot.spread:
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
    figure, axes = _small_figure()
    steps = [row["step"] for row in timed]
    if len(steps) == 1:  # an area needs two points
        steps, parts, other = [steps[0] - 1, *steps], [part * 2 for part in parts], other * 2
    axes.stackplot(steps, *parts, other, labels=[*labels, "other"], colors=[*colors, "#b9c0c9"], alpha=0.85)
    # The first step may include start-up time, which must not flatten the rest of the plot.
    whole = sorted(row["time/step_s"] for row in timed)
    axes.set_ylim(0, max(1e-9, 1.15 * whole[min(len(whole) - 1, int(0.98 * len(whole)))]))
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], fontsize=7, loc="upper right", framealpha=0.9)
    dress(axes, plot.title)
    return figure


def svg_text(figure: Figure, salt: str) -> str:
    """Return the figure as an SVG element; each figure of a page needs a different `salt`."""
    buffer = io.BytesIO()
    save_figure(figure, buffer, format="svg", salt=salt)
    text = buffer.getvalue().decode()
    return text[text.index("<svg") :]  # the XML declaration is not allowed inside a page


def write_figure(figure: Figure, output: Path, option: str) -> None:
    """Write an SVG or PNG file. For any other file type, raises UserError that names the command's option."""
    if output.suffix not in (".svg", ".png"):
        raise UserError(f"{option} {output}: the figure must be a .svg or a .png file")
    output.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, output, dpi=130)


def save_figure(figure: Figure, target: Any, salt: str = "figure", **options: Any) -> None:
    """Write an SVG or PNG file (or stream). An SVG file gets no date, so that it is reproducible."""
    import matplotlib

    # Each plot has its own salt, because the ids of several SVGs in one page must not collide.
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure.savefig(target, metadata=None if str(target).endswith(".png") else {"Date": None}, **options)


def plot_timeline(timeline: Timeline, steps: int = STEPS, last_step: int | None = None) -> Figure | None:
    """Draw the last `steps` steps up to `last_step` (default: the newest); None if no step is known."""
    window = _window(timeline, steps, last_step)
    if window is None:
        return None
    begin, end = window
    ranks = _ranks(timeline)
    names = list(dict.fromkeys(track.process for track in timeline.tracks if track.name in ("weights", "generation")))
    actors = names[:MAX_ACTORS]
    lanes = [(name if len(ranks) > 1 else TRAINER, tracks) for name, tracks in [*ranks.items()][:MAX_RANKS]]
    lanes += [(actor, [track for track in timeline.tracks if track.process == actor]) for actor in actors]
    figure = blank_figure(width=11.0, height=1.5 + 0.42 * LANE * len(lanes))
    axes = figure.subplots()
    shown: set[str] = set()
    tops = [number * (LANE + 0.2) for number in range(len(lanes))]
    for top, (name, tracks) in zip(tops, lanes, strict=True):
        for track in tracks:
            _draw(axes, track, begin, end, top, shown)
        here = (TRAINER, SYNC) if top == 0.0 else (name,)
        moments = [moment for moment in timeline.moments if moment.process in here and begin <= moment.time <= end]
        _draw_moments(axes, moments, begin, top + LANE - 0.3, shown)
        axes.axhline(top + LANE + 0.1, color="#e3e6ea", linewidth=0.6)
    axes.set_ylim(len(lanes) * (LANE + 0.2) - 0.1, -0.45)
    axes.set_xlim(0, end - begin)
    axes.set_yticks([top + LANE / 2 for top in tops], [name for name, _ in lanes])
    left_out = len(names) - len(actors)
    title = "Trainer and actors on one clock" + (f" ({left_out} more actors not drawn)" if left_out else "")
    dress(axes, title, "seconds")
    axes.grid(axis="y", visible=False)
    _legend(figure, axes)
    return figure


def write_plot(timeline: Timeline, output: Path, steps: int = STEPS, last_step: int | None = None) -> Path:
    """Write the plot as an SVG or PNG file. Raises UserError if no step is known, or for another file extension."""
    figure = plot_timeline(timeline, steps, last_step)
    if figure is None:
        raise UserError("the run folder has no times of any step: there is nothing to draw")
    write_figure(figure, output, "--plot")
    return output


def _window(timeline: Timeline, steps: int, last_step: int | None) -> tuple[float, float] | None:
    tracks = [track for own in _ranks(timeline).values() for track in own]
    spans = [span for track in tracks for span in track.spans if span.kind == "step"]
    spans = [span for span in spans if last_step is None or span.details["step"] <= last_step]
    if not spans:
        return None
    newest = max(span.details["step"] for span in spans)
    # An earlier launch may have trained the same step numbers; its spans precede those of the last launch.
    chosen = sorted((span for span in spans if span.details["step"] > newest - steps), key=lambda span: span.end)
    end = chosen[-1].end
    return min(span.begin for span in chosen[-steps * len(_ranks(timeline)) :]), end


def _ranks(timeline: Timeline) -> dict[str, list[Track]]:
    """Return the tracks of each trainer rank: its steps and its snapshots."""
    ranks: dict[str, list[Track]] = {}
    for track in timeline.tracks:
        if track.process == TRAINER:
            ranks.setdefault(track.name.removesuffix(SNAPSHOTS), []).append(track)
    return ranks


def _draw(axes: Axes, track: Track, begin: float, end: float, top: float, shown: set[str]) -> None:
    """Draw one track in its lane: in an actor's lane, generation is above and weights are below."""
    for span in track.spans:
        if span.end < begin or span.begin > end:
            continue
        left, right = max(span.begin, begin) - begin, min(span.end, end) - begin
        kind = "failed" if span.kind in _FAILED else span.kind
        if kind == "step":
            axes.axvline(right, color="#c5cbd3", linewidth=0.6, zorder=0)
            if top == 0.0 and right - left > 0.04 * (end - begin):
                _label(axes, (left + right) / 2, top - 0.06, span.name, "#667080", "bottom")
        elif kind == "generate":
            color = _TINTS[span.details["version"] % len(_TINTS)]
            label = _once(shown, "generate")
            axes.broken_barh([(left, right - left)], (top, 0.95), color=color, linewidth=0, label=label)
            if right - left > 0.03 * (end - begin):
                _label(axes, (left + right) / 2, top + 0.48, f"v{span.details['version']}", "#33506f", "center")
        elif kind in TIMELINE_COLORS:
            low, high = (top + 1.05, 0.5) if kind in _THIN else (top, 0.95)
            order = 3 if kind in ("pause", "apply", "commit", "sync stall") else 2
            # The edge keeps spans of a millisecond visible.
            axes.broken_barh(
                [(left, right - left)], (low, high), facecolor=TIMELINE_COLORS[kind],
                edgecolor=TIMELINE_COLORS[kind], linewidth=0.7, zorder=order, label=_once(shown, kind),
            )  # fmt: skip


def _draw_moments(axes: Axes, moments: list[Moment], begin: float, y: float, shown: set[str]) -> None:
    for moment in moments:
        if moment.name in _SHAPES:
            axes.plot(
                [moment.time - begin], [y], marker=_SHAPES[moment.name], color=TIMELINE_COLORS["failed"], markersize=8,
                markeredgecolor="white", markeredgewidth=0.7, linestyle="", zorder=5,
                label=_once(shown, moment.name),
            )  # fmt: skip


def _label(axes: Axes, x: float, y: float, text: str, color: str, anchor: str) -> None:
    axes.text(x, y, text, fontsize=7, color=color, ha="center", va=anchor, clip_on=True)


def _once(shown: set[str], name: str) -> str:
    """Return the label of a mark; only the first mark of each kind appears in the legend."""
    label = "_" if name in shown else name
    shown.add(name)
    return label


def _legend(figure: Figure, axes: Axes) -> None:
    order = [*TIMELINE_COLORS, "generate", *_SHAPES]
    marks = sorted(zip(*axes.get_legend_handles_labels(), strict=True), key=lambda mark: order.index(mark[1]))
    handles, names = [handle for handle, _ in marks], [name for _, name in marks]
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(marks), 9), fontsize=8, frameon=False)
