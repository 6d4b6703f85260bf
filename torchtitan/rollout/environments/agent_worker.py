"""An agent worker process, with messages as in workers/inside.py and any number of concurrent episodes.

The set-up has either {"agent"}, which is `package.module:function` or a command line, or {"taskset", "harness",
"renderer", "model", "max_turns"}. In the second case, this process runs in verifiers' own environment and needs none of
the trainer's packages. Messages have {"episode": number, "do": …} with

    run     {"row", "base_url", "key"}  {"reward", "stderr"}, or {"error", "killed"}: a signal has ended its program
    quote   {}                          {"text"}: the end of its command's standard error so far
    drop    (no reply)                  the episode is over

A function gets those of `base_url`, `key` and `row` that are among its parameters, and returns a reward or None. A
command finds the first two in OPENAI_BASE_URL and OPENAI_API_KEY (and in ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY),
gets the row as JSON on standard input, and prints the reward on its last line. Calls from verifiers name their trace as
the session; the gateway records all sessions of an episode's key.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import inspect
import json
import os
import re
import shlex
import signal
import sys
import tempfile
import time
import traceback
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torchtitan.errors import UserError, load_object
from torchtitan.rollout.environments.environment_worker import allow_for_a_thread, read_number
from torchtitan.rollout.workers import usage
from torchtitan.rollout.workers.inside import OUTSIDE_SIGNALS, QUOTES, run, without_stop_iteration

FUNCTION = re.compile(r"[\w.]+:\w+")
# The number of synchronous functions that run at a time.
MAX_THREADS = 4096
# The end of a command's output, which is searched for its reward.
TAIL_BYTES = 1 << 16
# The end of its standard error that its failure quotes, for which it waits so long after the command's end.
QUOTED_CHARACTERS, QUOTED_WITHIN_S = 500, 1.0
# The intervals between checks whether a command has ended, and of the memory that it uses.
POLL_S, MEASURE_S = 0.05, 0.5
# Of a command and what it has started, the memory of this many processes is measured.
MEASURED_PROCESSES = 4096

Play = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Plays the episode of a message"""


class ProgramKilled(RuntimeError):
    """A program was ended by a signal that somebody else may have sent."""


class Agents:
    """The episodes of this process."""

    def __init__(self, play: Play):
        self._play = play
        self._episodes: dict[int, asyncio.Task[Any] | None] = {}
        self._errors: dict[int, bytearray] = {}
        """The end of the standard error of each episode's command"""

    async def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["do"] == "quote":
            return {"text": _quoted(self._errors.get(message["episode"], bytearray()))}
        message["errors"] = self._errors[message["episode"]] = bytearray()
        # Play in this task itself: a SystemExit that escapes a task ends the loop and all other episodes.
        self._episodes[message["episode"]] = asyncio.current_task()
        try:
            return await self._play(message)
        except asyncio.CancelledError:
            return {"error": "the episode was cancelled"}
        except (Exception, SystemExit) as error:  # raised by user code
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}", "killed": isinstance(error, ProgramKilled)}
        finally:
            self._episodes.pop(message["episode"], None)
            del self._errors[message["episode"]]

    def drop(self, episode: int) -> None:
        """Abort an episode."""
        if (task := self._episodes.get(episode)) is not None:
            task.cancel()


def find_agent(agent: str, memory_limit_mb: int) -> Play:
    """Return a Play for a function, or for a command that may use so much memory. Raises UserError if it cannot be
    loaded."""
    if not FUNCTION.fullmatch(agent):
        words = shlex.split(agent)
        return lambda message: run_command(words, message, memory_limit_mb)
    function = load_object(agent, "agent")
    names = set(inspect.signature(function).parameters)
    if unknown := names - {"base_url", "key", "row"}:
        raise UserError(f"agent {agent!r} has parameters {', '.join(sorted(unknown))}: it gets base_url, key and row")

    # asyncio's default pool has few threads: further episodes would wait for one and miss their deadlines.
    threads = ThreadPoolExecutor(MAX_THREADS, initializer=allow_for_a_thread)

    async def play(message: dict[str, Any]) -> dict[str, Any]:
        arguments = {name: message[name] for name in names}
        if inspect.iscoroutinefunction(function):
            result = await function(**arguments)
        else:
            work = functools.partial(without_stop_iteration, function, **arguments)
            result = await asyncio.get_running_loop().run_in_executor(threads, work)
            result = await result if inspect.isawaitable(result) else result
        return {"reward": read_number(result, agent)}

    return play


async def run_command(words: list[str], message: dict[str, Any], memory_limit_mb: int) -> dict[str, Any]:
    """Play an episode with a command.

    Raises:
        RuntimeError: it fails, or it and what it has started use more than `memory_limit_mb`.
        ValueError: its last line is not a reward.
    """
    url, key = message["base_url"], message["key"]
    environment = os.environ | {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
    # Anthropic's libraries append /v1 themselves.
    environment |= {"ANTHROPIC_BASE_URL": url.removesuffix("/v1"), "ANTHROPIC_API_KEY": key}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        environment["TMPDIR"] = scratch
        if environment.get("HOME") == tempfile.gettempdir():  # as below
            environment["HOME"] = scratch
        return await _run_in(environment, words, message, memory_limit_mb)


async def _run_in(
    environment: dict[str, str], words: list[str], message: dict[str, Any], memory_limit_mb: int
) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *words, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment,
        # It gets its own process group, to be killed with its children. It stays in our session, to end with us.
        preexec_fn=os.setpgrp,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    tail, errors = bytearray(), message.setdefault("errors", bytearray())
    reading = asyncio.ensure_future(_read_tail(process.stdout, tail))
    reading_errors = asyncio.ensure_future(_read_tail(process.stderr, errors, copy=True))
    try:
        with contextlib.suppress(ConnectionError):  # a command may ignore the row
            # Bytes are written in base64, as JSON has no form of its own for them.
            row = json.dumps(message["row"], default=lambda value: base64.b64encode(value).decode())
            process.stdin.write(row.encode() + b"\n")
            await process.stdin.drain()
            process.stdin.close()
        # Not process.wait(), which also waits for the pipes: children that remain may hold the output open.
        measured, used_too_much = time.monotonic(), False
        while process.returncode is None and not used_too_much:
            await asyncio.sleep(POLL_S)
            if time.monotonic() - measured >= MEASURE_S:
                measured = time.monotonic()
                command = usage.descendants(process.pid, MEASURED_PROCESSES)
                if used_too_much := usage.exceeds(command, memory_limit_mb << 20):
                    usage.kill(command)  # those that have left the group as well
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    if used_too_much:
        await asyncio.wait([reading, reading_errors], timeout=QUOTED_WITHIN_S)
        raise RuntimeError(
            f"{words[0]} was stopped: it, or what it has started, used more than {memory_limit_mb} MiB of memory "
            "(environment.sandbox.memory_limit_mb)"
        )
    await reading
    await asyncio.wait([reading_errors], timeout=QUOTED_WITHIN_S)
    if code := process.returncode:
        stderr = _quoted(errors)
        kind = ProgramKilled if -code in OUTSIDE_SIGNALS else RuntimeError
        raise kind(f"{words[0]} ended with exit code {code}{stderr and QUOTES}{stderr}")
    lines = tail.decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    try:
        reward, stderr = read_number(json.loads(last), words[0]), _quoted(errors)
        return {"reward": reward, "stderr": stderr} if stderr else {"reward": reward}
    except ValueError:
        raise ValueError(f"the last line that {words[0]} printed is not a reward: {last[:200]!r}") from None


def _quoted(errors: bytearray) -> str:
    return errors.decode(errors="replace").strip()[-QUOTED_CHARACTERS:]


async def _read_tail(output: asyncio.StreamReader, tail: bytearray, copy: bool = False) -> None:
    """Keep the end of a command's output in `tail`. copy: pass all of it on to our standard error."""
    while part := await output.read(TAIL_BYTES):
        if copy:
            sys.stderr.buffer.write(part)
            sys.stderr.buffer.flush()
        tail += part
        del tail[:-TAIL_BYTES]


class Taskset:
    """The tasks of a verifiers taskset, and the harness that plays them."""

    def __init__(self, setup: dict[str, Any]):
        import pydantic
        import verifiers.v1 as vf
        from verifiers.v1.runtimes import RuntimeConfig
        from verifiers.v1.utils.loaders import default_harness_id, load_taskset, taskset_config_type

        self._vf, self._setup = vf, setup
        name = setup["taskset"]
        taskset = load_taskset(taskset_config_type(name).model_validate({"id": name}))
        if not taskset.bounded:
            raise ValueError(f"taskset {name!r} is infinite: name one whose tasks end")
        self._tasks = list(taskset)
        if not self._tasks:
            raise ValueError(f"taskset {name!r} has no tasks")
        self._harness = setup["harness"] or default_harness_id(name)
        self._runtime = pydantic.TypeAdapter(RuntimeConfig).validate_python(setup["runtime"])

    async def play(self, message: dict[str, Any]) -> dict[str, Any]:
        """Play the episode of a message. Raises RuntimeError with the trace's last error, if it has one."""
        vf, setup = self._vf, self._setup
        task = self._tasks[int(message["row"].get("task", message["index"])) % len(self._tasks)]
        # Each episode has its own key, which verifiers reads from the environment when it makes the client.
        variable = f"TORCHTITAN_GATEWAY_KEY_{message['episode']}"
        os.environ[variable] = message["key"]
        client = vf.TrainClientConfig(
            base_url=message["base_url"], api_key_var=variable,
            renderer={"name": setup["renderer"]}, renderer_model_name=setup["model"],
        )  # fmt: skip
        config = vf.AgentConfig(
            model="policy", client=client, harness={"id": self._harness}, runtime=self._runtime,
            max_turns=setup["max_turns"], sampling=vf.SamplingConfig(),
        )  # fmt: skip
        try:
            async with vf.make_agent(config) as agent:
                trace = await agent.run(task)
        finally:
            del os.environ[variable]
        if trace.has_error:
            raise RuntimeError(f"{trace.last_error.type}: {trace.last_error.message}")
        return {"reward": float(trace.reward)}


def load(setup: dict[str, Any]) -> tuple[Agents, dict[str, Any]]:
    """Return the episodes that a set-up describes. Raises UserError if its agent cannot be loaded."""
    if "taskset" in setup:
        return Agents(Taskset(setup).play), {}
    return Agents(find_agent(setup["agent"], setup["memory_limit_mb"])), {}


if __name__ == "__main__":
    if not os.access(Path.home(), os.W_OK):  # we are isolated, and programs keep files of their own there
        os.environ.setdefault("HF_HOME", str(Path.home() / ".cache" / "huggingface"))  # can be read, not written
        os.environ["HOME"] = tempfile.gettempdir()
    run(load)
