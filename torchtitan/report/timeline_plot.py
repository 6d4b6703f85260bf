"""The last steps of a run as a picture: trainer and actors on one axis of time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.errors import UserError
from torchtitan.report.plots import TIMES, blank_figure, dress, write_figure
from torchtitan.report.timeline import SNAPSHOTS, SYNC, TRAINER, Moment, Timeline, Track

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEPS = 12
MOST_RANKS = 2
MOST_ACTORS = 6
# Height of a process in the plot, without the space between two.
LANE = 1.6

# Kinds of spans that are drawn, in the order of the legend. Generation has a tint per version.
COLORS = {label: color for _, label, color in TIMES} | {
    "rollout": "#b7d3f2", "commit": "#5b2a86", "evaluation": "#8a97a8", "wake": "#e8c468", "checkpoint": "#b9c0c9",
    "transfer": "#d9622b", "apply": "#2e8b57", "drain": "#9fd3b4", "pause": "#10151c", "failed": "#c03955",
}  # fmt: skip
_FAILED = ("aborted", "refused", "poisoned", "evicted")
_TINTS = ("#b7d3f2", "#d6e6f7")
# Incidents of the synchronisation and events of the run that are drawn.
_SHAPES = {
    "lost a lane": "v", "evicted": "X", "poisoned": "P", "actor_evicted": "d", "actor_restarting": "^",
    "shard server lost": "s", "registry restarted": "s", "fault injected": "*",
}  # fmt: skip
_THIN = {"snapshot", "transfer", "apply", "drain", "failed"}


def plot_timeline(timeline: Timeline, steps: int = STEPS, last_step: int | None = None) -> Figure | None:
    """The last `steps` steps up to `last_step` (the newest); None where no step is known."""
    window = _window(timeline, steps, last_step)
    if window is None:
        return None
    begin, end = window
    ranks = _ranks(timeline)
    names = list(dict.fromkeys(track.process for track in timeline.tracks if track.name in ("weights", "generation")))
    actors = names[:MOST_ACTORS]
    lanes = [(name if len(ranks) > 1 else TRAINER, tracks) for name, tracks in [*ranks.items()][:MOST_RANKS]]
    lanes += [(actor, [track for track in timeline.tracks if track.process == actor]) for actor in actors]
    figure = blank_figure(width=11.0, height=1.5 + 0.42 * LANE * len(lanes))
    axes = figure.subplots()
    shown: set[str] = set()
    tops = [number * (LANE + 0.2) for number in range(len(lanes))]
    for top, (name, tracks) in zip(tops, lanes, strict=True):
        for track in tracks:
            _draw(axes, track, begin, end, top, shown)
        here = (TRAINER, SYNC) if top == 0.0 else (name,)
        moments = [one for one in timeline.moments if one.process in here and begin <= one.time <= end]
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
    """Write the plot as an SVG or PNG file. Raises UserError where there is nothing to draw, or for another ending."""
    figure = plot_timeline(timeline, steps, last_step)
    if figure is None:
        raise UserError("the run folder says of no step when it was made: there is nothing to draw")
    write_figure(figure, output, "--plot")
    return output


def _window(timeline: Timeline, steps: int, last_step: int | None) -> tuple[float, float] | None:
    tracks = [track for own in _ranks(timeline).values() for track in own]
    spans = [span for track in tracks for span in track.spans if span.kind == "step"]
    spans = [span for span in spans if last_step is None or span.details["step"] <= last_step]
    if not spans:
        return None
    newest = max(span.details["step"] for span in spans)
    # An earlier launch may have made steps of the same number: its spans lie before those of the last one.
    chosen = sorted((span for span in spans if span.details["step"] > newest - steps), key=lambda one: one.end)
    end = chosen[-1].end
    return min(span.begin for span in chosen[-steps * len(_ranks(timeline)) :]), end


def _ranks(timeline: Timeline) -> dict[str, list[Track]]:
    """The tracks of each trainer rank: its steps, and its snapshots."""
    ranks: dict[str, list[Track]] = {}
    for track in timeline.tracks:
        if track.process == TRAINER:
            ranks.setdefault(track.name.removesuffix(SNAPSHOTS), []).append(track)
    return ranks


def _draw(axes: Axes, track: Track, begin: float, end: float, top: float, shown: set[str]) -> None:
    """One track in its lane: generation in the upper part of an actor's lane, weights in the lower."""
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
        elif kind in COLORS:
            low, high = (top + 1.05, 0.5) if kind in _THIN else (top, 0.95)
            order = 3 if kind in ("pause", "apply", "commit", "sync stall") else 2
            # The edge keeps what lasts a millisecond visible.
            axes.broken_barh(
                [(left, right - left)], (low, high), facecolor=COLORS[kind], edgecolor=COLORS[kind], linewidth=0.7,
                zorder=order, label=_once(shown, kind),
            )  # fmt: skip


def _draw_moments(axes: Axes, moments: list[Moment], begin: float, y: float, shown: set[str]) -> None:
    for one in moments:
        if one.name in _SHAPES:
            axes.plot(
                [one.time - begin], [y], marker=_SHAPES[one.name], color=COLORS["failed"], markersize=8,
                markeredgecolor="white", markeredgewidth=0.7, linestyle="", zorder=5,
                label=_once(shown, one.name),
            )  # fmt: skip


def _label(axes: Axes, x: float, y: float, text: str, color: str, anchor: str) -> None:
    axes.text(x, y, text, fontsize=7, color=color, ha="center", va=anchor, clip_on=True)


def _once(shown: set[str], name: str) -> str:
    """The label of a mark: only the first of its kind is in the legend."""
    label = "_" if name in shown else name
    shown.add(name)
    return label


def _legend(figure: Figure, axes: Axes) -> None:
    order = [*COLORS, "generate", *_SHAPES]
    marks = sorted(zip(*axes.get_legend_handles_labels(), strict=True), key=lambda mark: order.index(mark[1]))
    handles, names = [handle for handle, _ in marks], [name for _, name in marks]
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(marks), 9), fontsize=8, frameon=False)
