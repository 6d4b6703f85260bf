"""Addresses of engines in Slurm's notation of nodes: `slurm:NODES:PORT` stands for those of all actors on these
nodes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

SLURM = "slurm:"

# More is a slip of the pen, and would fill the memory.
MAX_SERVERS = 4096

SLURM_FORM = "slurm:NODES:PORT such as slurm:gpu[01-04,7]:8000 or slurm:gpu1,gpu2:8000-8003"


def expand_servers(servers: Sequence[str]) -> list[str]:
    """Every `slurm:` entry replaced by its URLs, node by node; what is malformed stays as it is."""
    expanded: list[str] = []
    for server in servers:
        try:
            expanded += slurm_urls(server) if server.startswith(SLURM) else [server]
        except ValueError:
            expanded.append(server)
    return expanded


def slurm_urls(server: str) -> list[str]:
    """http://node:port of every node and port of a `slurm:` entry. Raises ValueError where it is malformed."""
    match = re.fullmatch(r"slurm:(.+):(\d{1,5})(?:-(\d{1,5}))?", server)
    if match is None:
        raise ValueError(f"must be {SLURM_FORM}")
    first = int(match[2])
    ports = range(first, int(match[3] or first) + 1)
    if not ports or not 0 < first <= ports[-1] < 65536:
        raise ValueError(f"{match[2]} to {match[3]} is not a range of ports" if match[3] else f"{first} is not a port")
    urls = [f"http://{node}:{port}" for node in itertools.islice(nodes(match[1]), MAX_SERVERS + 1) for port in ports]
    if len(urls) > MAX_SERVERS:
        raise ValueError(f"more than {MAX_SERVERS} servers")
    return urls


def nodes(expression: str) -> Iterator[str]:
    """The hosts of Slurm's notation (SLURM_JOB_NODELIST): `a[01-03,7]-x[1-2],b`. Raises ValueError for other text."""
    # Commas inside of brackets do not separate hosts.
    for host in re.split(r",(?![^\[]*\])", expression):
        parts = re.split(r"\[([^\[\]]*)\]", host)
        if not re.fullmatch(r"[A-Za-z0-9.-]*", "".join(parts[::2])) or not host:
            raise ValueError(f"{host!r} is not a node: must be {SLURM_FORM}")
        # Every second part stood in brackets.
        choices = [_numbers(part) if index % 2 else [part] for index, part in enumerate(parts)]
        yield from map("".join, itertools.product(*choices))


def _numbers(text: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        if match is None:
            raise ValueError(f"[{text}] is not a list of numbers: must be {SLURM_FORM}")
        first, last = match[1], match[2] or match[1]
        count = int(last) - int(first) + 1
        if not 0 < count <= MAX_SERVERS:
            raise ValueError(f"[{text}]: {first} to {last} is not a range of 1 to {MAX_SERVERS} nodes")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found
