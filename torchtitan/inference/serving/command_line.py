"""What the programs of all actors (`python -m torchtitan.inference.engines.embedded` and `.sidecar`) share: command
line, token, port and messages."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.errors import UserError
from torchtitan.inference.actor_client import TOKEN_VARIABLE, base_url
from torchtitan.inference.serving.middleware import write_port_file
from torchtitan.utils.child_process import end_with_parent
from torchtitan.utils.logs import log_to
from torchtitan.utils.machine import is_loopback, raise_descriptor_limit
from torchtitan.weight_sync.registry.guests import NAME
from torchtitan.weight_sync.wire.handshake import OWN
from torchtitan.weight_sync.wire.runtime import ProtocolError, parse_address

if TYPE_CHECKING:
    from torchtitan.config.job_config import JobConfig

HOST = "127.0.0.1"
"""Where the actors that a run starts listen: they are on rank 0's machine, which alone asks them"""


def actor_parser(module: str, description: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with the shared options; check_shared() checks their values."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, epilog=epilog, allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="Hugging Face checkpoint directory")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind to, also a foreign engine's")
    parser.add_argument("--port", type=int, default=0, help="port to bind to; 0 takes a free one")
    parser.add_argument("--port-file", type=Path, help="file that gets the port once requests are served")
    parser.add_argument("--max-sequences", type=int, default=256, help="sequences that generate at a time")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="type of the weights")
    kv_help = "what running requests do with their KV cache when weights arrive"
    parser.add_argument("--in-flight-kv", choices=("keep", "recompute"), default="keep", help=kv_help)
    update_help = "apply weights while requests run, or let those that have begun finish first (new ones wait)"
    parser.add_argument("--update-mode", choices=("in_flight", "drain"), default="in_flight", help=update_help)
    parser.add_argument("--drain-timeout", type=float, default=5.0, help="drain: seconds until it is done in flight")
    parser.add_argument("--activity-file", type=Path, help="bounded file for a note of when the engine worked")
    parser.add_argument("--token-env", help="environment variable that holds the bearer token; else one is generated")
    parser.add_argument("--parent-pid", type=int, help="exit when this process is gone")
    join_help = f"HOST:PORT of a run's registry: join it by itself; {TOKEN_VARIABLE} is the token that the run has, too"
    parser.add_argument("--join", help=join_help)
    parser.add_argument("--join-as", help="name in that run; default: this machine's and a random one")
    parser.add_argument("--join-for", type=float, default=600.0, help="end after so many seconds without a run")
    leave_help = "seconds after SIGTERM in which what was begun is finished, and answered"
    parser.add_argument("--leave-within", type=float, default=25.0, help=leave_help)
    return parser


def check_shared(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Exit with code 2 and a message if a shared option is wrong. Adds `drain_timeout_s`, which is 0 without a
    drain."""
    if arguments.max_sequences < 1:
        parser.error("--max-sequences must be at least 1")
    if not 0 < arguments.drain_timeout < float("inf"):
        parser.error("--drain-timeout must be greater than 0")
    if arguments.token_env and not os.environ.get(arguments.token_env):
        parser.error(f"--token-env {arguments.token_env}: this environment variable is not set")
    if arguments.join:
        _check_joining(parser, arguments)
    arguments.drain_timeout_s = arguments.drain_timeout if arguments.update_mode == "drain" else 0.0


def _check_joining(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    try:
        registry, _ = parse_address(arguments.join)
    except ProtocolError as error:
        parser.error(f"--join: {error}")
    arguments.token_env = arguments.token_env or TOKEN_VARIABLE
    if not os.environ.get(arguments.token_env):
        parser.error(f"--join: set {arguments.token_env} to the token that the run has in {TOKEN_VARIABLE}")
    if is_loopback(arguments.host) and not is_loopback(registry):
        parser.error("--join: --host has to be an address of this machine that the trainer reaches, such as 0.0.0.0")
    if min(arguments.join_for, arguments.leave_within) <= 0:
        parser.error("--join-for and --leave-within must be greater than 0")
    arguments.require_version = True
    arguments.join_as = arguments.join_as or f"guest-{socket.gethostname()[:48]}-{secrets.token_hex(4)}"
    if not NAME.fullmatch(arguments.join_as):
        parser.error(f"--join-as: up to 64 letters, digits, `_`, `.` and `-`, which do not begin with {OWN}")


def run_actor(arguments: argparse.Namespace, work: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run `work` in an asyncio loop and return the exit code. A UserError is printed as one line."""
    log_to()
    raise_descriptor_limit()
    if arguments.parent_pid:
        end_with_parent(arguments.parent_pid)
    try:
        return asyncio.run(work())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def set_on_signal(event: asyncio.Event) -> None:
    """Make SIGTERM and SIGINT set `event`."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, event.set)


def announce(arguments: argparse.Namespace, backend: str, listening: str, port: int, token: str) -> None:
    """Report the port, and print where the actor listens. If a person started it by hand, also print the options with
    which a run finds it, and its token."""
    write_port_file(arguments.port_file, port)
    variable = arguments.token_env
    print(f"{listening} (token {f'from {variable}' if variable else token})", flush=True)
    if arguments.parent_pid or arguments.join:
        return
    host = socket.gethostname() if arguments.host in ("0.0.0.0", "::") else arguments.host
    hint = f"for the run: --inference.backend {backend} --inference.servers {base_url(host, port)}"
    if variable == TOKEN_VARIABLE:
        hint += f", with the same {TOKEN_VARIABLE}"
    else:
        hint += f", after: export {TOKEN_VARIABLE}=" + (f'"${variable}"' if variable else token)
    print(hint, flush=True)


def shared_command(module: str, config: JobConfig, port_file: Path) -> list[str]:
    """Return the beginning of the command line of an actor that a run starts. The actor writes its port to
    `port_file`."""
    return [
        sys.executable, "-m", module,
        *shared_settings(config),
        "--host", HOST,
        "--port", "0",
        "--port-file", str(port_file),
        "--token-env", TOKEN_VARIABLE,
        "--parent-pid", str(os.getpid()),
    ]  # fmt: skip


def shared_settings(config: JobConfig) -> list[str]:
    """Return the options from a run's configuration for every actor, including actors that the run did not start."""
    inference = config.inference
    return [
        "--model", config.model.hf_assets_path,
        "--max-sequences", str(inference.max_sequences),
        "--max-length", str(config.training.seq_len),
        "--dtype", inference.dtype,
        "--in-flight-kv", inference.in_flight_kv,
        "--update-mode", inference.update_mode,
        "--drain-timeout", str(inference.drain_timeout_s),
    ]  # fmt: skip
