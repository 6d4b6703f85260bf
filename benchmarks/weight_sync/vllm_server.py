"""vLLM servers for the benchmarks: with our agent, or stock; and clients that keep them busy."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from benchmarks.common import REPOSITORY
from benchmarks.weight_sync.job import EPOCH
from torchtitan.errors import UserError
from torchtitan.inference.engines.sidecar.foreign_engine import AdminClient, EngineError
from torchtitan.inference.engines.sidecar.sidecar_process import find_python
from torchtitan.weight_sync.wire.handshake import ACTOR, role_key

TOKEN_ENV = "TOKEN"
START_SECONDS = 600.0
CALL_SECONDS = 60.0


def vllm_python() -> str:
    """The Python of vLLM's environment. Ends the benchmark where there is none."""
    try:
        return find_python("vllm", "")
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


def pin_tree(root: psutil.Process, *cores: int) -> None:
    """A process and all that it started, with all their threads, to these cores."""
    for process in (root, *root.children(recursive=True)):
        for thread in process.threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, cores)


class Process:
    """A server in a group of its own, which all ends with close(), or with this process."""

    def __init__(self, command: Sequence[str], folder: Path, name: str):
        self.token, self.log = secrets.token_urlsafe(12), folder / f"{name}.log"
        self._port_file = folder / f"{name}.port"
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), TOKEN_ENV: self.token}
        # All of it is going to be killed, which leaves its sockets where they are.
        environment.setdefault("VLLM_RPC_BASE_PATH", str(folder))
        end = command.index("--") if "--" in command else len(command)
        options = ["--port-file", str(self._port_file), "--parent-pid", str(os.getpid())]
        whole = [*command[:end], *options, *command[end:]]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                whole, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=REPOSITORY,
                start_new_session=True,
            )  # fmt: skip

    def wait(self) -> str:
        """Its URL once it answers. Ends the benchmark when it does not."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(FileNotFoundError, EngineError):
                url = f"http://127.0.0.1:{int(self._port_file.read_text())}"
                AdminClient(url, self.token).call("GET", "/health", CALL_SECONDS)
                return url
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self.log} ends with: {self.log.read_text()[-2000:]}")
            time.sleep(0.2)

    def pin(self, *cores: int) -> None:
        """All of its processes to these cores."""
        pin_tree(psutil.Process(self.process.pid), *cores)

    def close(self) -> None:
        """End it and all that it started."""
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.process.wait()


class VLLMActor:
    """A vLLM server with its agent, as a run has them. options: of the agent's command line."""

    def __init__(self, folder: Path, name: str, model: Path, dtype: str, options: Sequence[str] = ()):
        self.name = name
        self._process = Process(
            [
                sys.executable, "-m", "torchtitan.inference.engines.sidecar", "--engine", "vllm", "--route", "direct",
                "--model", str(model), "--dtype", dtype, "--name", name, "--token-env", TOKEN_ENV,
                "--log-file", str(folder / f"{name}.engine.log"), *options,
            ],
            folder, name,
        )  # fmt: skip
        self.token = self._process.token

    def join(self, place: Mapping[str, str]) -> None:
        """Wait until it serves, and have it receive the weights of the job at `place`."""
        agent = AdminClient(self._process.wait(), self.token)
        key = role_key(place["token"], ACTOR, self.name)
        body = {"registry": place["registry"], "actor": self.name, "epoch": EPOCH, "key": key}
        agent.call("POST", "/weights/connect", CALL_SECONDS, body)
        health: dict[str, Any] = agent.call("GET", "/health", CALL_SECONDS)
        self.engine_url: str = health["engine"]["url"]
        children = psutil.Process(self._process.process.pid).children(recursive=True)
        self._workers = [child for child in children if "VLLM::Worker" in " ".join(child.cmdline())]

    def pin(self, *cores: int) -> None:
        """All of its processes to these cores."""
        self._process.pin(*cores)

    def send_signal(self, number: int) -> None:
        """To the process that holds the weights."""
        for worker in self._workers:
            worker.send_signal(signal.Signals(number))

    def close(self) -> None:
        self._process.close()


class Streams:
    """Requests that generate without end; `arrivals` has the time (time.time()) of every token that came."""

    def __init__(self, url: str, token: str, count: int, tokens: int = 900):
        self.arrivals: list[float] = []
        self.failure: BaseException | None = None
        self._place, self._token, self._tokens = urlsplit(url), token, tokens
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def wait_for_tokens(self, count: int, seconds: float = CALL_SECONDS) -> None:
        """Until so many more have come. Ends the benchmark when they do not."""
        target, deadline = len(self.arrivals) + count, time.monotonic() + seconds
        while len(self.arrivals) < target:
            if self.failure is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server stopped generating: {self.failure}")
            time.sleep(0.005)

    def longest_gap(self, start: float, end: float) -> float:
        """Seconds of the longest time without any token that begins or ends between two times."""
        arrivals = sorted(self.arrivals)
        gaps = [b - a for a, b in itertools.pairwise(arrivals) if b >= start and a <= end]
        return max(gaps)

    def close(self) -> None:
        """Hang up."""
        self._ended.set()
        for thread in self._threads:
            thread.join(CALL_SECONDS)

    def _run(self, number: int) -> None:
        try:
            while not self._ended.is_set():
                self._request(number)
        except BaseException as error:
            if not self._ended.is_set():
                self.failure = error

    def _request(self, number: int) -> None:
        sampling = {"max_tokens": self._tokens, "temperature": 1.0, "ignore_eos": True, "detokenize": False}
        body = {"token_ids": [number + 2] * 8, "sampling_params": sampling, "stream": True}
        connection = http.client.HTTPConnection(self._place.hostname or "", self._place.port, timeout=CALL_SECONDS)
        try:
            headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
            connection.request("POST", "/inference/v1/generate", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(response.read(500).decode())
            while not self._ended.is_set():
                line = response.readline()
                if not line:
                    return
                if line.startswith(b"data: {"):
                    self.arrivals.append(time.time())
        finally:
            connection.close()
