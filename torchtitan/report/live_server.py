"""A small web server shows the page of a run, during the run or afterwards, and searches its completions.

The server only reads, and a run starts it as a separate process, so that no request can delay a step. It listens on
127.0.0.1, requires its token, and accepts only host names of this machine, against DNS rebinding by foreign pages.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from torchtitan.errors import UserError
from torchtitan.report.browser import CompletionIndex, Selection
from torchtitan.report.metrics import ACTORS_FILE, COMPLETIONS_FILE, METRICS_FILE, run_folder
from torchtitan.report.page import NO_DATA, content_policy, page
from torchtitan.report.page_data import RunReader
from torchtitan.utils.addresses import listen_at
from torchtitan.utils.child_process import child_environment, end_process, end_with_parent, start_beside
from torchtitan.utils.http_site import has_token
from torchtitan.utils.json_lines import CHUNK_BYTES, JsonTail
from torchtitan.utils.prometheus import CONTENT_TYPE, Figure, exposition, numbers_in

HOST = "127.0.0.1"
HOST_NAMES = ("127.0.0.1", "localhost", "[::1]")
TOKEN_VARIABLE = "TORCHTITAN_LIVE_TOKEN"
STOP_SECONDS = 5.0
# Requests within this interval get the data that were read before.
DATA_SECONDS = 1.0
# The index of 100,000 completions takes seconds, so a request reads on for so long and answers from what is known.
INDEX_SECONDS = 0.5


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
            command = [sys.executable, "-m", "torchtitan.report.live_server", *arguments]
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
        self._reader, self._reading_data = RunReader(run_dir), asyncio.Lock()
        self._data, self._digest, self._read_at = NO_DATA, "", -DATA_SECONDS
        self._completion_index, self._reading = CompletionIndex(run_dir / COMPLETIONS_FILE), asyncio.Lock()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.add_routes([
            web.get("/", self._index),
            web.get("/data", self._get_data),
            web.get("/completions", self._completions),
            web.get("/completion", self._completion),
            web.get("/metrics", self._metrics),
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
        response.headers["Content-Security-Policy"] = f"{content_policy()}; frame-ancestors 'none'"
        response.headers["Cache-Control"] = "no-store"
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    async def _index(self, request: web.Request) -> web.Response:
        return web.Response(text=page(NO_DATA), content_type="text/html")

    async def _get_data(self, request: web.Request) -> web.Response:
        """Return {"digest": …, "data": …} as RunReader reads them, or 204 if `known` is still their digest."""
        async with self._reading_data:
            if time.monotonic() - self._read_at > DATA_SECONDS:
                self._data = json.dumps(await asyncio.to_thread(self._reader.read))
                self._digest = hashlib.sha256(self._data.encode()).hexdigest()[:16]
                self._read_at = time.monotonic()
        if request.query.get("known") == self._digest:
            return web.Response(status=204)
        return web.Response(text=f'{{"digest":"{self._digest}","data":{self._data}}}', content_type="application/json")

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


def _newest(run_dir: Path) -> list[Figure]:
    newest: dict[str, Any] = {}
    for row in JsonTail(run_dir / METRICS_FILE, CHUNK_BYTES).read():
        newest |= {name: value for name, value in row.items() if value is not None}
    figures, file = numbers_in(newest, "torchtitan_"), run_dir / ACTORS_FILE
    for actor, description in (json.loads(file.read_text())["actors"] if file.is_file() else {}).items():
        state, _, version = description.partition(" v")
        known = float(version) if version.isdigit() else -1.0
        figures.append(Figure("torchtitan_actor_version", known, {"actor": actor, "state": state}))
    return figures


def main(run_dir: str, descriptor: str, parent: str) -> None:
    """Run the server process; `descriptor` is the listening socket's, and `parent` is the process id of the run."""
    # The run has priority over its page.
    os.nice(10)
    end_with_parent(int(parent))
    asyncio.run(serve(Path(run_dir), socket.socket(fileno=int(descriptor)), os.environ.pop(TOKEN_VARIABLE)))


if __name__ == "__main__":
    main(*sys.argv[1:])
