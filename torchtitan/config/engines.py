"""Engines in a configuration: their addresses, of which `slurm:NODES:PORT` stands for those of all actors on these
nodes, and [inference.engine_args], options of vllm or sglang that pass through. No torch here.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchtitan.config.toml import show

SCHEME = "slurm:"
# More is a slip of the pen, and would fill the memory.
MOST_SERVERS = 4096
HOW = "slurm:NODES:PORT such as slurm:gpu[01-04,7]:8000 or slurm:gpu1,gpu2:8000-8003"
PREFIX = "inference.engine_args."
# Options that a run gives the engine itself, and where to say it instead. Two values of one option would be a riddle.
OURS = {
    "model": "model.hf_assets_path",
    "model-path": "model.hf_assets_path",
    "host": "inference.host",
    "port": "inference.host, a free port is taken",
    "dtype": "inference.dtype",
    "tensor-parallel-size": "inference.tensor_parallel_size",
    "tp-size": "inference.tensor_parallel_size",
    "tp": "inference.tensor_parallel_size",
    "api-key": "nothing, the run makes up a token",
}


def expand_servers(servers: Sequence[str]) -> list[str]:
    """Every `slurm:` entry replaced by its URLs, node by node; what is malformed stays as it is."""
    expanded: list[str] = []
    for server in servers:
        try:
            expanded += slurm_urls(server) if server.startswith(SCHEME) else [server]
        except ValueError:
            expanded.append(server)
    return expanded


def slurm_urls(server: str) -> list[str]:
    """http://node:port of every node and port of a `slurm:` entry. Raises ValueError where it is malformed."""
    match = re.fullmatch(r"slurm:(.+):(\d{1,5})(?:-(\d{1,5}))?", server)
    if match is None:
        raise ValueError(f"must be {HOW}")
    first = int(match[2])
    ports = range(first, int(match[3] or first) + 1)
    if not ports or not 0 < first <= ports[-1] < 65536:
        raise ValueError(f"{match[2]} to {match[3]} are no ports" if match[3] else f"{first} is no port")
    urls = [f"http://{node}:{port}" for node in itertools.islice(nodes(match[1]), MOST_SERVERS + 1) for port in ports]
    if len(urls) > MOST_SERVERS:
        raise ValueError(f"more than {MOST_SERVERS} servers")
    return urls


def nodes(expression: str) -> Iterator[str]:
    """The hosts of Slurm's notation (SLURM_JOB_NODELIST): `a[01-03,7]-x[1-2],b`. Raises ValueError for other text."""
    # Commas inside of brackets do not separate hosts.
    for host in re.split(r",(?![^\[]*\])", expression):
        parts = re.split(r"\[([^\[\]]*)\]", host)
        if not re.fullmatch(r"[A-Za-z0-9.-]*", "".join(parts[::2])) or not host:
            raise ValueError(f"{host!r} is no node: must be {HOW}")
        choices = [[part] if index % 2 == 0 else _numbers(part) for index, part in enumerate(parts)]
        yield from map("".join, itertools.product(*choices))


def _numbers(text: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        if match is None:
            raise ValueError(f"[{text}] is no list of numbers: must be {HOW}")
        first, last = match[1], match[2] or match[1]
        count = int(last) - int(first) + 1
        if not 0 < count <= MOST_SERVERS:
            raise ValueError(f"[{text}]: {first} to {last} is no range, or one of more than {MOST_SERVERS}")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def option_name(key: str) -> str:
    """A key as the engine's option is spelled, without its hyphens: max_model_len and max-model-len are the same."""
    head, dot, rest = key.partition(".")
    return head.replace("_", "-") + dot + rest


def command_line(engine_args: Mapping[str, Any]) -> list[str]:
    """The words that an engine is started with: true is the option alone, false leaves it out, a table is JSON."""
    words: list[str] = []
    for key, value in engine_args.items():
        if value is False:
            continue
        words.append(f"--{option_name(key)}")
        if value is not True:
            words += [_word(item) for item in (value if isinstance(value, list) else [value])]
    return words


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def wrong_options(engine_args: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with names: given twice, ours, or none that an option can have."""
    seen: dict[str, str] = {}
    for name, value in engine_args.items():
        option = option_name(name)
        text = f"{name} = {show(value)} is not allowed:"
        if not option.strip("-.") or option.startswith("-") or any(map(str.isspace, option)) or "=" in option:
            yield f"{text} an option's name without its hyphens, such as max-model-len"
        elif option in OURS:
            yield f"{text} the run says it by {OURS[option]}"
        elif option in seen:
            yield f"{text} it is the same option as {seen[option]}"
        seen[option] = name
