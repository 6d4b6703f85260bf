"""Network namespaces behind slow links, for benchmarks: one bridge, one veth pair per peer, each shaped by tbf, or by
netem where there is to be a delay and the kernel has it.

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
from pathlib import Path
from types import FrameType

_PREFIX = "wsync"
_SUBNET = "10.213.77"
# `ip netns exec` shows what is in such a folder as /etc.
_FILES = Path("/etc/netns")


class Namespaces:
    """Names of peers -> their addresses; `prefix(name)` runs a command there."""

    def __init__(self, peers: Sequence[str], megabits: float, delay_ms: float):
        self._peers, self._megabits, self.delay_ms = list(peers), megabits, delay_ms
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
            self._shape(["tc", "-n", name, "qdisc", "add", "dev", "eth0", "root"])

    def _shape(self, command: list[str]) -> None:
        rate = ["rate", f"{self._megabits:g}mbit"]
        if self.delay_ms:
            with contextlib.suppress(SystemExit):
                _run([*command, "netem", "delay", f"{self.delay_ms:g}ms", *rate])
                return
            self.delay_ms = 0.0  # this kernel has no netem
        _run([*command, "tbf", *rate, "burst", "256kb", "latency", "50ms"])

    def close_to(self, peer: str, source: str, listens: str = "", dials: str = "") -> None:
        """A firewall: what comes to `peer` from `source` is dropped, but for TCP to these ports of the peer's, and
        answers from those of the source's ("7000" or "7000-7003")."""
        # By rules of routing, which need no packet filter. Answering ARP takes a route, so not all can be dropped.
        rule = ["-n", self._name(peer), "rule", "add", "iif", "eth0", "from", self.addresses[source]]
        for kind, ports in (("dport", listens), ("sport", dials)):
            if ports:
                _ip(*rule, "pref", "10", "ipproto", "tcp", kind, ports, "lookup", "local")
        for protocol in ("tcp", "udp", "icmp"):
            _ip(*rule, "pref", "20", "ipproto", protocol, "blackhole")
        if "30:" not in _run(["ip", "-n", self._name(peer), "rule", "list"]):
            _ip("-n", self._name(peer), "rule", "add", "pref", "30", "lookup", "local")
            _ip("-n", self._name(peer), "rule", "delete", "pref", "0")

    def name_hosts(self, peer: str, addresses: dict[str, str]) -> None:
        """What the peer's /etc/hosts says, for commands that are started from now on."""
        file = _FILES / self._name(peer) / "hosts"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{address} {name}\n" for name, address in addresses.items()))

    def remove(self) -> None:
        """Processes in them have to be gone before."""
        for name in _existing():
            if name.startswith(f"{_PREFIX}-{os.getpid()}-"):
                _delete(name)


@contextlib.contextmanager
def slow_network(peers: Sequence[str], megabits: float, delay_ms: float = 0.0) -> Iterator[Namespaces]:
    """Namespaces for this block. Ends the benchmark with a message where they cannot be made. delay_ms: of what a peer
    sends; 0 afterwards where the kernel cannot."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        reason = f"{' and '.join(missing)} not found (iproute2)" if missing else "this is not root"
        raise SystemExit(
            f"this benchmark makes network namespaces with a slow link, which needs root and iproute2: {reason}"
        )
    _remove_left_behind()
    network = Namespaces(peers, megabits, delay_ms)

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
            _delete(name)


def _delete(name: str) -> None:
    _ip("netns", "delete", name)
    shutil.rmtree(_FILES / name, ignore_errors=True)


def _existing() -> list[str]:
    return [line.split()[0] for line in _run(["ip", "netns", "list"]).splitlines() if line.strip()]


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise SystemExit(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
