"""A reward worker process: length-prefixed JSON calls on standard input, replies on standard output.

First comes {"functions": [names], "path": [folders to import from], "memory_limit_mb": int}, answered by
{"ready": true} or {"error": text}; then any number of {"function": name, "samples": {…}}, each answered by
{"values": [number or null], "invalid": [indices]} or {"error": text}. Functions run in the main thread, where
signal-based time limits work.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import math
import numbers
import os
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

from torchtitan.rollout.rewards import CHECKS_MATHEMATICS, load_reward, math_check

HEADER = struct.Struct(">I")
PR_SET_PDEATHSIG = 1


def read_frame(file: BinaryIO) -> Any:
    """The next message, None at the end of input."""
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    return json.loads(file.read(HEADER.unpack(header)[0]))


def write_frame(file: BinaryIO, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    file.write(HEADER.pack(len(data)) + data)
    file.flush()


def call(function: Callable[..., Any], samples: dict[str, Any]) -> dict[str, Any]:
    """Call a reward function in TRL's convention. `samples` has texts, completion_ids, finish_reasons (one entry per
    completion), chat, prompt, columns, prefill and max_completion_tokens (once)."""
    texts = samples["texts"]
    count = len(texts)
    arguments = {name: [value] * count for name, value in samples["columns"].items()}
    arguments["prompts"] = [samples["prompt"]] * count
    arguments["completions"] = (
        [[{"role": "assistant", "content": text}] for text in texts] if samples["chat"] else texts
    )
    arguments["completion_ids"] = samples["completion_ids"]
    arguments["finish_reasons"] = samples["finish_reasons"]
    arguments["max_completion_tokens"] = samples["max_completion_tokens"]
    arguments["prefill"] = samples["prefill"]
    result = function(**arguments)
    if inspect.isawaitable(result):
        result = asyncio.run(_finish(result))
    values = [value.item() if hasattr(value, "item") else value for value in result]
    if len(values) != count:
        return {"error": f"returned {len(values)} rewards for {count} completions"}
    invalid = [i for i, value in enumerate(values) if value is not None and not _is_finite_number(value)]
    return {
        "values": [None if value is None or i in invalid else float(value) for i, value in enumerate(values)],
        "invalid": invalid,
    }


async def _finish(awaitable: Any) -> Any:
    return await awaitable


def _is_finite_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def limit_memory(megabytes: int) -> None:
    """Let this process map at most `megabytes` more than it has mapped now (Linux)."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        print("reward worker: no /proc here, the memory limit is not enforced", file=sys.stderr, flush=True)
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = mapped + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent goes (Linux); a hung function would not notice by itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    die_with_parent()
    # What a reward function prints must not end up between the replies.
    incoming = os.fdopen(os.dup(0), "rb")
    outgoing = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    setup = read_frame(incoming)
    if setup is None:
        return
    sys.path.extend(folder for folder in setup["path"] if folder not in sys.path)
    try:
        functions = {name: load_reward(name) for name in setup["functions"]}
        if not CHECKS_MATHEMATICS.isdisjoint(functions):
            math_check.checker()  # no call's time limit pays for loading it
    except Exception as error:
        write_frame(outgoing, {"error": str(error)})
        return
    limit_memory(setup["memory_limit_mb"])
    write_frame(outgoing, {"ready": True})
    while (message := read_frame(incoming)) is not None:
        try:
            reply = call(functions[message["function"]], message["samples"])
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        signal.alarm(0)
        write_frame(outgoing, reply)


if __name__ == "__main__":
    main()
