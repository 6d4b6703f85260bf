"""Starts vLLM's server with our weight-transfer backend; run by the Python of vLLM's environment:

    python -m torchtitan.inference.vllm.serve --port-file F --token-env NAME [--parent-pid P] -- [vLLM's own options]

What stands after `--` is vLLM's and reaches it untouched.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import shlex
import socket
import sys
from pathlib import Path

from torchtitan.errors import UserError
from torchtitan.inference.parent_watch import end_with_parent
from torchtitan.inference.vllm.middleware import TOKEN_ENV_VARIABLE
from torchtitan.inference.vllm.plugin import SERVER_PID_VARIABLE

# Where a variable is set already, that counts.
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes for pausing and for weights
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
OWN_OPTIONS = (
    "--middleware", "torchtitan.inference.vllm.middleware.TokenMiddleware",
    "--enable-scale-out",  # tokens in, tokens and their weight versions out
    "--logprobs-mode", "processed_logprobs",  # those that the tokens were sampled with
    "--worker-extension-cls", "torchtitan.inference.vllm.extension.WorkerExtension",
)  # fmt: skip
DIRECT_OPTIONS = ("--weight-transfer-config", '{"backend": "torchtitan"}')
# vLLM's server as a program: the newer place first.
PROGRAMS = ("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server")


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own command line and vLLM's. Exits with code 2 where ours is wrong."""
    ours, theirs = argv, []
    if "--" in argv:
        ours, theirs = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    parser = argparse.ArgumentParser(prog="python -m torchtitan.inference.vllm.serve", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to bind to")
    parser.add_argument("--port", type=int, default=0, help="port to bind to; 0 takes a free one")
    parser.add_argument("--port-file", type=Path, help="file that gets the port")
    parser.add_argument("--token-env", required=True, help="environment variable with the token that all routes need")
    parser.add_argument("--parent-pid", type=int, help="end when this process is gone")
    parser.add_argument("--stock", action="store_true", help="without our weight-transfer backend")
    arguments = parser.parse_args(ours)
    if not os.environ.get(arguments.token_env):
        parser.error(f"--token-env {arguments.token_env}: this environment variable is not set")
    return arguments, theirs


def reserve(host: str, port: int) -> socket.socket:
    """A socket that holds a port of `host` for vLLM, which binds to it as well (both may: this one never listens)."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    holding = socket.socket(family, socket.SOCK_STREAM)
    holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holding.bind(address)
    return holding


def find_program() -> str:
    """The module that is vLLM's server. Raises UserError where there is none."""
    if importlib.util.find_spec("vllm") is not None:
        for module in PROGRAMS:
            try:
                found = importlib.util.find_spec(module)
            except ModuleNotFoundError:
                continue
            if found is not None:
                return module
    raise UserError(f"{sys.executable} has no vLLM that is known here; see scripts/install_engine.sh")


def main(argv: list[str]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code."""
    arguments, theirs = parse_arguments(argv)
    if arguments.parent_pid:
        end_with_parent(arguments.parent_pid)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ[TOKEN_ENV_VARIABLE] = arguments.token_env
    os.environ[SERVER_PID_VARIABLE] = str(os.getpid())
    try:
        holding = reserve(arguments.host, arguments.port)
    except OSError as error:
        raise UserError(f"cannot listen on {arguments.host}:{arguments.port}: {error}") from None
    port = holding.getsockname()[1]
    program = find_program()
    options = ["--host", arguments.host, "--port", str(port), *OWN_OPTIONS]
    # What was handed through comes last, and so counts.
    sys.argv = [program, *options, *(() if arguments.stock else DIRECT_OPTIONS), *theirs]
    print(f"starting {shlex.join(['python', '-m', *sys.argv])}", flush=True)
    if arguments.port_file is not None:
        partial = arguments.port_file.with_name(arguments.port_file.name + ".tmp")
        partial.write_text(f"{port}\n", encoding="ascii")
        partial.replace(arguments.port_file)
    # Not as __main__ of sys.modules: vLLM's processes import that again, and this file is the lighter one.
    runpy.run_module(program, run_name="__main__", alter_sys=False)
    holding.close()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as failure:
        print(f"error: {failure}", file=sys.stderr)
        sys.exit(failure.exit_code)
