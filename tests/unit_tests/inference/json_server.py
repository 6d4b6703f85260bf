"""A server in this process that answers with JSON, for clients under test."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.patience import PATIENCE_S

Answer = tuple[int, Any]
"""(status, body)"""


@contextlib.contextmanager
def serving(
    post: Callable[[str, bytes], Answer], get: Callable[[str], Answer] = lambda path: (404, {})
) -> Iterator[str]:
    """Its URL. post(path, body) and get(path) give the answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(*get(self.path))

        def do_POST(self) -> None:
            self.reply(*post(self.path, self.rfile.read(int(self.headers["Content-Length"] or 0))))

        def reply(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            # A thread that is left behind would poll a closed socket for as long as the tests run.
            http.shutdown()
            thread.join(PATIENCE_S)
