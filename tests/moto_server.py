"""An S3 server on this machine, for tests and benchmarks of object stores."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator

from tests.patience import until


@contextlib.contextmanager
def moto_server() -> Iterator[str]:
    """moto's S3 server, while the block runs; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def answers() -> bool:
        with socket.socket() as asking:
            return asking.connect_ex(("127.0.0.1", port)) == 0

    try:
        until(answers, why=lambda: "moto's server does not start")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()
