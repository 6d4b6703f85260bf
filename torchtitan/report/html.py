"""report.html: one self-contained page about a run, made from the files in its folder. No scripts, no network."""

from __future__ import annotations

import re
import time
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from torchtitan.report.metrics import COMPLETIONS_FILE, METRICS_FILE, number, run_folder, write_whole
from torchtitan.report.plots import plot_timeline, run_plots, svg_text
from torchtitan.report.sync_metrics import sums_by_actor
from torchtitan.report.timeline import TRACE_FILE, read_timeline
from torchtitan.utils.json_lines import read_json_lines

REPORT_FILE = "report.html"
MAX_EVENTS = 200
MAX_COMPLETIONS = 12

Row = dict[str, Any]
Lines = list[list[Any]]
"""Of a table: figures and texts"""


def write_report(run_dir: str | Path) -> Path:
    """Write RUN_DIR/report.html in one rename and return its path. Works with few rows or none.

    Raises:
        UserError: there is no such folder.
    """
    path = run_folder(run_dir) / REPORT_FILE
    write_whole(path, report_page(path.parent))
    return path


def report_page(run_dir: Path) -> str:
    """The page's text."""
    rows = read_json_lines(run_dir / METRICS_FILE)
    steps = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if any(name.startswith("eval/") for name in row)]
    config = run_dir / "config.toml"
    configuration = config.read_text(encoding="utf-8") if config.is_file() else ""
    completions = read_json_lines(run_dir / COMPLETIONS_FILE)
    last = [row for row in completions if row["step"] == completions[-1]["step"]]
    events = read_json_lines(run_dir / "events.jsonl")
    drawn = plot_timeline(read_timeline(run_dir))
    folder = resources.files(__package__)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["number"] = number
    page = environment.from_string(folder.joinpath("report_page.html").read_text(encoding="utf-8"))
    return page.render(
        name=run_dir.resolve().name,
        style=folder.joinpath("style.css").read_text(encoding="utf-8"),
        headline=_headline(configuration, steps),
        cards=_cards(steps, evaluations),
        rows=steps or evaluations,
        plots=run_plots(rows),
        timeline="" if drawn is None else svg_text(drawn, "timeline"),
        trace_file=TRACE_FILE,
        sync=_weight_sync(sums_by_actor(run_dir)),
        evaluation=_evaluation(evaluations),
        summary=_summary(steps),
        last_step=last[0]["step"] if last else "",
        completions=[_completion(row) for row in last[:MAX_COMPLETIONS]],
        conversations=[row for row in last if "segments" in row][:MAX_COMPLETIONS],
        events=[_event(event) for event in events[-MAX_EVENTS:]],
        events_note=f"The last {MAX_EVENTS} of {len(events)}." if len(events) > MAX_EVENTS else "",
        configuration=configuration,
    )


def description_of(configuration: str) -> str:
    """job.description in the text of a config.toml; empty where there is none."""
    found = re.search(r'^description = "(.*)"$', configuration, re.MULTILINE)
    return found[1] if found else ""


def _headline(configuration: str, steps: list[Row]) -> str:
    written = "written " + time.strftime("%Y-%m-%d %H:%M:%S")
    return " · ".join(filter(None, (description_of(configuration), f"{len(steps)} steps", written)))


def _cards(steps: list[Row], evaluations: list[Row]) -> list[tuple[str, str]]:
    """Figures and what they are."""
    cards: list[tuple[str, str]] = []
    scored = [row for row in evaluations if row.get("eval/pass@1") is not None]
    if scored:
        first, last = number(scored[0]["eval/pass@1"]), number(scored[-1]["eval/pass@1"])
        cards.append((f"{first} → {last}", "held-out pass@1, first → last"))
        if scored[-1].get("eval/greedy") is not None:
            cards.append((number(scored[-1]["eval/greedy"]), "held-out greedy accuracy, last"))
    if steps:
        total = sum(row["time/step_s"] or 0.0 for row in steps)
        stalled = sum(row["time/sync_stall_s"] or 0.0 for row in steps)
        cards += [
            (number(_mean(steps[-10:], "reward/mean")), "training reward, last 10 steps"),
            (f"{number(total)} s", "in steps"),
            (f"{number(_mean(steps, 'time/step_s'))} s", "per step"),
            (number(_mean(steps, "tokens_per_s")), "tokens per second"),
            (number(_mean(steps, "staleness/mean")), "staleness, mean"),
            (f"{100 * stalled / total:.1f} %" if total else "–", "of the time stalled on weight sync"),
            (number(steps[-1].get("weight_sync/versions_published")), "versions published"),
            (number(steps[-1].get("weight_sync/versions_skipped")), "versions skipped"),
        ]
    return cards


def _mean(rows: list[Row], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else None


# Columns of the weight synchronisation's table: heading, figure, factor to the unit in the heading.
_SYNC_COLUMNS = (
    *((name, name, 1) for name in ("pulls", "applied", "superseded", "aborted", "refused")),
    ("queue ms", "queue_wait_s", 1e3), ("transfer ms", "transfer_s", 1e3), ("GB/s", "gigabytes_per_s", 1),
    ("apply ms", "apply_s", 1e3), ("drain ms", "drain_s", 1e3),
    ("pause ms", "pause_s", 1e3), ("longest pause ms", "pause_s/max", 1e3),
    *((f"MB {kind}", f"bytes_{kind}", 1e-6) for kind in ("full", "delta", "relayed")),
)  # fmt: skip


def _weight_sync(actors: dict[str, dict[str, float]]) -> tuple[list[str], Lines]:
    """Per actor: versions by what became of them, means over those that it applied, evictions by phase."""
    columns = [one for one in _SYNC_COLUMNS if any(one[1] in figures for figures in actors.values())]
    lines: Lines = []
    for actor, figures in actors.items():
        values = [figures[name] * unit if name in figures else None for _, name, unit in columns]
        phases = [(name.removeprefix("evicted_in/"), figures[name]) for name in figures if "evicted_in/" in name]
        lines.append([actor, *values, ", ".join(f"{number(count)} in {phase}" for phase, count in phases)])
    return ["actor", *(heading for heading, _, _ in columns), "evictions"], lines


def _evaluation(evaluations: list[Row]) -> tuple[list[str], Lines]:
    names = list(dict.fromkeys(name for row in evaluations for name in row if name.startswith("eval/")))
    head = ["after step", *(name.removeprefix("eval/") for name in names)]
    return head, [[row["step"], *(row.get(name) for name in names)] for row in evaluations]


def _summary(steps: list[Row]) -> Lines:
    lines: Lines = []
    for name in dict.fromkeys(name for row in steps for name in row if name != "step"):
        values = [row[name] for row in steps if row.get(name) is not None]
        if values:
            lines.append([name, values[0], values[-1], sum(values) / len(values), min(values), max(values)])
    return lines


def _completion(row: Row) -> list[Any]:
    versions = ", ".join(str(span["version"]) for span in row["versions"])
    return [row["prompt"], row["completion"], row["reward"], row["advantage"], versions]


def _event(event: Row) -> list[Any]:
    moment = time.strftime("%H:%M:%S", time.localtime(event.get("time", 0)))
    details = "  ".join(f"{name}={value}" for name, value in event.items() if name not in ("time", "kind"))
    return [moment, str(event.get("kind")), details]
