"""A reward worker process: messages as in workers/inside.py, one call after the other.

The set-up has {"functions": [names]}. A call is {"function": name, "samples": {…}}, its reply
{"values": [number or null], "invalid": [indices]} or {"error": text}. Functions run in the main thread, where
signal-based time limits work.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import signal
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torchtitan.rollout.rewards import CHECKS_MATHEMATICS, load_reward, math_check
from torchtitan.rollout.workers.inside import protect, read_message, set_up, write_message


def call(function: Callable[..., Any], samples: dict[str, Any]) -> dict[str, Any]:
    """Call a reward function in TRL's convention. `samples` has completions, completion_ids, finish_reasons and
    environments (one entry per completion), prompt, columns, prefill and max_completion_tokens (once)."""
    count = len(samples["completions"])
    arguments = {name: [value] * count for name, value in samples["columns"].items()}
    arguments["prompts"] = [samples["prompt"]] * count
    for name in ("completions", "completion_ids", "finish_reasons", "max_completion_tokens", "prefill"):
        arguments[name] = samples[name]
    if any(samples["environments"]):
        arguments["environments"] = [SimpleNamespace(**attributes) for attributes in samples["environments"]]
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


def main() -> None:
    incoming, outgoing = protect()
    functions: dict[str, Callable[..., Any]] = {}

    def load(setup: dict[str, Any]) -> dict[str, Any]:
        functions.update((name, load_reward(name)) for name in setup["functions"])
        if not CHECKS_MATHEMATICS.isdisjoint(functions):
            math_check.checker()  # no call's time limit pays for loading it
        return {}

    if not set_up(incoming, outgoing, load):
        return
    while (message := read_message(incoming)) is not None:
        try:
            reply = call(functions[message["function"]], message["samples"])
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        signal.alarm(0)
        write_message(outgoing, {**reply, "id": message["id"]})


if __name__ == "__main__":
    main()
