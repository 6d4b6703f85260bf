"""python -m torchtitan.inference.engines.embedded --model DIR: an inference actor with an HTTP interface."""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import sys

from torchtitan.inference.actor_client import Offers, base_url
from torchtitan.inference.serving.command_line import actor_parser, announce, check_shared, run_actor, set_on_signal
from torchtitan.utils.machine import count_cores, host_memory, leave, sleep_between_regions


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line; exits with code 2 and a message where it is wrong."""
    parser = actor_parser("torchtitan.inference.engines.embedded", __doc__)
    length_help = "tokens of prompt and completion; 0: the model's limit"
    parser.add_argument("--max-length", type=int, default=0, help=length_help)
    parser.add_argument("--cache-mb", type=int, default=0, help="memory limit of the KV cache; 0: half of what is free")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: all of this process's cores")
    parser.add_argument("--exact", action="store_true", help="rescore finished completions with the trainer's forward")
    verify_help = "versions from one check of the weights in use against the trainer's checksums to the next; 0: none"
    parser.add_argument("--verify-every", type=int, default=1, help=verify_help)
    parser.add_argument("--require-version", action="store_true", help="answer 503 until a first version was applied")
    arguments = parser.parse_args(argv)
    check_shared(parser, arguments)
    if min(arguments.max_length, arguments.threads, arguments.cache_mb, arguments.verify_every) < 0:
        parser.error("--max-length, --threads, --cache-mb and --verify-every must be at least 0")
    return arguments


def restrict(threads: int) -> int:
    """Have this process compute with so many threads, 0: as many as it has cores; returns their number."""
    threads = threads or count_cores()
    # Read when numpy and torch are first imported.
    sleep_between_regions()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    return threads


async def serve(arguments: argparse.Namespace, threads: int) -> int:
    """Load, listen, and run until SIGTERM, SIGINT or the engine's failure; returns the exit code."""
    import torch

    from torchtitan.inference.engines.embedded.engine import Engine
    from torchtitan.inference.engines.embedded.server import EngineServer
    from torchtitan.inference.serving.joining import Guest, offers
    from torchtitan.models.hf_checkpoint import load_policy
    from torchtitan.models.layers.batch_invariance import size_message

    torch.set_num_threads(threads)
    policy = load_policy(arguments.model, getattr(torch, arguments.dtype))
    cache_bytes = arguments.cache_mb * 2**20 or host_memory().available // 2
    max_length = arguments.max_length or policy.args.max_position_embeddings
    engine = Engine(
        policy, arguments.max_sequences, max_length,
        in_flight_kv=arguments.in_flight_kv, exact=arguments.exact, cache_bytes=cache_bytes,
    )  # fmt: skip
    size_difference = None if arguments.exact else size_message(engine.sizes, "log-probs")
    if size_difference is not None:
        logging.getLogger(__name__).warning(size_difference)
    token = os.environ[arguments.token_env] if arguments.token_env else secrets.token_urlsafe(24)
    server = EngineServer(
        engine, token, threads, arguments.require_version, arguments.host, arguments.drain_timeout_s,
        arguments.activity_file, arguments.verify_every,
    )  # fmt: skip
    server.describe = lambda with_weights: Offers(offers(arguments, "embedded", with_weights))
    set_on_signal(server.stopped)
    port = await server.start(arguments.host, arguments.port)
    listening = f"embedded engine listening on {base_url(arguments.host, port)}"
    announce(arguments, "embedded", listening, port, token)
    try:
        if arguments.join:
            await Guest(arguments, offers(arguments, "embedded"), port, token).stay(server.stopped, server)
        else:
            await server.stopped.wait()
    finally:
        await server.close()
    return 0 if server.loop.failure is None else 1


def main(argv: list[str]) -> int:
    """Run the server; returns the exit code."""
    arguments = parse_arguments(argv)
    return run_actor(arguments, lambda: serve(arguments, restrict(arguments.threads)))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
