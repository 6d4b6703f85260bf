"""python -m torchtitan.inference.embedded --model DIR: an inference actor with an HTTP interface."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import os
import secrets
import signal
import sys
from pathlib import Path

from torchtitan.errors import UserError
from torchtitan.inference.client import base_url
from torchtitan.inference.engine_server import write_port_file
from torchtitan.inference.parent_watch import end_with_parent
from torchtitan.utils.cores import usable_cores


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line; exits with code 2 and a message where it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m torchtitan.inference.embedded", description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face checkpoint directory")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind to")
    parser.add_argument("--port", type=int, default=0, help="port to bind to; 0 takes a free one")
    parser.add_argument("--port-file", type=Path, help="file that gets the port once the server listens")
    parser.add_argument("--max-sequences", type=int, default=256, help="sequences that generate at a time")
    parser.add_argument(
        "--max-length", type=int, default=0, help="tokens of prompt and completion; 0: the model's limit"
    )
    parser.add_argument("--cache-mb", type=int, default=0, help="memory limit of the KV cache; 0: half of what is free")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="type of weights and compute"
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: all of this process's cores")
    parser.add_argument("--cores", help="cores to run on, such as 0 or 2,3")
    kv_help = "what running requests do with their KV cache when weights arrive"
    parser.add_argument("--in-flight-kv", choices=("keep", "recompute"), default="keep", help=kv_help)
    update_help = "apply weights while requests run, or let those that have begun finish first (new ones wait)"
    parser.add_argument("--update-mode", choices=("in_flight", "drain"), default="in_flight", help=update_help)
    parser.add_argument("--drain-timeout", type=float, default=5.0, help="drain: seconds until it is done in flight")
    parser.add_argument("--activity-file", type=Path, help="bounded file for a note of when the engine worked")
    parser.add_argument("--exact", action="store_true", help="rescore finished completions with the trainer's forward")
    verify_help = "versions from one check of the weights in use against the trainer's checksums to the next; 0: none"
    parser.add_argument("--verify-every", type=int, default=1, help=verify_help)
    parser.add_argument("--token-env", help="environment variable that holds the bearer token; else one is made up")
    parser.add_argument("--no-token", action="store_true", help="let everybody on this machine in (loopback only)")
    parser.add_argument("--require-version", action="store_true", help="answer 503 until a first version was applied")
    parser.add_argument("--parent-pid", type=int, help="exit when this process is gone")
    arguments = parser.parse_args(argv)
    if arguments.max_sequences < 1:
        parser.error("--max-sequences must be at least 1")
    if min(arguments.max_length, arguments.threads, arguments.cache_mb, arguments.verify_every) < 0:
        parser.error("--max-length, --threads, --cache-mb and --verify-every must be at least 0")
    if not 0 < arguments.drain_timeout < float("inf"):
        parser.error("--drain-timeout must be greater than 0")
    if arguments.no_token and arguments.token_env:
        parser.error("--no-token and --token-env exclude each other")
    if arguments.no_token and not is_loopback(arguments.host):
        parser.error(f"--no-token is for loopback addresses, not for --host {arguments.host}")
    if arguments.token_env and not os.environ.get(arguments.token_env):
        parser.error(f"--token-env {arguments.token_env}: this environment variable is not set")
    return arguments


def is_loopback(host: str) -> bool:
    """Whether `host` can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def pin(cores: str | None, threads: int) -> int:
    """Restrict this process to cores and threads; returns the number of threads."""
    if cores:
        if not hasattr(os, "sched_setaffinity"):
            raise UserError("--cores: this platform cannot pin a process to cores")
        try:
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
        except (ValueError, OSError) as error:
            raise UserError(f"--cores {cores}: {error}") from None
    threads = threads or len(usable_cores())
    # Read when numpy and torch are first imported.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    return threads


async def serve(arguments: argparse.Namespace, threads: int) -> int:
    """Load, listen, and run until SIGTERM, SIGINT or the engine's failure; returns the exit code."""
    import psutil
    import torch

    from torchtitan.inference.actor_server import how_to_connect, said_of_token
    from torchtitan.inference.embedded.engine import Engine
    from torchtitan.inference.embedded.server import EngineServer
    from torchtitan.models import load_policy
    from torchtitan.models.batch_invariance import said_of

    torch.set_num_threads(threads)
    policy = load_policy(arguments.model, getattr(torch, arguments.dtype))
    cache_bytes = arguments.cache_mb * 2**20 or psutil.virtual_memory().available // 2
    max_length = arguments.max_length or policy.args.max_position_embeddings
    engine = Engine(
        policy,
        arguments.max_sequences,
        max_length,
        in_flight_kv=arguments.in_flight_kv,
        exact=arguments.exact,
        cache_bytes=cache_bytes,
    )
    said = None if arguments.exact else said_of(engine.sizes, "log-probs")
    if said is not None:
        logging.getLogger(__name__).warning(said)
    token = None
    if not arguments.no_token:
        token = os.environ[arguments.token_env] if arguments.token_env else secrets.token_urlsafe(24)
    model = Path(arguments.model).name
    server = EngineServer(
        engine,
        model,
        token,
        threads,
        arguments.require_version,
        arguments.host,
        drain_timeout_s=arguments.drain_timeout if arguments.update_mode == "drain" else 0.0,
        activity_file=arguments.activity_file,
        verify_every=arguments.verify_every,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stopped.set)
    port = await server.start(arguments.host, arguments.port)
    write_port_file(arguments.port_file, port)
    url = base_url(arguments.host, port)
    print(f"embedded engine listening on {url} ({said_of_token(arguments.token_env, token)})", flush=True)
    if not arguments.parent_pid:
        print(how_to_connect("embedded", arguments.host, port, arguments.token_env, token), flush=True)
    await server.stopped.wait()
    await server.close()
    return 0 if server.loop.failure is None else 1


def main(argv: list[str]) -> int:
    """Run the server; returns the exit code."""
    arguments = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if arguments.parent_pid:
        end_with_parent(arguments.parent_pid)
    try:
        code = asyncio.run(serve(arguments, pin(arguments.cores, arguments.threads)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
