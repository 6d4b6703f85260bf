"""A process of ours that is asked over a socket, whose other end it inherits."""

from __future__ import annotations

import socket
import subprocess
import sys

from torchtitan.utils.child_process import child_environment


class SocketChild:
    """`python -m MODULE ARGUMENTS… DESCRIPTOR`, started when it is needed. One thread uses it; any may kill it."""

    def __init__(self, module: str, *arguments: str):
        self._module, self._arguments = module, arguments
        self.process: subprocess.Popen[bytes] | None = None
        self.connection: socket.socket | None = None
        """Our end, while there is a process"""

    def start(self) -> socket.socket:
        """Start the process, in place of an earlier one, and return our end. Raises OSError."""
        self.close()
        parent_end, child_end = socket.socketpair()
        self.connection = parent_end
        with child_end:
            descriptor = child_end.fileno()
            command = [sys.executable, "-m", self._module, *self._arguments, str(descriptor)]
            # A session of its own: signals to our process group are ours.
            self.process = subprocess.Popen(
                command, env=child_environment(threads=1), pass_fds=[descriptor],
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        return parent_end

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, or None if the process has not ended within so many seconds, or never began."""
        if self.process is None:
            return None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Kill the process; whoever waits for its answer hears that it has ended."""
        if (process := self.process) is not None:
            process.kill()

    def close(self) -> None:
        """End the process, and forget it."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
