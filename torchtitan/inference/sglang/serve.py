"""python -m torchtitan.inference.sglang.serve --port-file F --token-env V -- ARGUMENTS: SGLang's own server.

Run with the Python of SGLang's environment. ARGUMENTS go to SGLang as they are. What this adds: see engine_server.py.
"""

from __future__ import annotations

import os
import sys

from torchtitan.errors import UserError
from torchtitan.inference.engine_server import TokenMiddleware, parse_arguments, prepare, write_port_file


def main(argv: list[str]) -> None:
    """Serve until a signal, or the parent's end."""
    own, theirs = parse_arguments("sglang", __doc__, argv)
    held = prepare(own, whole_group=True)
    port = held.getsockname()[1]

    from sglang.launch_server import run_server
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    arguments = prepare_server_args(["--host", own.host, "--port", str(port), *theirs])
    if getattr(arguments, "tokenizer_worker_num", 1) != 1:
        raise UserError("--tokenizer-worker-num: more than one would serve without asking for the token")
    app.add_middleware(TokenMiddleware)
    write_port_file(own.port_file, port)
    try:
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as failure:
        sys.exit(f"error: {failure}")
