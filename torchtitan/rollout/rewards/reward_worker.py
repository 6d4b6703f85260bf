"""A reward worker process, with messages as in workers/inside.py.

The set-up has {"functions": [names], "side_by_side": boolean, "timeout_s": rewards.timeout_s}. A call is {"function":
name, "samples": {…}, "state": {…}, "timeout_s": seconds}, and its reply is {"values": [number or null], "invalid":
[indices], "extra": {column: [values]}, "metrics": {name: [values]}}, {"late": true} or {"error": text}.

With side_by_side, calls of async functions run concurrently, and this process enforces their time limits. Otherwise the
worker has one call at a time and its parent enforces the time limit. The call then runs in the main thread, outside any
loop, so that signal-based time limits and a function's own asyncio.run work.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import signal
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import SimpleNamespace
from typing import Any

from torchtitan.errors import UserError
from torchtitan.rollout.rewards import CHECKS_MATHEMATICS, is_built_in, load_reward
from torchtitan.rollout.workers.inside import protect, read_message, serve, set_up, write_message

# Arguments with one entry per completion.
PER_SAMPLE = ("completions", "completion_ids", "finish_reasons", "thoughts", "final_texts")
# Characters of a value in a column of completions.jsonl.
MAX_EXTRA_CHARACTERS = 4000


class Log:
    """The values that a call logs with TRL's log_extra and log_metric."""

    def __init__(self, samples: int):
        self.samples = samples
        self.columns: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = defaultdict(list)

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """Log a column of completions.jsonl. Raises ValueError unless there is one value per completion, in order."""
        if not _has_order(values):
            raise ValueError(f"log_extra({column!r}, …): a list of values is needed, not a {type(values).__name__}")
        if len(values) != self.samples:
            raise ValueError(f"log_extra({column!r}, …): {len(values)} values for {self.samples} completions")
        self.columns[str(column)] = [_plain(value) for value in values]

    def metric(self, name: str, value: float) -> None:
        """Log a metric for metrics.jsonl, the mean over a step's calls; a value that is not finite is ignored."""
        if math.isfinite(value):
            self.metrics[str(name)].append(float(value))


def _plain(value: Any) -> Any:
    """Return the value if it is null, a boolean or a finite number, else its text."""
    value = value.item() if hasattr(value, "item") else value
    if value is None or isinstance(value, (bool, int)) or _is_finite_number(value):
        return value
    return str(value)[:MAX_EXTRA_CHARACTERS]


def begin(function: Callable[..., Any], message: dict[str, Any]) -> tuple[Any, Log]:
    """Call a reward function with TRL's convention, and return its result and log.

    message["samples"] has the lists of PER_SAMPLE, environments and well_formed (one entry per completion), and prompt,
    columns, prefill and max_completion_tokens (one for all).
    """
    samples = message["samples"]
    count = len(samples["completions"])
    log = Log(count)
    arguments: dict[str, Any] = {name: [value] * count for name, value in samples["columns"].items()}
    arguments |= {"prompts": [samples["prompt"]] * count, "trainer_state": SimpleNamespace(**message["state"])}
    arguments |= {"log_extra": log.extra, "log_metric": log.metric}
    for name in (*PER_SAMPLE, "max_completion_tokens", "prefill"):
        arguments[name] = samples[name]
    # The built-in format; for other functions, well_formed may be a column of the dataset.
    if is_built_in(message["function"]) and "well_formed" in inspect.signature(function).parameters:
        arguments["well_formed"] = samples["well_formed"]
    if any(samples["environments"]):
        arguments["environments"] = [SimpleNamespace(**attributes) for attributes in samples["environments"]]
    return function(**arguments), log


def reply(result: Any, log: Log) -> dict[str, Any]:
    """Return the reply for a call's result."""
    if not _has_order(result):
        return {"error": f"must return {log.samples} rewards in a list, returned {type(result).__name__}"}
    values = [_plain_number(value) for value in result]
    if len(values) != log.samples:
        return {"error": f"returned {len(values)} rewards for {log.samples} completions"}
    rewards: list[float | None] = []
    invalid: list[int] = []
    for i, value in enumerate(values):
        if value is None or _is_finite_number(value):
            rewards.append(None if value is None else float(value))
        else:
            rewards.append(None)
            invalid.append(i)
    return {
        "values": rewards,
        "invalid": invalid,
        "extra": log.columns,
        "metrics": log.metrics,
    }


def _plain_number(value: Any) -> Any:
    """A scalar of torch or numpy as Python's number; anything else as it is."""
    return value.item() if hasattr(value, "item") else value


def failure(error: BaseException) -> dict[str, Any]:
    """Return the reply for an exception that a call raised."""
    traceback.print_exception(error)
    return {"error": f"{type(error).__name__}: {error}"}


def answer(function: Callable[..., Any], message: dict[str, Any]) -> dict[str, Any]:
    """Return the reply to a call that has the process to itself."""
    try:
        result, log = begin(function, message)
        return reply(asyncio.run(_finish(result)) if inspect.isawaitable(result) else result, log)
    except (Exception, SystemExit) as error:
        return failure(error)
    finally:
        signal.alarm(0)


async def answer_beside_others(function: Callable[..., Any], message: dict[str, Any]) -> dict[str, Any]:
    """Return the reply to a call of an async function, within its time limit unless it blocks the process."""
    try:
        result, log = begin(function, message)
        task = asyncio.ensure_future(_finish(result))
        done, _ = await asyncio.wait([task], timeout=message["timeout_s"])
        if not done:
            task.cancel()
            return {"late": True}
        return reply(task.result(), log)
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return failure(error)


async def _finish(awaitable: Any) -> Any:
    try:
        return await awaitable
    except SystemExit as error:  # if it escaped a task, it would end the loop and all other calls
        raise RuntimeError(f"SystemExit: {error}") from error


def _has_order(values: Any) -> bool:
    """Whether the values can be one per completion: not the keys of a dict, the elements of a set or characters."""
    return isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping | Set)


def _is_finite_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether it is an async function, or an object that is called like one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def load(setup: dict[str, Any]) -> tuple[tuple[dict[str, Callable[..., Any]], bool], dict[str, Any]]:
    functions = {name: load_reward(name) for name in setup["functions"]}
    for name, function in functions.items():
        own_limit = getattr(function, "timeout_s", None)
        if isinstance(own_limit, int | float) and own_limit >= setup["timeout_s"]:
            raise UserError(
                f"reward function {name!r}: its timeout_s = {own_limit:g} must be less than rewards.timeout_s = "
                f"{setup['timeout_s']:g}, which ends the call, so that a slow judgement would cost the whole group"
            )
    if not CHECKS_MATHEMATICS.isdisjoint(functions):
        from torchtitan.rollout.rewards import mathematics

        mathematics.checker()  # load it now, so that it does not count against a call's time limit
    coroutines = [name for name, function in functions.items() if is_async(function)]
    return (functions, setup["side_by_side"]), {"coroutines": coroutines}


def main() -> None:
    incoming, outgoing = protect()
    if (loaded := set_up(incoming, outgoing, load)) is None:
        return
    functions, side_by_side = loaded
    if side_by_side:
        asyncio.run(
            serve(incoming, outgoing, lambda request: answer_beside_others(functions[request["function"]], request))
        )
        return
    while (message := read_message(incoming)) is not None:
        reply_to = {**answer(functions[message["function"]], message), "id": message["id"]}
        write_message(outgoing, reply_to, message["most_bytes"])


if __name__ == "__main__":
    main()
