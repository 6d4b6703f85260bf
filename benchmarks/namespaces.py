"""Network namespaces behind slow links, for benchmarks: one bridge, one veth pair per peer, each shaped by tbf.

Needs root and iproute2. Everything disappears with the block, also after Ctrl-C or SIGTERM; what a killed run left
behind is removed by the next one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from types import FrameType

_PREFIX = "wsync"
_SUBNET = "10.213.77"


class Namespaces:
    """Names of peers -> their addresses; `prefix(name)` runs a command there."""

    def __init__(self, peers: Sequence[str], megabits: float):
        self._peers, self._megabits = list(peers), megabits
        self.addresses = {name: f"{_SUBNET}.{index + 1}" for index, name in enumerate(peers)}

    def prefix(self, peer: str) -> list[str]:
        """In front of a command, to run it in this peer's namespace."""
        return ["ip", "netns", "exec", self._name(peer)]

    def _name(self, peer: str) -> str:
        return f"{_PREFIX}-{os.getpid()}-{peer}"

    def create(self) -> None:
        # The bridge is in a namespace of its own too, so that nothing of the machine's network is touched.
        middle = self._name("bridge")
        _ip("netns", "add", middle)
        _ip("-n", middle, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", middle, "link", "set", "bridge0", "up")
        for index, peer in enumerate(self._peers):
            name = self._name(peer)
            _ip("netns", "add", name)
            _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"port{index}", "netns", middle)
            _ip("-n", middle, "link", "set", f"port{index}", "master", "bridge0", "up")
            _ip("-n", name, "address", "add", f"{self.addresses[peer]}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            rate = f"{self._megabits:g}mbit"
            shape = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            _run(["tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *shape])

    def remove(self) -> None:
        """Processes in them have to be gone before."""
        for name in _existing():
            if name.startswith(f"{_PREFIX}-{os.getpid()}-"):
                _ip("netns", "delete", name)


@contextlib.contextmanager
def slow_network(peers: Sequence[str], megabits: float) -> Iterator[Namespaces]:
    """Namespaces for this block. Ends the benchmark with a message where they cannot be made."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        reason = f"{' and '.join(missing)} not found (iproute2)" if missing else "this is not root"
        raise SystemExit(
            f"this benchmark makes network namespaces with a slow link, which needs root and iproute2: {reason}"
        )
    _remove_left_behind()
    network = Namespaces(peers, megabits)

    def interrupted(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, interrupted) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        network.create()
        yield network
    finally:
        network.remove()
        for number, handler in before.items():
            signal.signal(number, handler)


def _remove_left_behind() -> None:
    for name in _existing():
        found = re.fullmatch(rf"{_PREFIX}-(\d+)-\w+", name)
        if found and not os.path.exists(f"/proc/{found[1]}"):
            _ip("netns", "delete", name)


def _existing() -> list[str]:
    return [line.split()[0] for line in _run(["ip", "netns", "list"]).splitlines() if line.strip()]


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise SystemExit(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
