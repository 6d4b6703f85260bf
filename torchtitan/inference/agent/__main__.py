"""python -m torchtitan.inference.agent --engine NAME --model DIR: starts a foreign engine and brings it its weights."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import sys
import time
from pathlib import Path

from torchtitan.errors import UserError
from torchtitan.inference.agent.engine import EngineOptions, ForeignEngine, load_engine
from torchtitan.inference.engine_folder import engine_folder
from torchtitan.inference.engine_server import write_port_file
from torchtitan.inference.parent_watch import end_with_parent

MADE_UP_TOKEN = "TORCHTITAN_AGENT_TOKEN"
# Together less than what whoever started the agent allows it to take.
ENGINE_GRACE_S = 2.0


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line; exits with code 2 and a message where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan.inference.agent", description=__doc__, allow_abbrev=False,
        epilog="what follows -- goes to the engine's own command line",
    )  # fmt: skip
    parser.add_argument("--engine", required=True, help="vllm or sglang")
    parser.add_argument("--model", required=True, help="Hugging Face checkpoint directory")
    parser.add_argument("--python", default="", help="interpreter that has the engine; default: the installed one")
    parser.add_argument(
        "--route", choices=("auto", "direct", "agent", "engine"), default="auto", help="how it gets them"
    )
    parser.add_argument("--name", default="actor", help="of the actor, in files and logs")
    parser.add_argument("--url", help="of an engine that runs already; none is started then")
    parser.add_argument("--engine-token-env", help="--url: environment variable with that engine's token")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind to, also the engine's")
    parser.add_argument("--port", type=int, default=0, help="port to bind to; 0 takes a free one")
    parser.add_argument("--port-file", type=Path, help="file that gets the port once agent and engine serve")
    parser.add_argument("--log-file", type=Path, default=Path("engine.log"), help="file that gets what the engine says")
    parser.add_argument("--max-sequences", type=int, default=256, help="sequences that generate at a time")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of prompt and completion")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="devices that share it; not for --url")
    parser.add_argument("--memory-gb", type=float, default=0.0, help="memory of the KV cache; 0: the engine's choice")
    parser.add_argument("--device-share", type=float, default=0.0, help="of a GPU's memory; 0: the engine's choice")
    sleep_help = "start it so that it can sleep: 1 keeps its weights in host memory meanwhile, 2 drops them"
    parser.add_argument("--sleep-level", type=int, choices=(0, 1, 2), default=0, help=sleep_help)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="type of the weights")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of one engine worker")
    kv_help = "what running requests do with their KV cache when weights arrive"
    parser.add_argument("--in-flight-kv", choices=("keep", "recompute"), default="keep", help=kv_help)
    update_help = "apply weights while requests run, or let those that have begun finish first (new ones wait)"
    parser.add_argument("--update-mode", choices=("in_flight", "drain"), default="in_flight", help=update_help)
    parser.add_argument("--drain-timeout", type=float, default=5.0, help="drain: seconds until it is done in flight")
    parser.add_argument(
        "--update-timeout",
        dest="update_timeout_s",
        type=float,
        default=60.0,
        help="seconds for each order to the engine",
    )
    parser.add_argument("--startup-timeout", type=float, default=600.0, help="seconds until the engine serves")
    parser.add_argument("--stage-on-device", action="store_true", help="direct: versions are staged on the device")
    parser.add_argument("--disk-path", default="", help="folder for versions on their way; default: in memory")
    parser.add_argument("--activity-file", type=Path, help="bounded file for a note of when the engine stood still")
    parser.add_argument("--token-env", help="environment variable that holds the bearer token; else one is made up")
    parser.add_argument("--parent-pid", type=int, help="exit when this process is gone")
    parser.add_argument("--engine-arguments", default="[]", help="the engine's own command line, as a JSON list")
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.token_env and not os.environ.get(arguments.token_env):
        parser.error(f"--token-env {arguments.token_env}: this environment variable is not set")
    if arguments.engine_token_env and not (arguments.url and os.environ.get(arguments.engine_token_env)):
        parser.error("--engine-token-env is for --url, and names an environment variable that is set")
    timeouts = {
        "drain": arguments.drain_timeout, "update": arguments.update_timeout_s, "startup": arguments.startup_timeout
    }  # fmt: skip
    for name, seconds in timeouts.items():
        if not 0 < seconds < float("inf"):
            parser.error(f"--{name}-timeout must be greater than 0")
    try:
        passed = json.loads(arguments.engine_arguments)
    except ValueError as error:
        parser.error(f"--engine-arguments is not JSON: {error}")
    if not isinstance(passed, list) or not all(isinstance(one, str) for one in passed):
        parser.error("--engine-arguments is a list of strings")
    arguments.passed = [*passed, *arguments.rest]
    return arguments


def make_options(arguments: argparse.Namespace, engine: ForeignEngine, token_env: str, folder: Path) -> EngineOptions:
    """What the engine's entry gets to know. Raises UserError: no such route, or the engine is not installed."""
    from torchtitan.inference.agent.command import find_python

    given = {name: value for name, value in vars(arguments).items() if name in EngineOptions.__dataclass_fields__}
    computed = {
        "python": "" if arguments.url else find_python(engine.name, arguments.python),
        "route": engine.find_route(arguments.route, f"--route {arguments.route}"),
        "port_file": folder / "engine.port",
        "token_env": token_env,
        "parent_pid": os.getpid(),
        "arguments": tuple(arguments.passed),
    }
    return EngineOptions(**{**given, **computed})


async def serve(arguments: argparse.Namespace, folder: Path) -> int:
    """Run engine and agent until SIGTERM, SIGINT or the engine's end; returns the exit code."""
    from torchtitan.inference.actor_server import how_to_connect, said_of_token
    from torchtitan.inference.agent.running import RunningAgent

    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    token_env = arguments.token_env or MADE_UP_TOKEN
    if not arguments.token_env:
        os.environ[MADE_UP_TOKEN] = secrets.token_urlsafe(24)
    engine = load_engine(arguments.engine)
    options = make_options(arguments, engine, token_env, folder)
    agent = RunningAgent(arguments, engine, options, os.environ[token_env])
    ended = asyncio.ensure_future(stopped.wait())
    try:
        starting = asyncio.ensure_future(agent.start(time.monotonic() + arguments.startup_timeout))
        await asyncio.wait({starting, ended}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
            return 0
        port = starting.result()
        write_port_file(arguments.port_file, port)
        token = os.environ[token_env]
        said = said_of_token(arguments.token_env, token)
        print(f"agent of {engine.name} at {agent.engine_url} listening on port {port} ({said})", flush=True)
        if not arguments.parent_pid:
            print(how_to_connect(engine.name, arguments.host, port, arguments.token_env, token), flush=True)
        failure = asyncio.ensure_future(agent.engine_ended())
        await asyncio.wait({failure, ended}, return_when=asyncio.FIRST_COMPLETED)
        if failure.done():
            print(f"error: {failure.result()}", file=sys.stderr, flush=True)
            return 1
        failure.cancel()
        return 0
    finally:
        ended.cancel()
        await agent.close(ENGINE_GRACE_S)


def main(argv: list[str]) -> int:
    """Run the agent; returns the exit code."""
    arguments = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if arguments.parent_pid:
        end_with_parent(arguments.parent_pid)
    try:
        with engine_folder() as folder:
            return asyncio.run(serve(arguments, folder))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
