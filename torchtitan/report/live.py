"""The live page: a small web server that shows a run from the files in its folder, while it goes on or afterwards.

It only reads, and a run starts it as a process of its own: no request can hold up a step. It listens on 127.0.0.1 and
answers those who know its token, under a host name of this machine only (a foreign page must not reach it by a name
of its own that it lets point here).
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import json
import logging
import os
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

from aiohttp import web

from torchtitan.errors import UserError
from torchtitan.report.html import description_of, report_page
from torchtitan.report.metrics import ACTORS_FILE, COMPLETIONS_FILE, METRICS_FILE, run_folder
from torchtitan.report.plots import COLORS, PLOTS
from torchtitan.utils.child_process import child_environment, end_with_parent
from torchtitan.utils.json_lines import CHUNK_BYTES, line_start, read_lines

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
HOST_NAMES = ("127.0.0.1", "localhost", "[::1]")
FILES = {"metrics": METRICS_FILE, "completions": COMPLETIONS_FILE, "events": "events.jsonl"}
TOKEN_VARIABLE = "TORCHTITAN_LIVE_TOKEN"
STOP_SECONDS = 5.0
# The whole report takes seconds of a processor: however often it is asked for, it is drawn this often at most.
REPORT_SECONDS = 10.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def listen(port: int, option: str) -> socket.socket:
    """A socket that listens on this machine only; port 0 takes a free one. Raises UserError, which names the option."""
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        raise UserError(
            f"{option} = {port}: {HOST}:{port} cannot be listened on ({error.strerror}); choose another port"
        ) from error


def url_of(listener: socket.socket, token: str) -> str:
    return f"http://{HOST}:{listener.getsockname()[1]}/?token={token}"


class LivePage:
    """The server's process, as long as a run goes on."""

    def __init__(self, run_dir: Path, port: int):
        """Raises UserError where the port is taken."""
        token = secrets.token_urlsafe(24)
        log_file = run_dir / "logs" / "live.log"
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with listen(port, "metrics.live_port") as listener, log_file.open("ab") as log:
            arguments = [str(run_dir), str(listener.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "torchtitan.report.live", *arguments],
                env=child_environment(threads=1, **{TOKEN_VARIABLE: token}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
            logger.info("live page: %s", url_of(listener, token))

    def close(self) -> None:
        """End the process. May be called twice."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve_run(run_dir: Path, port: int) -> None:
    """Serve a run's page in the foreground. Raises UserError where there is no such folder, or the port is taken."""
    run_dir, token = run_folder(run_dir), secrets.token_urlsafe(24)
    listener = listen(port, "--port")
    print(url_of(listener, token), flush=True)
    asyncio.run(serve(run_dir, listener, token))


async def serve(run_dir: Path, listener: socket.socket, token: str) -> None:
    """Serve the page until SIGTERM or SIGINT."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
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

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.add_routes([
            web.get("/", self._index),
            web.get("/run", self._run),
            web.get("/lines/{name}", self._lines),
            web.get("/report", self._draw_report),
        ])  # fmt: skip
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.headers.get("Host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name not in HOST_NAMES:
            return web.Response(status=403, text="this address is not one of this machine's own\n")
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        given = bearer if scheme == "Bearer" else request.query.get("token", "")
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), self._token.encode()):
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
        """What the run is, what to plot of it, and its actors as they were after the last step."""
        configuration, actors = self.run_dir / "config.toml", self.run_dir / ACTORS_FILE
        about: dict[str, Any] = {"name": self.run_dir.resolve().name, "actors": {}}
        about["description"] = description_of(configuration.read_text()) if configuration.is_file() else ""
        if actors.is_file():
            about |= json.loads(actors.read_text())
        about["plots"], about["colors"] = [dataclasses.asdict(plot) for plot in PLOTS], COLORS
        return web.json_response(about)

    async def _lines(self, request: web.Request) -> web.Response:
        """Whole lines of a file: those behind `after`, or the last ones in front of `before` (-1: in front of the end).

        {"file": which file it is, "begin", "end": their places, "lines"}. A file that is not the given `file` any more
        (a resumed run has cut it) is told from its begin, whatever `after` is.
        """
        path = self.run_dir / FILES.get(request.match_info["name"], "")
        try:
            known, after, before = (int(request.query.get(name, -1)) for name in ("file", "after", "before"))
        except ValueError:
            raise web.HTTPBadRequest(text="file, after and before are whole numbers\n") from None
        if request.match_info["name"] not in FILES or not path.is_file():
            return web.json_response({"file": 0, "begin": 0, "end": 0, "lines": []})
        status = path.stat()
        if after >= 0:
            begin = after if known == status.st_ino and after <= status.st_size else 0
            lines, end = read_lines(path, begin)
        else:
            before = min(before, status.st_size) if before >= 0 and known == status.st_ino else status.st_size
            size = CHUNK_BYTES
            while (begin := line_start(path, before - size)) >= before > size:
                size *= 2  # the line in front is longer than that
            lines, end = read_lines(path, begin, before - begin) if begin < before else ([], before)
        return web.json_response({"file": status.st_ino, "begin": begin, "end": end, "lines": lines})

    async def _draw_report(self, request: web.Request) -> web.Response:
        async with self._drawing:
            if time.monotonic() - self._drawn_at > REPORT_SECONDS:
                self._report = await asyncio.to_thread(report_page, self.run_dir)
                self._drawn_at = time.monotonic()
        return web.Response(text=self._report, content_type="text/html")


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def main(run_dir: str, descriptor: str, parent: str) -> None:
    """The process that a run starts: its folder, the listening socket's descriptor, its process id."""
    # The page waits where the run needs the processor.
    os.nice(10)
    end_with_parent(int(parent))
    asyncio.run(serve(Path(run_dir), socket.socket(fileno=int(descriptor)), os.environ.pop(TOKEN_VARIABLE)))


if __name__ == "__main__":
    main(*sys.argv[1:])
