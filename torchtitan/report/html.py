"""report.html: one self-contained page about a run, made from the files in its folder. No scripts, no network."""

from __future__ import annotations

import html
import re
import time
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from torchtitan.report.console import number
from torchtitan.report.metrics import COMPLETIONS_FILE, METRICS_FILE, run_folder, write_whole
from torchtitan.report.plots import plot_timeline, run_plots, svg_text
from torchtitan.report.sync_metrics import sums_by_actor
from torchtitan.report.timeline import TRACE_FILE, read_timeline
from torchtitan.utils.json_lines import read_json_lines

REPORT_FILE = "report.html"
MAX_EVENTS = 200
MAX_COMPLETIONS = 12

Row = dict[str, Any]


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
    steps_drawn = plot_timeline(read_timeline(run_dir))
    plots = "".join(f'<div class="plot">{svg}</div>' for svg in run_plots(rows))
    name = html.escape(run_dir.resolve().name)
    parts = [
        f'<h1>{name}</h1><p class="quiet">{html.escape(_headline(configuration, steps))}</p>',
        _cards(steps, evaluations),
        "<h2>Curves</h2>" if steps or evaluations else "<p>No step has been logged yet.</p>",
        f'<div class="plots">{plots}</div>',
        "" if steps_drawn is None else _timeline(svg_text(steps_drawn, "timeline")),
        _weight_sync_table(sums_by_actor(run_dir)),
        _evaluation_table(evaluations),
        _summary_table(steps),
        _completions_table(completions := read_json_lines(run_dir / COMPLETIONS_FILE)),
        _conversations(completions),
        _events_table(read_json_lines(run_dir / "events.jsonl")),
        f"<h2>Configuration</h2><pre>{html.escape(configuration)}</pre>" if configuration else "",
    ]
    style = resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}: report</title>'
        f'<meta name="viewport" content="width=device-width"><style>{style}</style></head>'
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def description_of(configuration: str) -> str:
    """job.description in the text of a config.toml; empty where there is none."""
    found = re.search(r'^description = "(.*)"$', configuration, re.MULTILINE)
    return found[1] if found else ""


def _headline(configuration: str, steps: list[Row]) -> str:
    written = "written " + time.strftime("%Y-%m-%d %H:%M:%S")
    return " · ".join(filter(None, (description_of(configuration), f"{len(steps)} steps", written)))


def _cards(steps: list[Row], evaluations: list[Row]) -> str:
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
    body = "".join(
        f'<div class="card"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>' for value, name in cards
    )
    return f'<div class="cards">{body}</div>'


def _mean(rows: list[Row], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else None


def _timeline(svg: str) -> str:
    note = f"The last steps. More of the run is in {TRACE_FILE}, for https://ui.perfetto.dev or chrome://tracing."
    return f'<h2>Timeline</h2><p class="quiet">{note}</p><div class="plot">{svg}</div>'


def _table(title: str, head: Sequence[str], lines: Sequence[Iterable[Any]], note: str = "") -> str:
    """A section with a table of figures and texts, which are escaped here; nothing without lines."""
    if not lines:
        return ""
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(number(cell))}</td>" for cell in line) + "</tr>" for line in lines
    )
    above = f'<p class="quiet">{html.escape(note)}</p>' if note else ""
    return f"<h2>{html.escape(title)}</h2>{above}<table><tr>{heads}</tr>{body}</table>"


# Columns of the weight synchronisation's table: heading, figure, factor to the unit in the heading.
_SYNC_COLUMNS = (
    *((name, name, 1) for name in ("pulls", "applied", "superseded", "aborted", "refused")),
    ("queue ms", "queue_wait_s", 1e3), ("transfer ms", "transfer_s", 1e3), ("GB/s", "gigabytes_per_s", 1),
    ("apply ms", "apply_s", 1e3), ("drain ms", "drain_s", 1e3),
    ("pause ms", "pause_s", 1e3), ("longest pause ms", "pause_s/max", 1e3),
    *((f"MB {kind}", f"bytes_{kind}", 1e-6) for kind in ("full", "delta", "relayed")),
)  # fmt: skip


def _weight_sync_table(actors: dict[str, dict[str, float]]) -> str:
    """Per actor: versions by what became of them, means over those that it applied, evictions by phase."""
    columns = [one for one in _SYNC_COLUMNS if any(one[1] in figures for figures in actors.values())]
    lines = []
    for actor, figures in actors.items():
        values = [figures[name] * unit if name in figures else None for _, name, unit in columns]
        phases = [(name.removeprefix("evicted_in/"), figures[name]) for name in figures if "evicted_in/" in name]
        lines.append([actor, *values, ", ".join(f"{number(count)} in {phase}" for phase, count in phases)])
    note = "Times are means over applied versions; each version is in weight_sync/versions.jsonl."
    head = ["actor", *(heading for heading, _, _ in columns), "evictions"]
    return _table("Weight synchronisation", head, lines, note)


def _evaluation_table(evaluations: list[Row]) -> str:
    names = list(dict.fromkeys(name for row in evaluations for name in row if name.startswith("eval/")))
    head = ["after step", *(name.removeprefix("eval/") for name in names)]
    return _table("Evaluation", head, [[row["step"], *(row.get(name) for name in names)] for row in evaluations])


def _summary_table(steps: list[Row]) -> str:
    lines: list[list[Any]] = []
    for name in dict.fromkeys(name for row in steps for name in row if name != "step"):
        values = [row[name] for row in steps if row.get(name) is not None]
        if values:
            lines.append([name, values[0], values[-1], sum(values) / len(values), min(values), max(values)])
    return _table("Metrics", ["", "first", "last", "mean", "lowest", "highest"], lines)


def _completions_table(rows: list[Row]) -> str:
    last = [row for row in rows if row["step"] == rows[-1]["step"]][:MAX_COMPLETIONS]
    lines = [
        [row["prompt"], row["completion"], row["reward"], row["advantage"],
         ", ".join(str(span["version"]) for span in row["versions"])]
        for row in last
    ]  # fmt: skip
    title = f"Completions of step {last[0]['step']}" if last else ""
    return _table(title, ["prompt", "completion", "reward", "advantage", "versions"], lines)


def _conversations(rows: list[Row]) -> str:
    """Episodes of several turns: what was given is plain, what was sampled has the colour of its version."""
    last = [row for row in rows if row["step"] == rows[-1]["step"] and "segments" in row][:MAX_COMPLETIONS]
    if not last:
        return ""
    parts = []
    for row in last:
        said = [f'<span class="given">{html.escape(row["prompt"])}</span>']
        for segment in row["segments"]:
            version = max(segment.get("versions", []), default=None)
            kind = "given" if version is None else f"version{version % 4}"
            title = "given" if version is None else f"sampled by version {', '.join(map(str, segment['versions']))}"
            said.append(f'<span class="{kind}" title="{title}">{html.escape(segment["text"])}</span>')
        about = f"reward {number(row['reward'])}, advantage {number(row['advantage'])}, {row['finish_reason']}"
        parts.append(f'<p class="quiet">{html.escape(about)}</p><pre class="talk">{"".join(said)}</pre>')
    note = (
        "What the policy sampled, and is trained on, is coloured, a colour for each version; the rest was given to it."
    )
    return f'<h2>Conversations of step {last[0]["step"]}</h2><p class="quiet">{note}</p>{"".join(parts)}'


def _events_table(events: list[Row]) -> str:
    lines = []
    for event in events[-MAX_EVENTS:]:
        moment = time.strftime("%H:%M:%S", time.localtime(event.get("time", 0)))
        details = "  ".join(f"{name}={value}" for name, value in event.items() if name not in ("time", "kind"))
        lines.append([moment, str(event.get("kind")), details])
    note = f"The last {MAX_EVENTS} of {len(events)}." if len(events) > MAX_EVENTS else ""
    return _table("Events", ["time", "event", "details"], lines, note) or "<h2>Events</h2><p>None.</p>"
