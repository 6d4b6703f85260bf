"""HTML pages about a run, made from the files in its folder.

report.html is self-contained, without scripts. A small web server serves the live page, during the run or afterwards.

The server only reads, and a run starts it as a separate process, so that no request can delay a step. It listens on
127.0.0.1, requires its token, and accepts only host names of this machine, against DNS rebinding by foreign pages.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from aiohttp import web

from torchtitan.errors import UserError
from torchtitan.report.browser import CompletionIndex, Selection
from torchtitan.report.console import number
from torchtitan.report.metrics import ACTORS_FILE, COMPLETIONS_FILE, METRICS_FILE, run_folder
from torchtitan.report.plots import COLORS, PLOTS, plot_timeline, run_plots, svg_text
from torchtitan.report.sync_metrics import sums_by_actor
from torchtitan.report.timeline import TRACE_FILE, read_timeline
from torchtitan.utils.addresses import listen_at
from torchtitan.utils.child_process import child_environment, end_process, end_with_parent, start_beside
from torchtitan.utils.http_site import has_token
from torchtitan.utils.json_lines import CHUNK_BYTES, JsonTail, line_start, read_json_lines, read_lines, write_whole
from torchtitan.utils.prometheus import CONTENT_TYPE, Figure, exposition, numbers_in

REPORT_FILE = "report.html"
MAX_EVENTS = 200
MAX_COMPLETIONS = 12
# Of the completions, which may be hundreds of megabytes, so many bytes at the end are read for those of the last step.
LAST_BYTES = 32 * 2**20

Row = dict[str, Any]
Lines = list[list[Any]]
"""The lines of a table, whose cells are numbers and texts"""
# Columns of the weight synchronisation table: heading, metric, factor that converts it to the unit in the heading.
_SYNC_COLUMNS = (
    *((name, name, 1) for name in ("pulls", "applied", "superseded", "aborted", "refused")),
    ("queue ms", "queue_wait_s", 1e3), ("transfer ms", "transfer_s", 1e3), ("GB/s", "gigabytes_per_s", 1),
    ("apply ms", "apply_s", 1e3), ("drain ms", "drain_s", 1e3),
    ("pause ms", "pause_s", 1e3), ("longest pause ms", "pause_s/max", 1e3),
    *((f"MB {kind}", f"bytes_{kind}", 1e-6) for kind in ("full", "delta", "relayed")),
    ("corrupt buckets", "corrupt_buckets", 1),
)  # fmt: skip
HOST = "127.0.0.1"
HOST_NAMES = ("127.0.0.1", "localhost", "[::1]")
FILES = {"metrics": METRICS_FILE, "events": "events.jsonl"}
TOKEN_VARIABLE = "TORCHTITAN_LIVE_TOKEN"
STOP_SECONDS = 5.0
# The whole report takes seconds of CPU time, so requests within this interval get the page that was drawn before.
REPORT_SECONDS = 10.0
# The index of 100,000 completions takes seconds, so a request reads on for so long and answers from what is known.
INDEX_SECONDS = 0.5


def write_report(run_dir: str | Path) -> Path:
    """Write RUN_DIR/report.html atomically and return its path. Works with few rows or none.

    Raises:
        UserError: the folder does not exist.
    """
    path = run_folder(run_dir) / REPORT_FILE
    write_whole(path, report_page(path.parent))
    return path


def report_page(run_dir: Path) -> str:
    """Return the HTML of the report."""
    rows = read_json_lines(run_dir / METRICS_FILE)
    steps = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if any(name.startswith("eval/") for name in row)]
    config = run_dir / "config.toml"
    configuration = config.read_text(encoding="utf-8") if config.is_file() else ""
    last = _rows_of_last_step(run_dir / COMPLETIONS_FILE)
    events = read_json_lines(run_dir / "events.jsonl")
    drawn = plot_timeline(read_timeline(run_dir))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["number"] = number
    page = environment.from_string(_resource("report_page.html"))
    return page.render(
        name=run_dir.resolve().name,
        style=_resource("style.css"),
        headline=_headline(configuration, steps),
        ending=_ending(events),
        cards=_cards(steps, evaluations),
        rows=steps or evaluations,
        plots=run_plots(rows),
        timeline="" if drawn is None else svg_text(drawn, "timeline"),
        trace_file=TRACE_FILE,
        sync=_weight_sync(sums_by_actor(run_dir)),
        evaluation=evaluation_table(evaluations),
        summary=_summary(steps),
        last_step=last[0].get("step") if last else "",
        completions=[_completion(row) for row in last[:MAX_COMPLETIONS]],
        conversations=[row for row in last if "segments" in row][:MAX_COMPLETIONS],
        events=[_event(event) for event in events[-MAX_EVENTS:]],
        events_note=f"The last {MAX_EVENTS} of {len(events)}." if len(events) > MAX_EVENTS else "",
        configuration=configuration,
    )


def _rows_of_last_step(completions: Path) -> list[Row]:
    """Return the rows of the last step in completions.jsonl."""
    rows: list[Row] = []
    for row in JsonTail(completions, LAST_BYTES).read():
        if rows and rows[0].get("step") != row.get("step"):
            rows = []
        rows.append(row)
    return rows


def description_of(configuration: str) -> str:
    """Return job.description from the text of a config.toml, or an empty string."""
    found = re.search(r'^description = "(.*)"$', configuration, re.MULTILINE)
    return found[1] if found else ""


def _headline(configuration: str, steps: list[Row]) -> str:
    written = "written " + time.strftime("%Y-%m-%d %H:%M:%S")
    return " · ".join(filter(None, (description_of(configuration), f"{len(steps)} steps", written)))


def _ending(events: list[Row]) -> tuple[str, str]:
    """Return a style (good, bad or open) and a line on how the newest launch ended, and what it was made with."""
    told = [event for event in events if event.get("kind") in ("run_started", "run_ended")]
    started = next((event for event in reversed(told) if event["kind"] == "run_started"), None)
    if started is None:
        return "", ""
    made = ", ".join(filter(None, [str(started.get("program", "")), str(started.get("commit", ""))[:12]]))
    about = f"started {_moment(started)} on {started.get('host')} ({made}, torch {started.get('torch')})"
    if told[-1] is started:
        return "open", f"No end is recorded: the run goes on, or it was killed. It was {about}."
    code, reason = told[-1].get("code"), told[-1].get("reason")
    text = f"Ended {_moment(told[-1])} after version {told[-1].get('version')} with exit code {code}: {reason}"
    return "bad" if code else "good", f"{text.rstrip('.')}. It was {about}."


def _moment(event: Row) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.get("time", 0)))


def _cards(steps: list[Row], evaluations: list[Row]) -> list[tuple[str, str]]:
    """Return (value, description) pairs."""
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


def _weight_sync(actors: dict[str, dict[str, float]]) -> tuple[list[str], Lines]:
    """Per actor: the number of versions by outcome, means over applied versions, and evictions by phase."""
    columns = [column for column in _SYNC_COLUMNS if any(column[1] in figures for figures in actors.values())]
    lines: Lines = []
    for actor, figures in actors.items():
        values = [figures[name] * unit if name in figures else None for _, name, unit in columns]
        phases = [(name.removeprefix("evicted_in/"), figures[name]) for name in figures if "evicted_in/" in name]
        lines.append([actor, *values, ", ".join(f"{number(count)} in {phase}" for phase, count in phases)])
    return ["actor", *(heading for heading, _, _ in columns), "evictions"], lines


def evaluation_table(evaluations: list[Row]) -> tuple[list[str], Lines]:
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


def _summary(steps: list[Row]) -> Lines:
    lines: Lines = []
    for name in dict.fromkeys(name for row in steps for name in row if name not in ("step", "time")):
        values = [row[name] for row in steps if row.get(name) is not None]
        if values:
            lines.append([name, values[0], values[-1], sum(values) / len(values), min(values), max(values)])
    return lines


def _completion(row: Row) -> list[Any]:
    versions = ", ".join(str(span["version"]) for span in row["versions"])
    return [row["prompt"], row["completion"], row["reward"], row["advantage"], versions]


def _event(event: Row) -> list[Any]:
    details = "  ".join(f"{name}={value}" for name, value in event.items() if name not in ("time", "kind"))
    return [_moment(event), str(event.get("kind")), details]


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def listen(port: int, option: str) -> socket.socket:
    """Return a socket listening on this machine only; port 0 takes a free one. Raises UserError naming the option."""
    try:
        return listen_at(HOST, port)
    except (OSError, OverflowError) as error:
        raise UserError(f"{option} = {port}: cannot listen on {HOST}:{port} ({error}); choose another port") from error


def url_of(listener: socket.socket, token: str) -> str:
    return f"http://{HOST}:{listener.getsockname()[1]}/?token={token}"


class LivePage:
    """The process of the web server during a run."""

    def __init__(self, run_dir: Path, port: int, must_start: bool = True):
        """Raises UserError if the port is taken; with must_start = False, `describe_end` says so instead."""
        self._process: subprocess.Popen[bytes] | None = None
        self._problem = ""
        try:
            self._start(run_dir, port)
        except (UserError, OSError) as error:
            if must_start:
                raise
            self._problem = str(error)

    def _start(self, run_dir: Path, port: int) -> None:
        token = secrets.token_urlsafe(24)
        self._log_file = log_file = run_dir / "logs" / "live.log"
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with listen(port, "metrics.live_port") as listener:
            arguments = [str(run_dir), str(listener.fileno()), str(os.getpid())]
            command = [sys.executable, "-m", "torchtitan.report.page", *arguments]
            environment = child_environment(threads=1, **{TOKEN_VARIABLE: token})
            self._process = start_beside(command, environment, log_file, [listener.fileno()])
            # Not to the log: others may read that file.
            print(f"live page: {url_of(listener, token)}", file=sys.stderr, flush=True)

    def describe_end(self) -> str:
        """Return why it shows nothing any more; empty while it works."""
        code = None if self._process is None else self._process.poll()
        return self._problem if code is None else f"its process ended with code {code}, see {self._log_file}"

    def close(self) -> None:
        """End the process. May be called twice."""
        if self._process is not None:
            end_process(self._process, STOP_SECONDS)


def serve_run(run_dir: Path, port: int) -> None:
    """Serve a run's page in the foreground. Raises UserError if the folder does not exist or the port is taken."""
    run_dir, token = run_folder(run_dir), secrets.token_urlsafe(24)
    listener = listen(port, "--port")
    print(url_of(listener, token), flush=True)
    asyncio.run(serve(run_dir, listener, token))


async def serve(run_dir: Path, listener: socket.socket, token: str) -> None:
    """Serve the page until SIGTERM or SIGINT."""
    stopped = asyncio.Event()
    for ending in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(ending, stopped.set)
    runner = web.AppRunner(LiveServer(run_dir, token).app(), access_log=None, shutdown_timeout=STOP_SECONDS / 2)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    await stopped.wait()
    await runner.cleanup()


class LiveServer:
    """Answers from the files of one run folder."""

    def __init__(self, run_dir: Path, token: str):
        self.run_dir, self._token = run_dir, token
        self._page = _resource("live.html").replace("{{style}}", _resource("style.css"))
        self._drawing = asyncio.Lock()
        self._report, self._drawn_at = "", -REPORT_SECONDS
        self._completion_index, self._reading = CompletionIndex(run_dir / COMPLETIONS_FILE), asyncio.Lock()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.add_routes([
            web.get("/", self._index),
            web.get("/run", self._run),
            web.get("/lines/{name}", self._lines),
            web.get("/completions", self._completions),
            web.get("/completion", self._completion),
            web.get("/metrics", self._metrics),
            web.get("/report", self._draw_report),
        ])  # fmt: skip
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.headers.get("Host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name not in HOST_NAMES:
            return web.Response(status=403, text="this address is not one of this machine's own\n")
        if not has_token(request, self._token, in_query=True):
            return web.Response(
                status=401, text="the token is missing or wrong: take the address that the run printed\n"
            )
        response = await handler(request)
        response.headers.setdefault("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        response.headers["Cache-Control"] = "no-store"
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    async def _index(self, request: web.Request) -> web.Response:
        nonce = secrets.token_urlsafe(12)
        policy = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
        policy += "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        page = self._page.replace("{{nonce}}", nonce)
        return web.Response(text=page, content_type="text/html", headers={"Content-Security-Policy": policy})

    async def _run(self, request: web.Request) -> web.Response:
        """Return the run's name and description, the plots to draw, and the actors' states after the last step."""
        configuration, actors = self.run_dir / "config.toml", self.run_dir / ACTORS_FILE
        about: dict[str, Any] = {"name": self.run_dir.resolve().name, "actors": {}}
        about["description"] = description_of(configuration.read_text()) if configuration.is_file() else ""
        if actors.is_file():
            about |= json.loads(actors.read_text())
        about["plots"], about["colors"] = [dataclasses.asdict(plot) for plot in PLOTS], COLORS
        return web.json_response(about)

    async def _lines(self, request: web.Request) -> web.Response:
        """Return whole lines of a file: those after offset `after`, or without it the last ones.

        The answer is {"file": inode, "begin": offset, "end": offset, "lines": [...]}. If the inode differs from the
        given `file` (a resumed run has truncated and replaced it), `after` is taken as the start of the file.
        """
        path = self.run_dir / FILES.get(request.match_info["name"], "")
        try:
            known, after = (int(request.query.get(name, -1)) for name in ("file", "after"))
        except ValueError:
            raise web.HTTPBadRequest(text="file and after are whole numbers\n") from None
        if request.match_info["name"] not in FILES or not path.is_file():
            return web.json_response({"file": 0, "begin": 0, "end": 0, "lines": []})
        status = path.stat()
        if after >= 0:
            begin = after if known == status.st_ino and after <= status.st_size else 0
        else:
            begin = line_start(path, status.st_size - CHUNK_BYTES)
        lines, end = read_lines(path, begin)
        return web.json_response({"file": status.st_ino, "begin": begin, "end": end, "lines": lines})

    async def _completions(self, request: web.Request) -> web.Response:
        """Return a page of the selected completions in short form: see CompletionIndex.page and Selection."""
        try:
            offset, limit = (int(request.query.get(name, 0)) for name in ("offset", "limit"))
            selection = Selection.of(request.query)
        except ValueError as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from None
        async with self._reading:
            known = await asyncio.to_thread(self._completion_index.update, INDEX_SECONDS)
            page = await asyncio.to_thread(self._completion_index.page, selection, max(0, offset), limit)
        return web.json_response(page | {"known": known})

    async def _completion(self, request: web.Request) -> web.Response:
        """Return one completion whole; `at`: its `begin`. 404 where the file has been replaced since."""
        async with self._reading:
            row = await asyncio.to_thread(self._completion_index.row, request.query.get("at", ""))
        if row is None:
            raise web.HTTPNotFound(text="this completion is not there any more\n")
        return web.json_response(row)

    async def _metrics(self, request: web.Request) -> web.Response:
        """Return the newest value of every metric, and the actors' states, in Prometheus' text format."""
        text = exposition(_newest(self.run_dir))
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def _draw_report(self, request: web.Request) -> web.Response:
        async with self._drawing:
            if time.monotonic() - self._drawn_at > REPORT_SECONDS:
                self._report = await asyncio.to_thread(report_page, self.run_dir)
                self._drawn_at = time.monotonic()
        return web.Response(text=self._report, content_type="text/html")


def _newest(run_dir: Path) -> list[Figure]:
    newest: Row = {}
    for row in JsonTail(run_dir / METRICS_FILE, CHUNK_BYTES).read():
        newest |= {name: value for name, value in row.items() if value is not None}
    figures, file = numbers_in(newest, "torchtitan_"), run_dir / ACTORS_FILE
    for actor, told in (json.loads(file.read_text())["actors"] if file.is_file() else {}).items():
        state, _, version = told.partition(" v")
        known = float(version) if version.isdigit() else -1.0
        figures.append(Figure("torchtitan_actor_version", known, {"actor": actor, "state": state}))
    return figures


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def main(run_dir: str, descriptor: str, parent: str) -> None:
    """Run the server process; `descriptor` is the listening socket's, and `parent` is the process id of the run."""
    # The run has priority over its page.
    os.nice(10)
    end_with_parent(int(parent))
    asyncio.run(serve(Path(run_dir), socket.socket(fileno=int(descriptor)), os.environ.pop(TOKEN_VARIABLE)))


if __name__ == "__main__":
    main(*sys.argv[1:])
