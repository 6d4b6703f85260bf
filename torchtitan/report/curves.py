"""The curves of a run, from the rows of metrics.jsonl: at most 2 · POINTS points each, however long the run is.

A curve that has become too long has its neighbouring points merged to their means, so that rows are read once and never
kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

Row = Mapping[str, Any]

POINTS = 300
# Of a plot, so many lines are drawn, and of all metrics so many are known: their names may hold those of sources, data
# sets and actors.
MAX_LINES, MAX_METRICS = 10, 600
# Evaluations that are listed: the first, and the last ones.
MAX_EVALUATIONS = 40
# Steps from whose pace the time left follows, and over which the reward is averaged.
RECENT_STEPS = 20
SOURCE = "{source}"
OTHER = "other"


@dataclass(frozen=True)
class Plot:
    """A plot of metrics over steps."""

    title: str
    unit: str
    """What the vertical axis shows"""
    keys: tuple[tuple[str, str], ...]
    """(metric, label) of each line; a metric with * stands for all metrics of this form, and one with SOURCE for those
    of all sources, whose names are the labels"""
    band: bool = False
    """The line is reward/mean, with its standard deviation as a band within the rewards' range"""
    log: bool = False
    parts: str = ""
    """The lines are parts of this metric, and are stacked"""
    low: float | None = None
    high: float | None = None
    """Ends of the vertical axis; None: those of the data"""
    folded: bool = False
    """Shown on demand"""


PLOTS = (
    Plot("Evaluation on held-out prompts", "share solved",
         (("eval/pass@*", ""), ("eval/*/pass@1", ""), ("eval/greedy", "greedy")), low=0.0, high=1.0),
    Plot("Reward", "reward of a completion", (("reward/mean", "mean"),), band=True),
    Plot("Seconds per step", "seconds", (
        ("time/train_s", "train"), ("time/data_wait_s", "wait for data"), ("time/snapshot_s", "snapshot"),
        ("time/sync_stall_s", "stall of weight sync")), parts="time/step_s"),
    Plot("Loss", "loss", (("loss", "training"), ("eval/loss", "held out"))),
    Plot("Completion length", "tokens", (("completion/length_mean", "mean"),)),
    Plot("Tokens per second", "tokens per second", (("tokens_per_s", ""),), folded=True),
    Plot("Mismatch KL of trainer and engine", "nats", (("mismatch_kl", ""),), log=True),
    Plot("KL to the reference", "nats", (("reference_kl", ""),), log=True),
    Plot("KL to the teacher", "nats", (("teacher_kl", ""),), log=True),
    Plot("Reward by source", "reward", ((f"reward/{SOURCE}/mean", ""),)),
    Plot("Completion length by source", "tokens", ((f"completion/{SOURCE}/length_mean", ""),)),
    Plot("Entropy", "nats", (("entropy", ""),), folded=True),
    Plot("Gradient norm", "norm", (("grad_norm", ""),), folded=True),
    Plot("Staleness", "versions", (("staleness/mean", "mean"), ("staleness/max", "max")), low=0.0, folded=True),
)  # fmt: skip


class Curve:
    """Points (step, values), whose neighbours are merged to their means once there are more than 2 · POINTS."""

    def __init__(self) -> None:
        self._points: list[tuple[float, list[float], int]] = []
        """The last step, the sums of the values, and the number of rows of each point"""
        self._rows_per_point = 1

    def add(self, step: float, values: Sequence[float]) -> None:
        """Add a row's values, as many as every row has."""
        if self._points and self._points[-1][2] < self._rows_per_point:
            _, sums, count = self._points[-1]
            self._points[-1] = step, [total + value for total, value in zip(sums, values, strict=True)], count + 1
            return
        self._points.append((step, list(values), 1))
        if len(self._points) > 2 * POINTS:
            self._rows_per_point *= 2
            self._merge_neighbours()

    def _merge_neighbours(self) -> None:
        """Make one point of every two; a last point without a neighbour stays."""
        merged = []
        for (_, sums, count), (step, more_sums, more) in zip(self._points[::2], self._points[1::2], strict=False):
            both = [total + other for total, other in zip(sums, more_sums, strict=True)]
            merged.append((step, both, count + more))
        self._points = merged + self._points[2 * len(merged) :]

    def points(self) -> list[list[float]]:
        """Return [step, mean, …] of each point, with five significant digits."""
        return [[step, *(float(f"{total / count:.5g}") for total in sums)] for step, sums, count in self._points]


@dataclass
class Summary:
    """A metric over all rows that have it."""

    first: float
    last: float = 0.0
    total: float = 0.0
    count: int = 0
    lowest: float = float("inf")
    highest: float = float("-inf")

    def add(self, value: float) -> None:
        self.last, self.total, self.count = value, self.total + value, self.count + 1
        self.lowest, self.highest = min(self.lowest, value), max(self.highest, value)

    def line(self, name: str) -> list[Any]:
        """Return name, first, last, mean, lowest, highest."""
        return [name, self.first, self.last, self.total / self.count, self.lowest, self.highest]


@dataclass
class Curves:
    """What the page shows of metrics.jsonl. Feed it with the rows, in their order."""

    curves: dict[str, Curve] = field(default_factory=dict)
    summaries: dict[str, Summary] = field(default_factory=dict)
    first_evaluation: Row | None = None
    evaluations: deque[Row] = field(default_factory=lambda: deque(maxlen=MAX_EVALUATIONS - 1))
    """After the first one"""
    evaluation_count: int = 0
    first_rewards: list[float] = field(default_factory=list)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    moments: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    """The last steps, and when they were trained, in seconds since 1970"""
    steps: int = 0
    """Rows of trained steps"""
    sources: dict[str, None] = field(default_factory=dict)

    def feed(self, rows: Iterable[Row]) -> None:
        for row in rows:
            step = row.get("step")
            if not isinstance(step, int):
                continue
            if any(name.startswith("eval/") for name in row):
                self._add_evaluation(row)
            if "loss" in row:
                self._add_step(step, row)
            for name, value in _numbers(row):
                self._add(step, name, value)

    def _add_evaluation(self, row: Row) -> None:
        self.evaluation_count += 1
        if self.first_evaluation is None:
            self.first_evaluation = row
        else:
            self.evaluations.append(row)

    def _add_step(self, step: int, row: Row) -> None:
        self.steps += 1
        self.moments.append((step, row.get("time") or 0.0))
        reward = row.get("reward/mean")
        if reward is not None:
            self.rewards.append(reward)
            if len(self.first_rewards) < RECENT_STEPS:
                self.first_rewards.append(reward)
            self._curve("reward band").add(step, [reward, *_band(row)])
        for plot in PLOTS:
            total = row.get(plot.parts) if plot.parts else None
            if total is not None:
                parts = [row.get(name) or 0.0 for name, _ in plot.keys]
                self._curve(f"parts of {plot.parts}").add(step, [*parts, max(0.0, total - sum(parts))])

    def _add(self, step: int, name: str, value: float) -> None:
        if name not in self.summaries:
            if len(self.summaries) >= MAX_METRICS:
                return
            self.summaries[name] = Summary(value)
            if fnmatchcase(name, "groups/*/trained"):
                self.sources[name.removeprefix("groups/").removesuffix("/trained")] = None
        self.summaries[name].add(value)
        if _is_drawn(name):
            self._curve(name).add(step, [value])

    def _curve(self, name: str) -> Curve:
        return self.curves.setdefault(name, Curve())

    def plots(self) -> list[dict[str, Any]]:
        """Return the plots that have data, as charts.js draws them.

        `points` has a list for each label, of [step, value]. A band has a single list, of [step, mean, low, high], and
        so has a stack, of [step, value of each label].
        """
        found = (self._stack(plot) if plot.parts else self._lines(plot) for plot in PLOTS)
        return [plot for plot in found if plot is not None]

    def _lines(self, plot: Plot) -> dict[str, Any] | None:
        if plot.band:
            curve = self.curves.get("reward band")
            lines = [] if curve is None else [("mean", curve.points())]
        else:
            lines = [(label, self.curves[name].points()) for name, label in self._names(plot) if name in self.curves]
        if not lines:
            return None
        return _plot(plot, "band" if plot.band else "lines", lines[:MAX_LINES], len(lines) - MAX_LINES)

    def _stack(self, plot: Plot) -> dict[str, Any] | None:
        curve = self.curves.get(f"parts of {plot.parts}")
        if curve is None:
            return None
        labels = [*(label for _, label in plot.keys), OTHER]
        return _plot(plot, "stack", [(label, []) for label in labels]) | {"points": [curve.points()]}

    def _names(self, plot: Plot) -> Iterator[tuple[str, str]]:
        """Yield (metric, label) of each line."""
        for key, label in plot.keys:
            if SOURCE in key:
                yield from ((key.replace(SOURCE, source), source) for source in self.sources)
            elif "*" in key:
                names = [name for name in self.summaries if fnmatchcase(name, key)]
                yield from ((name, name.removeprefix("eval/")) for name in names)
            else:
                yield key, label

    def listed_evaluations(self) -> list[Row]:
        """Return the first evaluation, and the last ones."""
        return [] if self.first_evaluation is None else [self.first_evaluation, *self.evaluations]


def _plot(plot: Plot, kind: str, lines: list[tuple[str, list[list[float]]]], left_out: int = 0) -> dict[str, Any]:
    return {
        "title": plot.title, "unit": plot.unit, "kind": kind, "log": plot.log, "low": plot.low, "high": plot.high,
        "folded": plot.folded, "labels": [label for label, _ in lines], "points": [points for _, points in lines],
        "left_out": max(0, left_out), "dots": plot.title.startswith("Evaluation"),
    }  # fmt: skip


def _band(row: Row) -> tuple[float, float]:
    """Return the mean reward less and plus its standard deviation, within the lowest and the highest reward."""
    mean, spread = row["reward/mean"], row.get("reward/std") or 0.0
    low, high = row.get("reward/min"), row.get("reward/max")
    below, above = mean - spread, mean + spread
    return (below if low is None else max(low, below)), (above if high is None else min(high, above))


def _numbers(row: Row) -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if name not in ("step", "time") and isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, value


@lru_cache(maxsize=4096)
def _is_drawn(name: str) -> bool:
    """Whether some plot may have a line of this metric; those of parts and bands are kept apart."""
    keys = [key for plot in PLOTS if not plot.parts and not plot.band for key, _ in plot.keys]
    return any(fnmatchcase(name, key.replace(SOURCE, "*")) for key in keys)


def evaluation_table(evaluations: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """Return head and rows of the table of evaluations: for each its figures, and below those of its sets."""
    lines: list[tuple[Any, str, dict[str, Any]]] = []
    for row in evaluations:
        sets: dict[str, dict[str, Any]] = {}
        for key, value in row.items():
            if key.startswith("eval/"):
                name, _, figure = key.removeprefix("eval/").rpartition("/")
                sets.setdefault(name, {})[figure] = value
        lines += [(row["step"], name, figures) for name, figures in sets.items()]
    names = list(dict.fromkeys(figure for _, _, figures in lines for figure in figures))
    several = any(name for _, name, _ in lines)
    rows = [[step, *[name or "mean"] * several, *map(figures.get, names)] for step, name, figures in lines]
    return ["after step", *["set"] * several, *names], rows
