"""A server of this machine that answers as the Hugging Face Hub does for what huggingface_hub asks of it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class HubServer:
    """Serves the files of one folder as the repository `name`, and may refuse."""

    folder: Path
    name: str = "tiny/guess"
    commit: str = "a" * 40
    url: str = ""
    status: int = 200
    """Anything else is the answer to every request"""
    token: str = ""
    """Where given, requests need it"""
    cut: str = ""
    """The file of which only the first half is sent"""
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """(method, path, range) of every request"""

    def files(self) -> dict[str, bytes]:
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in paths}

    def downloaded(self) -> list[str]:
        """The files that were asked for, in order of their names."""
        return sorted(
            {path.rpartition(f"/resolve/{self.commit}/")[2] for _, path, _ in self.requests if "/resolve/" in path}
        )


@contextlib.contextmanager
def hub_of(folder: Path) -> Iterator[HubServer]:
    """Serve a folder until the end of the `with`."""
    hub = HubServer(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            asked = self.headers.get("Range", "")
            hub.requests.append((self.command, path, asked))
            if hub.status != 200:
                self.send(hub.status, b"{}", {}, with_body)
            elif hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                self.send(401, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"}, with_body)
            elif path in (f"/api/models/{hub.name}", f"/api/models/{hub.name}/revision/main"):
                self.send_json({"id": hub.name, "sha": hub.commit, "siblings": []}, with_body)
            elif path == f"/api/models/{hub.name}/tree/{hub.commit}":
                self.send_json([self.entry(name, data) for name, data in hub.files().items()], with_body)
            elif path.startswith(f"/{hub.name}/resolve/{hub.commit}/"):
                self.send_file(path.rpartition(f"{hub.commit}/")[2], asked, with_body)
            elif path.startswith(f"/api/models/{hub.name}/"):
                self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, with_body)
            else:
                self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)

        def entry(self, name: str, data: bytes) -> dict[str, Any]:
            return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

        def send_file(self, name: str, asked: str, with_body: bool) -> None:
            data = hub.files()[name]
            facts = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": hub.commit}
            start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
            if start:
                facts["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            sent = data[start:]
            self.send_response(206 if start else 200)
            for key, value in {**facts, "Content-Length": str(len(sent))}.items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(sent[: len(sent) // 2] if name == hub.cut else sent)

        def send_json(self, value: Any, with_body: bool) -> None:
            self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, with_body)

        def send(self, status: int, data: bytes, headers: dict[str, str], with_body: bool) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(data)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
