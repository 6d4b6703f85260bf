"""The user's environment in a worker process: one instance per episode, and how its methods' results are read."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
import resource
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torchtitan.errors import UserError
from torchtitan.rollout.environments.tools import Tool, make_tool, public_methods
from torchtitan.rollout.tool_calls import ToolCall, parse_tool_calls
from torchtitan.rollout.workers.inside import without_stop_iteration
from torchtitan.utils.loading import load_object

# The stack of a thread: ordinary Python code needs far less.
STACK_BYTES = 4 << 20
# What reward functions get to see of an environment, as JSON.
LARGEST_ATTRIBUTE = 1 << 16


class Program:
    """What [environment] names: a class, functions that are tools, or both.

    Raises:
        UserError: it cannot be loaded, or is no environment.
    """

    def __init__(self, factory: str, tools: list[str], parser: str):
        self.factory: Any = load_object(factory, "environment") if factory else None
        self.tools: dict[str, Tool] = {}
        self.owned: set[str] = set()
        """Names of tools that are methods of the instance"""
        self.steps = self.factory is not None and callable(getattr(self.factory, "step", None))
        if self.factory is not None:
            if not callable(getattr(self.factory, "reset", None)):
                raise UserError(f"environment {factory!r}: it has no method reset(**row)")
            for method in [] if self.steps else public_methods(self.factory):
                self._add(make_tool(method, method=True))
                self.owned.add(method.__name__)
        for name in tools:
            self._add(make_tool(load_object(name, "tool")))
        if not self.steps and not self.tools:
            raise UserError(f"environment {factory!r}: it has neither step(action) nor a public method as a tool")
        if self.steps and self.tools:
            raise UserError(f"environment {factory!r}: it has step(action), so it cannot have tools beside it")

        self.parse: Callable[[str], Any] = _calls if parser == "hermes" else load_object(parser, "tool parser")

    def _add(self, tool: Tool) -> None:
        if tool.name in self.tools:
            raise UserError(f"there are two tools of the name {tool.name!r}")
        self.tools[tool.name] = tool

    @property
    def about(self) -> dict[str, Any]:
        rewards = self.steps or callable(getattr(self.factory, "get_reward", None))
        return {"steps": self.steps, "rewards": rewards, "tools": [tool.schema for tool in self.tools.values()]}


class Instance:
    """One environment, used by one episode at a time, all of whose synchronous methods run in one thread of its own.

    Asynchronous methods run in the worker's loop.
    """

    def __init__(self, program: Program, longest: int):
        """longest: characters of an observation; more could not be trained on in any case."""
        self._program, self._longest = program, longest
        self._object: Any = None
        self._reward = 0.0
        _allow_for_a_thread()
        self._thread = ThreadPoolExecutor(1)

    async def reset(self, row: dict[str, Any]) -> str:
        """What the environment adds to the prompt."""
        factory = self._program.factory
        if factory is None:
            return ""
        if self._object is None:
            self._object = await self._run(factory)
        self._reward = 0.0
        parameters = inspect.signature(self._object.reset).parameters.values()
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        known = {parameter.name for parameter in parameters}
        row = {name: value for name, value in row.items() if takes_all or name in known}
        result = await self._run(self._object.reset, **row)
        # gymnasium: (observation, info); OpenEnv: an object.
        result = result[0] if isinstance(result, tuple) else getattr(result, "observation", result)
        return self._text(result, "reset")

    async def act(self, text: str) -> dict[str, Any]:
        """What a turn brings about: {"messages": for the policy, "reward", "done", "calls", "errors"}.

        A turn is a step, or holds calls of tools; one without any ends the episode.
        """
        if self._program.steps:
            observation, reward, done = _read_step(await self._run(self._object.step, text))
            self._reward += reward
            message = {"role": "user", "content": self._text(observation, "step")}
            return {"messages": [message], "reward": reward, "done": done, "calls": [], "errors": 0}
        try:
            calls = [(str(name), arguments) for name, arguments in await self._run(self._program.parse, text)]
        except (ValueError, RecursionError) as error:
            results = [("", *self._error(error))]
            calls = []
        else:
            results = [(name, *await self._call(name, arguments)) for name, arguments in calls]
        return {
            "messages": [{"role": "tool", "name": name, "content": result} for name, result, _ in results],
            "reward": 0.0,
            "done": not results,
            "calls": [{"name": name, "arguments": arguments} for name, arguments in calls],
            "errors": sum(failed for _, _, failed in results),
        }

    async def _call(self, name: str, arguments: Any) -> tuple[str, bool]:
        """The text of a tool's result, and whether it failed: what goes wrong is text for the policy, too."""
        tool = self._program.tools.get(name)
        try:
            if tool is None:
                raise ValueError(f"there is no tool {name!r}, only {', '.join(self._program.tools)}")
            checked = tool.check(arguments)
            function = getattr(self._object, name) if name in self._program.owned else tool.function
            return self._text(await self._run(function, **checked), name), False
        except (Exception, SystemExit) as error:  # of user code
            return self._error(error)

    def _error(self, error: BaseException) -> tuple[str, bool]:
        return self._text({"error": str(error) or type(error).__name__}, "error"), True

    async def finish(self) -> dict[str, Any]:
        """The episode's reward (None: it has none) and what reward functions may look at."""
        get_reward = getattr(self._object, "get_reward", None)
        reward = self._reward if self._program.steps else None
        if get_reward is not None:
            reward = read_number(await self._run(get_reward), "get_reward")
        attributes = {}
        for name, value in getattr(self._object, "__dict__", {}).items():
            if not name.startswith("_") and (plain := _plain(value)) is not None:
                attributes[name] = plain[0]
        return {"reward": reward, "attributes": attributes}

    def close(self) -> None:
        """No episode will use it again."""
        self._thread.shutdown(wait=False)

    async def _run(self, function: Callable[..., Any], *values: Any, **arguments: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(*values, **arguments)
        work = functools.partial(without_stop_iteration, function, *values, **arguments)
        result = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        return await result if inspect.isawaitable(result) else result

    def _text(self, value: Any, where: str) -> str:
        """Text as it is, other JSON as JSON, TRL's content parts as their texts."""
        if isinstance(value, list) and value and all(isinstance(one, Mapping) and "text" in one for one in value):
            value = "".join(str(one["text"]) for one in value)
        if value is None:
            return ""
        if not isinstance(value, str):
            try:
                value = json.dumps(value, ensure_ascii=False)
            except (TypeError, ValueError):
                raise TypeError(f"{where} returned {type(value).__name__}, which is not text") from None
        # A lone surrogate is no text that could be written down or tokenised.
        return value[: self._longest].encode("utf-8", "replace").decode()


def _calls(text: str) -> list[ToolCall]:
    return parse_tool_calls(text)[1]


def _read_step(result: Any) -> tuple[Any, float, bool]:
    """(observation, reward, done) of what a step has returned: that, gymnasium's five, or an object with these."""
    if isinstance(result, tuple) and len(result) == 5:
        observation, reward, terminated, truncated, _ = result
        done = terminated or truncated
    elif isinstance(result, tuple) and len(result) in (3, 4):
        observation, reward, done = result[:3]
    elif hasattr(result, "observation") and hasattr(result, "done"):
        observation, reward, done = result.observation, getattr(result, "reward", None), result.done
    else:
        raise TypeError(f"step must return (observation, reward, done), it returned {type(result).__name__}")
    return observation, read_number(reward, "step") or 0.0, bool(done)


def read_number(value: Any, where: str) -> float | None:
    """A reward that user code has returned. Raises TypeError."""
    value = value.item() if hasattr(value, "item") else value
    if value is None:
        return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"the reward of {where} must be a finite number or None, it is {value!r}")
    return float(value)


def _plain(value: Any) -> tuple[Any] | None:
    """The value where JSON can hold it, in a tuple since it may be None."""
    try:
        return (value,) if len(json.dumps(value, allow_nan=False)) <= LARGEST_ATTRIBUTE else None
    except (TypeError, ValueError):
        return None


def _allow_for_a_thread() -> None:
    """A thread's stack is not the user's memory: raise the limit by it."""
    threading.stack_size(STACK_BYTES)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        raised = soft + 2 * STACK_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (raised if hard == resource.RLIM_INFINITY else min(raised, hard), hard))
