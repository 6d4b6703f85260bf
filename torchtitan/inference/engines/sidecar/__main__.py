"""python -m torchtitan.inference.engines.sidecar --engine NAME --model DIR: starts an engine's server and gives it its
weights."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import sys
import time
from pathlib import Path
from typing import Any

from torchtitan.inference.engines.sidecar.descriptor import load_foreign
from torchtitan.inference.engines.sidecar.foreign_engine import EngineOptions, ForeignEngine
from torchtitan.inference.serving.command_line import actor_parser, announce, check_shared, run_actor, set_on_signal
from torchtitan.inference.serving.middleware import engine_folder
from torchtitan.utils.machine import leave

MADE_UP_TOKEN = "TORCHTITAN_AGENT_TOKEN"
# All of the shutdown must take less time than the agent's supervisor allows.
ENGINE_GRACE_S = 2.0


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; exits with code 2 and a message if it is wrong."""
    passing = "what follows -- goes to the engine's own command line"
    parser = actor_parser("torchtitan.inference.engines.sidecar", __doc__, passing)
    parser.add_argument("--engine", required=True, help="its folder in torchtitan/inference/engines")
    parser.add_argument("--python", default="", help="interpreter that has the engine; default: the installed one")
    routes = ("auto", "direct", "agent")
    parser.add_argument("--route", choices=routes, default="auto", help="how weights get into the engine")
    parser.add_argument("--name", default="actor", help="of the actor, in files and logs")
    parser.add_argument("--url", help="of an engine that runs already; none is started then")
    parser.add_argument("--engine-token-env", help="--url: environment variable with that engine's token")
    parser.add_argument("--log-file", type=Path, default=Path("engine.log"), help="file that gets what the engine says")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of prompt and completion")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="devices that share it; not for --url")
    parser.add_argument("--memory-gb", type=float, default=0.0, help="memory of the KV cache; 0: the engine's choice")
    parser.add_argument("--device-share", type=float, default=0.0, help="of a GPU's memory; 0: the engine's choice")
    sleep_help = "start it so that it can sleep: 1 keeps its weights in host memory meanwhile, 2 drops them"
    parser.add_argument("--sleep-level", type=int, choices=(0, 1, 2), default=0, help=sleep_help)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of one engine worker")
    update_help = "seconds for each order to the engine"
    parser.add_argument("--update-timeout", dest="update_timeout_s", type=float, default=60.0, help=update_help)
    startup_help = "seconds until it serves"
    parser.add_argument("--startup-timeout", dest="startup_timeout_s", type=float, default=600.0, help=startup_help)
    parser.add_argument("--stage-on-device", action="store_true", help="direct: versions are staged on the device")
    verify_help = "direct, vllm: versions from one look at the weights in use to the next; 0: none"
    parser.add_argument("--verify-every", type=int, default=0, help=verify_help)
    parser.add_argument("--disk-path", default="", help="folder for versions on their way; default: in memory")
    parser.add_argument("--engine-arguments", default="[]", help="the engine's own command line, as a JSON list")
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    check_shared(parser, arguments)
    if arguments.engine_token_env and not (arguments.url and os.environ.get(arguments.engine_token_env)):
        parser.error("--engine-token-env is for --url, and names an environment variable that is set")
    for name in ("update", "startup"):
        if not 0 < getattr(arguments, f"{name}_timeout_s") < float("inf"):
            parser.error(f"--{name}-timeout must be greater than 0")
    try:
        passed = json.loads(arguments.engine_arguments)
    except ValueError as error:
        parser.error(f"--engine-arguments is not JSON: {error}")
    if not isinstance(passed, list) or not all(isinstance(word, str) for word in passed):
        parser.error("--engine-arguments is a list of strings")
    arguments.passed = [*passed, *arguments.rest]
    return arguments


def make_options(arguments: argparse.Namespace, engine: ForeignEngine, token_env: str, folder: Path) -> EngineOptions:
    """Return what the engine's entry has to know. Raises UserError if the route does not exist or the engine is not
    installed."""
    from torchtitan.inference.engines.sidecar.server import UnusableEngine
    from torchtitan.inference.engines.sidecar.sidecar_process import find_python

    wrong = [] if arguments.url else engine.wrong_options(arguments.passed)
    if wrong:
        raise UnusableEngine("; ".join(wrong))
    given = {name: value for name, value in vars(arguments).items() if name in EngineOptions.__dataclass_fields__}
    computed = {
        "python": "" if arguments.url else find_python(engine.name, arguments.python),
        "route": engine.find_route(arguments.route),
        "port_file": folder / "engine.port",
        "token_env": token_env,
        "parent_pid": os.getpid(),
        "arguments": tuple(arguments.passed),
    }
    return EngineOptions(**{**given, **computed})


async def serve(arguments: argparse.Namespace, folder: Path) -> int:
    """Run engine and agent until SIGTERM, SIGINT or the engine's end. Returns the exit code."""
    from torchtitan.inference.engines.sidecar.server import RunningAgent

    stopped = asyncio.Event()
    set_on_signal(stopped)
    token_env = arguments.token_env or MADE_UP_TOKEN
    if not arguments.token_env:
        os.environ[MADE_UP_TOKEN] = secrets.token_urlsafe(24)
    engine = load_foreign(arguments.engine)
    options = make_options(arguments, engine, token_env, folder)
    agent = RunningAgent(arguments, engine, options, os.environ[token_env])
    ended: asyncio.Future[Any] = asyncio.ensure_future(stopped.wait())
    try:
        starting = asyncio.ensure_future(agent.start(time.monotonic() + arguments.startup_timeout_s))
        await asyncio.wait({starting, ended}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
            return 0
        port = starting.result()
        listening = f"agent of {engine.name} at {agent.engine_url} listening on port {port}"
        announce(arguments, engine.name, listening, port, os.environ[token_env])
        failure = asyncio.ensure_future(agent.engine_ended())
        if arguments.join:
            ended = asyncio.ensure_future(agent.stay_in_run(stopped, port))
        await asyncio.wait({failure, ended}, return_when=asyncio.FIRST_COMPLETED)
        if failure.done():
            print(f"error: {failure.result()}", file=sys.stderr, flush=True)
            return 1
        failure.cancel()
        ended.result()
        return 0
    finally:
        ended.cancel()
        await agent.close(ENGINE_GRACE_S)


def main(argv: list[str]) -> int:
    """Run the agent; returns the exit code."""
    arguments = parse_arguments(argv)

    async def work() -> int:
        with engine_folder() as folder:
            return await serve(arguments, folder)

    return run_actor(arguments, work)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
