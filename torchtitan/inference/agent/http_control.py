"""Blocking JSON calls to the admin routes of an engine's server."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any
from urllib.parse import urlsplit

from torchtitan.inference.agent.control import EngineError, EngineNotListening

LONGEST_ANSWER = 64 * 1024 * 1024
LONGEST_REASON = 500
BLOCK = 1 << 20


class AdminClient:
    """Calls the server at `url`, authorised by `token` where it is not empty. One connection per call, so that threads
    may share it and nothing is lost with an engine that was restarted."""

    def __init__(self, url: str, token: str):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not the address of a server, such as http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self._class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port, self._prefix = parts.hostname, parts.port, parts.path.rstrip("/")
        self._token = token

    def call(self, method: str, path: str, timeout_s: float, body: dict[str, Any] | None = None) -> Any:
        """The answer's JSON, or its text where it is none. Raises EngineError: no answer in time, or not status 200."""
        status, text = self.exchange(method, path, timeout_s, body)
        if status != 200:
            raise EngineError(f"{path} answered {status}: {text[:LONGEST_REASON]}")
        try:
            return json.loads(text) if text else None
        except ValueError:
            return text

    def exchange(self, method: str, path: str, timeout_s: float, body: dict[str, Any] | None = None) -> tuple[int, str]:
        """(status, text) of the answer. Raises EngineError where none came within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        connection = self._class(self._host, self._port, timeout=timeout_s)
        try:
            connection.request(method, self._prefix + path, data, headers)
            response = connection.getresponse()
            text = bytearray()
            while block := response.read1(BLOCK):
                text += block
                if time.monotonic() > deadline:
                    raise TimeoutError
                if len(text) > LONGEST_ANSWER:
                    raise EngineError(f"{path} answers with more than {LONGEST_ANSWER} bytes")
            return response.status, text.decode(errors="replace")
        except TimeoutError as error:
            raise EngineError(f"{path} gave no answer within {timeout_s:g} s") from error
        except ConnectionRefusedError as error:
            raise EngineNotListening(f"{path}: nothing listens on {self.url}") from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"{path}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
