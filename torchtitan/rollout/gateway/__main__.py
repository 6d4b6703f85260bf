"""python -m torchtitan.rollout.gateway --port-file F --token-env V --parent-pid P: started by a run (process.py)."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

from aiohttp import web

from torchtitan.inference.engine_server import write_port_file
from torchtitan.rollout.gateway.server import GatewayServer
from torchtitan.utils.child_process import end_with_parent


async def serve(host: str, port_file: Path, token: str) -> None:
    """Serve until the run has gone."""
    server = GatewayServer(token)
    # A program that has hung up is not sampled for.
    runner = web.AppRunner(server.application(), access_log=None, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, host, 0)
    await site.start()
    write_port_file(port_file, runner.addresses[0][1])
    await server.gone.wait()
    await runner.cleanup()


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m torchtitan.rollout.gateway", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--token-env", required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    end_with_parent(arguments.parent_pid)
    asyncio.run(serve(arguments.host, arguments.port_file, os.environ[arguments.token_env]))


if __name__ == "__main__":
    main(sys.argv[1:])
