"""python -m torchtitan.inference.sglang.serve --port-file F --token-env V -- ARGUMENTS: SGLang's own server.

Run with the Python of SGLang's environment. ARGUMENTS go to SGLang as they are. What this adds: a free port, told in a
file; a token on every route, from the environment and unknown to SGLang, which says its arguments in its log and to its
clients; an end with the parent.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path

from torchtitan.inference.parent_watch import end_with_parent
from torchtitan.inference.vllm.middleware import TOKEN_ENV_VARIABLE, TokenMiddleware


def main(argv: list[str]) -> None:
    """Serve until a signal, or the parent's end."""
    parser = argparse.ArgumentParser(prog="python -m torchtitan.inference.sglang.serve", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--token-env", required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("arguments", nargs="*")
    own = parser.parse_args(argv)
    end_with_parent(own.parent_pid, whole_group=True)
    os.environ[TOKEN_ENV_VARIABLE] = own.token_env

    # It takes half a minute until SGLang listens. A socket that is bound and does not listen keeps others from being
    # given the port, and lets a server have it that reuses addresses, as SGLang's does.
    held = socket.socket(socket.AF_INET6 if ":" in own.host else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((own.host, 0))
    port = held.getsockname()[1]

    from sglang.launch_server import run_server
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    arguments = prepare_server_args(["--host", own.host, "--port", str(port), *own.arguments])
    if getattr(arguments, "tokenizer_worker_num", 1) != 1:
        sys.exit("error: --tokenizer-worker-num: more than one would serve without asking for the token")
    app.add_middleware(TokenMiddleware)
    partial = own.port_file.with_name(own.port_file.name + ".tmp")
    partial.write_text(f"{port}\n", encoding="ascii")
    partial.replace(own.port_file)
    try:
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
