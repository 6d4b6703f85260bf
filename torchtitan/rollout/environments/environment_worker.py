"""An environment worker process, with messages as in workers/inside.py and any number of concurrent episodes.

The set-up has {"factory", "tools", "parser", "longest"}; its reply has {"tools"}, the schemas of the tools.
Messages have {"episode": number, "do": …} with

    reset   {"row"}     {"text": added to the prompt}
    act     {"text", "marked"}    {"messages", "reward", "done", "calls", "errors"}
    finish              {"reward", "attributes"}
    drop    (no reply)  the episode is over
    close               {}: all instances are closed, as no more messages will follow

and every reply may be {"error": text} instead.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import json
import math
import re
import resource
import threading
import traceback
import typing
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pydantic

from torchtitan.errors import UserError, load_object
from torchtitan.rollout.conversation.tool_formats.format import Call, IdentifiedCall, UnreadableCall
from torchtitan.rollout.conversation.tool_formats.own import OwnFormat, load_parser
from torchtitan.rollout.conversation.tool_formats.registry import FORMATS
from torchtitan.rollout.environments import NO_DOCSTRING, NO_RESET, no_type
from torchtitan.rollout.workers.inside import run, without_stop_iteration

ARGUMENTS = re.compile(r"^(?:Args|Arguments|Parameters):\s*$", re.MULTILINE)
# An argument in a Google-style docstring: `    name (type): description`.
ARGUMENT = re.compile(r"^\s+(?P<name>\w+)\s*(?:\([^)]*\))?:\s*(?P<text>.+)$")
# The stack size of a thread; ordinary Python code needs far less.
STACK_BYTES = 4 << 20
# The largest attribute of an environment that reward functions get, in characters of JSON.
LARGEST_ATTRIBUTE = 1 << 16
# The most numbers, texts and lists in all attributes together: a reply may not have many more (workers/replies.py).
VALUES_OF_ATTRIBUTES = 60_000


@dataclass
class Tool:
    """A function that the policy may call."""

    function: Callable[..., Any]
    name: str
    arguments: type[pydantic.BaseModel]
    """Its parameters as a model, which validates calls and describes the parameters"""
    description: str

    @property
    def schema(self) -> dict[str, Any]:
        """The schema for chat templates and the OpenAI API."""
        parameters = {key: value for key, value in self.arguments.model_json_schema().items() if key != "title"}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def check(self, arguments: Any) -> dict[str, Any]:
        """Convert a call's arguments to the annotated types. Raises ValueError with a message for the policy."""
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments of {self.name} must be an object")
        try:
            checked = self.arguments.model_validate(arguments)
        except pydantic.ValidationError as error:
            problems = [
                f"{'.'.join(map(str, problem['loc'])) or self.name}: {problem['msg']}" for problem in error.errors()
            ]
            raise ValueError("; ".join(problems)) from None
        return {name: getattr(checked, name) for name in type(checked).model_fields}


def make_tool(function: Callable[..., Any], method: bool = False) -> Tool:
    """Make a tool of a function, or of a `method` without its first parameter.

    Raises:
        UserError: it has no docstring, or a parameter has no type or cannot be described.
    """
    name = function.__name__
    description, *described = ARGUMENTS.split(inspect.getdoc(function) or "", maxsplit=1)
    if not description.strip():
        raise UserError(f"tool {name}: {NO_DOCSTRING}")
    lines = map(ARGUMENT.match, "".join(described).splitlines())
    meanings = {found["name"]: found["text"] for found in lines if found}
    hints = typing.get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[int(method) :]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise UserError(f"tool {name}: parameter {parameter.name} cannot be passed by name")
        if parameter.name not in hints:
            raise UserError(f"tool {name}: {no_type(parameter.name)}")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (
            hints[parameter.name],
            pydantic.Field(default, description=meanings.get(parameter.name)),
        )
    try:
        model = pydantic.create_model(name, __config__=pydantic.ConfigDict(extra="forbid"), **fields)
        tool = Tool(function, name, model, description.strip())
        json.dumps(tool.schema)
    except (pydantic.PydanticUserError, pydantic.errors.PydanticInvalidForJsonSchema, NameError, TypeError) as error:
        raise UserError(f"tool {name}: its parameters cannot be described ({error})") from error
    return tool


def public_methods(kind: Any) -> list[Callable[..., Any]]:
    """Return the methods of a class that are tools: all public ones but reset and get_reward, in definition order.
    Static methods are returned as staticmethod objects."""
    found = {name: value for base in reversed(kind.__mro__[:-1]) for name, value in vars(base).items()}
    names = [name for name in found if not name.startswith("_") and name not in ("reset", "get_reward")]
    return [found[name] for name in names if inspect.isfunction(getattr(kind, name))]


class Program:
    """The program from [environment]: a class, functions that are tools, or both.

    Raises:
        UserError: it cannot be loaded or is not an environment.
    """

    def __init__(self, factory: str, tools: list[str], parser: str):
        self.factory: Any = load_object(factory, "environment") if factory else None
        self.tools: dict[str, Tool] = {}
        self.owned: set[str] = set()
        """Names of the tools that are methods of the instance"""
        self.steps = self.factory is not None and callable(getattr(self.factory, "step", None))
        if self.factory is not None:
            if not callable(getattr(self.factory, "reset", None)):
                raise UserError(f"environment {factory!r}: {NO_RESET}")
            for method in [] if self.steps else public_methods(self.factory):
                self._add(make_tool(method, method=not isinstance(method, staticmethod)))
                self.owned.add(method.__name__)
        for name in tools:
            self._add(make_tool(load_object(name, "tool")))
        if not self.steps and not self.tools:
            raise UserError(f"environment {factory!r}: it has neither step(action) nor a public method as a tool")
        if self.steps and self.tools:
            raise UserError(f"environment {factory!r}: it has step(action), so it cannot have tools beside it")

        self._schemas = [tool.schema for tool in self.tools.values()]
        self._format = FORMATS.get(parser) or OwnFormat(parser, load_parser(parser))

    def read_calls(self, marked: str) -> list[Call]:
        """Return the calls of tools in a turn's text. Raises ValueError or RecursionError for text that is none."""
        return self._format.read(marked, tools=self._schemas).calls

    def _add(self, tool: Tool) -> None:
        if tool.name in self.tools:
            raise UserError(f"there are two tools named {tool.name!r}")
        self.tools[tool.name] = tool


class Instance:
    """One environment, used by one episode at a time.

    Its synchronous methods all run in one dedicated thread; asynchronous methods run in the worker's loop.
    """

    def __init__(self, program: Program, longest: int):
        """longest: the maximum characters of an observation; longer ones could never be trained on."""
        self._program, self._longest = program, longest
        self._object: Any = None
        self._reward = 0.0
        allow_for_a_thread()
        self._thread = ThreadPoolExecutor(1)

    async def reset(self, row: dict[str, Any]) -> str:
        """Begin an episode and return the text that the environment adds to the prompt."""
        # Mistral's templates accept only ids of nine characters.
        self._call_ids = (f"{number:09d}" for number in itertools.count())
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

    async def act(self, text: str, marked: str) -> dict[str, Any]:
        """Process a turn and return {"messages": for the policy, "reward", "done", "calls", "errors"}.

        A turn is either a step, or text (as in Episode.act) with tool calls; without any call, it ends the episode.
        """
        if self._program.steps:
            observation, reward, done = _read_step(await self._run(self._object.step, text))
            self._reward += reward
            message = {"role": "user", "content": self._text(observation, "step")}
            return {"messages": [message], "reward": reward, "done": done, "calls": [], "errors": 0}
        try:
            calls = await self._run(self._program.read_calls, marked)
        except (ValueError, RecursionError) as error:
            calls = [UnreadableCall(str(error) or type(error).__name__)]
        messages, left, errors = [], self._longest, 0
        for call in calls:
            name = "" if isinstance(call, UnreadableCall) else call.name
            result, failed = await self._call(call)
            own_id = call.id if isinstance(call, IdentifiedCall) else ""
            message = {"role": "tool", "tool_call_id": own_id or next(self._call_ids), "name": name}
            messages.append({**message, "content": result[:left]})
            left -= len(result[:left])  # what is longer does not fit into the completion anyway
            errors += failed
        return {
            "messages": messages,
            "reward": 0.0,
            "done": not calls,
            "calls": [call._asdict() for call in calls if not isinstance(call, UnreadableCall)],
            "errors": errors,
        }

    async def _call(self, call: Call) -> tuple[str, bool]:
        """Return the text of a tool's result and whether it failed; the policy also gets errors as text."""
        if isinstance(call, UnreadableCall):
            return self._error(call)
        name, arguments = call
        tool = self._program.tools.get(name)
        try:
            if tool is None:
                raise ValueError(f"there is no tool {name!r}, only {', '.join(self._program.tools)}")
            checked = tool.check(arguments)
            function = getattr(self._object, name) if name in self._program.owned else tool.function
            return self._text(await self._run(function, **checked), name), False
        except (Exception, SystemExit) as error:  # raised by user code
            return self._error(error)

    def _error(self, error: BaseException) -> tuple[str, bool]:
        return self._text({"error": str(error) or type(error).__name__}, "error"), True

    async def finish(self) -> dict[str, Any]:
        """Return the episode's reward (None if it has none) and the attributes for reward functions."""
        get_reward = getattr(self._object, "get_reward", None)
        reward = self._reward if self._program.steps else None
        if get_reward is not None:
            reward = read_number(await self._run(get_reward), "get_reward")
        attributes, left = {}, VALUES_OF_ATTRIBUTES
        for name, value in getattr(self._object, "__dict__", {}).items():
            if name.startswith("_") or (plain := _plain(value)) is None:
                continue
            count = _count(plain[0])
            if count <= left:
                attributes[name], left = plain[0], left - count
        return {"reward": reward, "attributes": attributes}

    async def close(self) -> None:
        """Close the instance, after its current work, with close() of a class that has step(). (For a class whose
        methods are tools, close is one of the tools.)"""
        try:
            await self._run(int)  # wait for the thread, which may still be constructing the object
            close = getattr(self._object, "close", None) if self._program.steps else None
            if close is not None:
                await self._run(close)
        except (Exception, SystemExit):  # raised by user code
            traceback.print_exc()
        self._thread.shutdown(wait=False)

    async def _run(self, function: Callable[..., Any], /, *values: Any, **arguments: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(*values, **arguments)
        work = functools.partial(without_stop_iteration, function, *values, **arguments)
        result = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        return await result if inspect.isawaitable(result) else result

    def _text(self, value: Any, where: str) -> str:
        """Return text unchanged, TRL's content parts as their joined texts, and other values as JSON."""
        if isinstance(value, list) and value and all(map(_has_text, value)):
            value = "".join(str(part["text"]) for part in value)
        if value is None:
            return ""
        if not isinstance(value, str):
            try:
                value = json.dumps(value, ensure_ascii=False)
            except (TypeError, ValueError):
                raise TypeError(f"{where} returned {type(value).__name__}, which is not text") from None
        # A lone surrogate can be neither encoded nor tokenised.
        return value[: self._longest].encode("utf-8", "replace").decode()


def _read_step(result: Any) -> tuple[Any, float, bool]:
    """Return (observation, reward, done) from a step's result: that tuple, gymnasium's five values, or an object."""
    if isinstance(result, tuple) and len(result) == 5:
        observation, reward, terminated, truncated, _ = result
        done = terminated or truncated
    elif isinstance(result, tuple) and len(result) in (3, 4):
        observation, reward, done = result[:3]
    elif hasattr(result, "observation") and hasattr(result, "done"):
        observation, reward, done = result.observation, getattr(result, "reward", None), result.done
    else:
        raise TypeError(f"step must return (observation, reward, done), it returned {result!r:.200}")
    if done not in (None, True, False):
        raise TypeError(f"step must return for done whether the episode is over, it returned {done!r:.200}")
    return observation, read_number(reward, "step") or 0.0, bool(done)


def read_number(value: Any, where: str) -> float | None:
    """Read a reward that user code returned. Raises TypeError if it is not a finite number or None."""
    value = value.item() if hasattr(value, "item") else value
    if value is None:
        return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"the reward of {where} must be a finite number or None, it is {value!r}")
    return float(value)


def _plain(value: Any) -> tuple[Any] | None:
    """Return the value in a tuple (since it may be None) if JSON can represent it and it is not too large."""
    try:
        return (value,) if len(json.dumps(value, allow_nan=False)) <= LARGEST_ATTRIBUTE else None
    except (TypeError, ValueError):
        return None


def _has_text(part: Any) -> bool:
    return isinstance(part, Mapping) and "text" in part


def _count(value: Any) -> int:
    """Return how many values JSON has for this one."""
    if isinstance(value, dict):
        return 1 + sum(map(_count, value.values()))
    if isinstance(value, list | tuple):
        return 1 + sum(map(_count, value))
    return 1


def allow_for_a_thread() -> None:
    """Raise the memory limit by a thread's stack, which does not count as the user's memory."""
    threading.stack_size(STACK_BYTES)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        raised = soft + 2 * STACK_BYTES
        resource.setrlimit(
            resource.RLIMIT_DATA, (raised if hard == resource.RLIM_INFINITY else min(raised, hard), hard)
        )


class Host:
    """The episodes of this process."""

    def __init__(self, program: Program, longest: int):
        self._program, self._longest = program, longest
        self._episodes: dict[int, Instance] = {}
        self._idle: list[Instance] = []
        """Instances without an episode; each is constructed once and reset for every episode"""
        self._closing: set[asyncio.Task[None]] = set()

    async def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        episode, do = message["episode"], message["do"]
        if do == "close":
            for instance in (*self._episodes.values(), *self._idle):
                self._close(instance)
            await asyncio.gather(*self._closing, return_exceptions=True)
            return {}
        try:
            if do == "reset":
                self._episodes[episode] = self._idle.pop() if self._idle else Instance(self._program, self._longest)
                return {"text": await self._episodes[episode].reset(message["row"])}
            instance = self._episodes[episode]
            if do == "act":
                return await instance.act(message["text"], message["marked"])
            result = await instance.finish()
            self._idle.append(self._episodes.pop(episode))
            return result
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # raised by user code
            traceback.print_exc()
            self.drop(episode)
            return {"error": f"{type(error).__name__}: {error}"}

    def drop(self, episode: int) -> None:
        """Forget an episode and close its instance, without waiting for its current work."""
        if (instance := self._episodes.pop(episode, None)) is not None:
            self._close(instance)

    def _close(self, instance: Instance) -> None:
        task = asyncio.ensure_future(instance.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def load(setup: dict[str, Any]) -> tuple[Host, dict[str, Any]]:
    program = Program(setup["factory"], setup["tools"], setup["parser"])
    return Host(program, setup["longest"]), {"tools": [tool.schema for tool in program.tools.values()]}


if __name__ == "__main__":
    run(load)
