"""python -m torchtitan.inference.engines.sglang.serve --port-file F --token-env V -- ARGUMENTS: SGLang's own server.

Run with the Python of SGLang's environment. ARGUMENTS go to SGLang as they are. What this adds: see middleware.py.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from torchtitan.errors import UserError
from torchtitan.inference.serving.middleware import (
    PrefixKeyMiddleware,
    TokenMiddleware,
    parse_arguments,
    prepare,
    take_over_environment,
    write_port_file,
)

# Its server in Rust would not ask for our token.
FIXED_VARIABLES = {"SGLANG_RUST_SERVER": "0"}
# With these it would be another engine than the one that the run asks for.
CLEARED_VARIABLES = (
    "SGLANG_API_KEY",
    "SGLANG_RETURN_ORIGINAL_LOGPROB",  # log-probs without the temperature that tokens were sampled with
    "SGLANG_PLUGINS",  # leaves out the plugins that are not named
    "SGLANG_GRPC_PORT",  # a second server, which asks for no token
    "SGLANG_TIMEOUT_KEEP_ALIVE",
    "SGLANG_MAX_NEW_TOKENS_LIMIT", "SGLANG_REQ_WAITING_TIMEOUT", "SGLANG_REQ_RUNNING_TIMEOUT",  # shorter completions
    "SGLANG_MAX_BATCH_REQS_PER_HTTP_REQ",  # the samples of one request
    "SGLANG_CPU_QUANTIZATION", "SGLANG_INT4_WEIGHT", "SGLANG_HUMMING_*",  # weights of another type
    "SGLANG_MAX_THINK_TOKENS",  # ends thoughts by tokens that were not sampled
    "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES",
    "SGLANG_SANITIZE_NAN_LOGITS",  # tokens are sampled from what is no number
    "SGLANG_SIMULATE_*", "SGLANG_TEST_*", "SGLANG_KV_CANARY_*", "SGLANG_DEBUG_REVERT_PR",
    "SGLANG_USE_MODELSCOPE", "SGLANG_EXTERNAL_MODEL_PACKAGE",
)  # fmt: skip
# What Python calls this module in the processes that SGLang starts.
IN_A_CHILD = "__mp_main__"
EVERYTHING = 2**62


class SGLangPrefixKeys(PrefixKeyMiddleware):
    generate, weights_label = "/generate", "/model_info"
    pause, resume = "/pause_generation", "/continue_generation"


def forget_prefixes(result: Any, scheduler: Any, order: Any) -> Any:
    """After SGLang's scheduler has retracted its requests: drop what they had computed, which they would find again.

    Its own flush refuses while requests wait. Raises RuntimeError, which ends the scheduler, where something is left.
    """
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    cache = scheduler.tree_cache
    if order.mode == "retract" and not cache.disable:
        cache.evict(EvictParams(EVERYTHING, EVERYTHING, EVERYTHING))
        left = cache.total_size()  # of a model with several kinds of layers, one number for each
        if any(left) if isinstance(left, tuple) else left:
            raise RuntimeError(f"{left} tokens of the prefix cache could not be dropped before new weights come")
    return result


def register_hook() -> None:
    """Called in each process of SGLang, before its scheduler is made."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.pause_generation", forget_prefixes)


def main(argv: list[str]) -> None:
    """Serve until a signal, or the parent's end."""
    own_arguments, engine_arguments = parse_arguments("sglang", __doc__, argv)
    take_over_environment(FIXED_VARIABLES, CLEARED_VARIABLES)
    held = prepare(own_arguments, whole_group=True)
    port = held.getsockname()[1]

    from sglang.launch_server import run_server
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    arguments = prepare_server_args(["--host", own_arguments.host, "--port", str(port), *engine_arguments])
    if getattr(arguments, "tokenizer_worker_num", 1) != 1:
        raise UserError("--tokenizer-worker-num: more than one would serve without asking for the token")
    app.add_middleware(SGLangPrefixKeys)
    app.add_middleware(TokenMiddleware)  # the last one is asked first
    write_port_file(own_arguments.port_file, port)
    try:
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == IN_A_CHILD:
    register_hook()
elif __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as failure:
        sys.exit(f"error: {failure}")
