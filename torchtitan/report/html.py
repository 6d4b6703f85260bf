"""report.html: one self-contained page about a run, made from the files in its folder. No scripts, no network.

python -m torchtitan.report.html RUN_DIR
python -m torchtitan.report.html --compare RUN_A RUN_B --output figure.svg
"""

from __future__ import annotations

import argparse
import html
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.errors import UserError
from torchtitan.report.metrics import COMPLETIONS_FILE, METRICS_FILE
from torchtitan.report.sync_metrics import sums_by_actor
from torchtitan.report.timeline import read_timeline
from torchtitan.report.trace import TRACE_FILE
from torchtitan.utils.json_lines import read_json_lines

REPORT_FILE = "report.html"
MAX_EVENTS = 200
MAX_COMPLETIONS = 12

Row = dict[str, Any]

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; background: #f6f7f9; margin: 0; }
main { max-width: 1180px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 2px; } h2 { font-size: 17px; margin: 34px 0 10px; }
.quiet { color: #667080; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(170px, 1fr)); gap: 10px; margin-top: 18px; }
.card { background: #fff; border: 1px solid #e3e6ea; border-radius: 8px; padding: 9px 13px; }
.card b { display: block; font-size: 20px; font-weight: 600; } .card span { font-size: 13px; color: #667080; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(360px, 1fr)); gap: 12px; }
.plot { background: #fff; border: 1px solid #e3e6ea; border-radius: 8px; padding: 6px; }
.plot svg { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; background: #fff; border: 1px solid #e3e6ea; width: 100%; font-size: 13px; }
td, th { text-align: left; vertical-align: top; padding: 4px 10px; border-top: 1px solid #edeff2; }
th { background: #fafbfc; font-weight: 600; } td.text { white-space: pre-wrap; word-break: break-word; }
pre { background: #fff; border: 1px solid #e3e6ea; border-radius: 8px; padding: 12px; overflow-x: auto; }
pre { font-size: 13px; }
"""


def write_report(run_dir: str | Path) -> Path:
    """Write RUN_DIR/report.html in one rename and return its path. Works with few rows or none.

    Raises:
        UserError: there is no such folder.
    """
    from torchtitan.report.plots import run_plots, svg_text
    from torchtitan.report.timeline_plot import plot_timeline

    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise UserError(f"there is no run folder {run_dir}")
    rows = read_json_lines(run_dir / METRICS_FILE)
    steps = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if any(name.startswith("eval/") for name in row)]
    events = read_json_lines(run_dir / "events.jsonl")
    config = run_dir / "config.toml"
    steps_drawn = plot_timeline(read_timeline(run_dir))
    parts = [
        f"<h1>{html.escape(run_dir.resolve().name)}</h1>",
        f'<p class="quiet">{_headline(config, steps)}</p>',
        _cards(steps, evaluations),
        "<h2>Curves</h2>" if steps or evaluations else "<p>No step has been logged yet.</p>",
        '<div class="plots">'
        + "".join(f'<div class="plot">{svg}</div>' for svg in run_plots(steps, evaluations))
        + "</div>",
        _timeline_section("" if steps_drawn is None else svg_text(steps_drawn, "timeline")),
        _weight_sync_table(sums_by_actor(run_dir)),
        _evaluation_table(evaluations),
        _summary_table(steps),
        _completions_table(read_json_lines(run_dir / COMPLETIONS_FILE)),
        _events_table(events),
    ]
    if config.is_file():
        parts.append(f"<h2>Configuration</h2><pre>{html.escape(config.read_text(encoding='utf-8'))}</pre>")
    title = html.escape(f"{run_dir.resolve().name}: report")
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )
    path = run_dir / REPORT_FILE
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, path)
    return path


def number(value: Any) -> str:
    """A figure in four significant digits, or a dash."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return html.escape(value)
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"


def _headline(config: Path, steps: list[Row]) -> str:
    text = config.read_text(encoding="utf-8") if config.is_file() else ""
    description = re.search(r'^description = "(.*)"$', text, re.MULTILINE)
    words = [description[1]] if description and description[1] else []
    words.append(f"{len(steps)} steps")
    words.append("written " + time.strftime("%Y-%m-%d %H:%M:%S"))
    return html.escape(" · ".join(words))


def _cards(steps: list[Row], evaluations: list[Row]) -> str:
    cards: list[tuple[str, str]] = []
    scored = [row for row in evaluations if row.get("eval/pass@1") is not None]
    if scored:
        first, last = scored[0]["eval/pass@1"], scored[-1]["eval/pass@1"]
        cards.append((f"{number(first)} → {number(last)}", "held-out pass@1, first → last"))
        if scored[-1].get("eval/greedy") is not None:
            cards.append((number(scored[-1]["eval/greedy"]), "held-out greedy accuracy, last"))
    if steps:
        tail = steps[-min(10, len(steps)) :]
        total = sum(row["time/step_s"] or 0.0 for row in steps)
        stalled = sum(row["time/sync_stall_s"] or 0.0 for row in steps)
        cards += [
            (number(_mean(tail, "reward/mean")), "training reward, last 10 steps"),
            (f"{number(total)} s", "in steps"),
            (f"{number(_mean(steps, 'time/step_s'))} s", "per step"),
            (number(_mean(steps, "tokens_per_s")), "tokens per second"),
            (number(_mean(steps, "staleness/mean")), "staleness, mean"),
            (f"{100 * stalled / total:.1f} %" if total else "–", "of the time stalled on weight sync"),
            (number(steps[-1].get("weight_sync/versions_published")), "versions published"),
            (number(steps[-1].get("weight_sync/versions_skipped")), "versions skipped"),
        ]
    body = "".join(f'<div class="card"><b>{value}</b><span>{name}</span></div>' for value, name in cards)
    return f'<div class="cards">{body}</div>'


def _mean(rows: list[Row], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else None


def _table(head: Sequence[str], lines: Sequence[Sequence[str]], text_columns: Sequence[int] = ()) -> str:
    """Cells are HTML already."""
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="text">{cell}</td>' if i in text_columns else f"<td>{cell}</td>" for i, cell in enumerate(line)
        )
        + "</tr>"
        for line in lines
    )
    return "<table><tr>" + "".join(f"<th>{name}</th>" for name in head) + f"</tr>{body}</table>"


def _timeline_section(svg: str) -> str:
    if not svg:
        return ""
    said = f"The last steps. More of the run is in {TRACE_FILE}, for https://ui.perfetto.dev or chrome://tracing."
    return f'<h2>Time line</h2><p class="quiet">{said}</p><div class="plot">{svg}</div>'


# Columns of the weight synchronisation's table: heading, figure, factor to the unit in the heading.
_SYNC_COLUMNS = (
    ("offered", "offered", 1),
    ("applied", "applied", 1),
    ("superseded", "superseded", 1),
    ("aborted", "aborted", 1),
    ("refused", "refused", 1),
    ("queue ms", "queue_wait_s", 1e3),
    ("transfer ms", "transfer_s", 1e3),
    ("GB/s", "gigabytes_per_s", 1),
    ("verify ms", "verify_s", 1e3),
    ("apply ms", "apply_s", 1e3),
    ("drain ms", "drain_s", 1e3),
    ("pause ms", "pause_s", 1e3),
    ("longest pause ms", "pause_s/max", 1e3),
    ("MB full", "bytes_full", 1e-6),
    ("MB delta", "bytes_delta", 1e-6),
    ("MB relayed", "bytes_relayed", 1e-6),
)


def _weight_sync_table(actors: dict[str, dict[str, float]]) -> str:
    """Per actor: versions by what became of them, means over those that it applied, evictions by phase."""
    if not actors:
        return ""
    columns = [one for one in _SYNC_COLUMNS if any(figures.get(one[1]) is not None for figures in actors.values())]
    lines = []
    for actor, figures in actors.items():
        values = [number(None if (value := figures.get(name)) is None else value * unit) for _, name, unit in columns]
        evicted = {name.removeprefix("evicted_in/"): value for name, value in figures.items() if "evicted_in/" in name}
        said = ", ".join(f"{number(count)} in {phase}" for phase, count in evicted.items()) or "–"
        lines.append([html.escape(actor), *values, html.escape(said)])
    head = ["actor", *(heading for heading, _, _ in columns), "evictions"]
    return (
        "<h2>Weight synchronisation</h2>"
        '<p class="quiet">Times are means over applied versions; each version is in weight_sync/versions.jsonl.</p>'
        + _table(head, lines)
    )


def _evaluation_table(evaluations: list[Row]) -> str:
    if not evaluations:
        return ""
    names = list(dict.fromkeys(name for row in evaluations for name in row if name.startswith("eval/")))
    head = ["after step", *(html.escape(name.removeprefix("eval/")) for name in names)]
    lines = [[number(row["step"]), *(number(row.get(name)) for name in names)] for row in evaluations]
    return "<h2>Evaluation</h2>" + _table(head, lines)


def _summary_table(steps: list[Row]) -> str:
    if not steps:
        return ""
    names = [name for name in dict.fromkeys(name for row in steps for name in row) if name != "step"]
    lines = []
    for name in names:
        values = [row[name] for row in steps if row.get(name) is not None]
        if values:
            mean = sum(values) / len(values)
            figures = (values[0], values[-1], mean, min(values), max(values))
            lines.append([html.escape(name), *(number(value) for value in figures)])
    return "<h2>Figures</h2>" + _table(["", "first", "last", "mean", "lowest", "highest"], lines)


def _completions_table(rows: list[Row]) -> str:
    if not rows:
        return ""
    last = [row for row in rows if row["step"] == rows[-1]["step"]][:MAX_COMPLETIONS]
    lines = [
        [
            html.escape(row["prompt"]),
            html.escape(row["completion"]),
            number(row["reward"]),
            number(row["advantage"]),
            ", ".join(str(span["version"]) for span in row["versions"]),
        ]
        for row in last
    ]
    head = ["prompt", "completion", "reward", "advantage", "versions"]
    return f"<h2>Completions of step {last[0]['step']}</h2>" + _table(head, lines, text_columns=(0, 1))


def _events_table(events: list[Row]) -> str:
    if not events:
        return "<h2>Events</h2><p>None.</p>"
    shown = events[-MAX_EVENTS:]
    left_out = f"<p>The last {MAX_EVENTS} of {len(events)}.</p>" if len(events) > MAX_EVENTS else ""
    lines = []
    for event in shown:
        moment = time.strftime("%H:%M:%S", time.localtime(event.get("time", 0)))
        rest = "  ".join(f"{name}={value}" for name, value in event.items() if name not in ("time", "kind"))
        lines.append([moment, html.escape(str(event.get("kind"))), html.escape(rest)])
    return "<h2>Events</h2>" + left_out + _table(["time", "event", "details"], lines, text_columns=(2,))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m torchtitan.report.html", description="Report on runs")
    parser.add_argument("run_dir", nargs="?", help="run folder to write report.html for")
    parser.add_argument("--compare", nargs="+", metavar="RUN_DIR", help="plot reward and evaluation of several runs")
    parser.add_argument("--labels", nargs="+", help="names of the compared runs, in their order")
    parser.add_argument("--output", default="compare.svg", help="figure of --compare: .svg or .png")
    arguments = parser.parse_args(argv)
    try:
        if arguments.compare:
            from torchtitan.report.plots import compare_runs

            print(compare_runs(arguments.compare, arguments.output, arguments.labels))
        elif arguments.run_dir:
            print(write_report(arguments.run_dir))
        else:
            parser.error("give a run folder, or --compare with several")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
