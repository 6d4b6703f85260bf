"""Starts vLLM's server with our worker extension and token, and makes our weight-transfer backend known to its
processes; run by the Python of vLLM's environment:

    python -m torchtitan.inference.engines.vllm.serve --port-file F --token-env NAME [--parent-pid P] -- [OPTIONS]

What stands after `--` is vLLM's and reaches it untouched.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import runpy
import shlex
import sys

from torchtitan.errors import UserError
from torchtitan.inference.serving.middleware import (
    PrefixKeyMiddleware,
    parse_arguments,
    prepare,
    take_over_environment,
    write_port_file,
)

# Where a variable is set already, that counts.
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
FIXED_VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes for pausing and for weights
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",  # /collective_rpc would unpickle what it is sent
}
# With these it would be another engine than the one that the run asks for.
CLEARED_VARIABLES = (
    "VLLM_API_KEY",  # a second token, which nobody sends
    "VLLM_USE_RUST_FRONTEND", "VLLM_RUST_FRONTEND_PATH",  # a server without our middleware
    "VLLM_PLUGINS",  # leaves out the plugins that are not named, such as ours
    "VLLM_DP_*", "VLLM_ELASTIC_EP_*",  # several engines behind one address
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH",
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",  # a request that is sent again would meet its first try
    "VLLM_MAX_N_SEQUENCES", "VLLM_MAX_COMPLETION_PROMPTS",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING",  # weights that are not the run's
    "VLLM_USE_MODELSCOPE", "VLLM_MODEL_REDIRECT_PATH", "VLLM_TEST_*",
    "VLLM_FLOAT32_MATMUL_PRECISION", "VLLM_HUMMING_*",  # arithmetic of another type than inference.dtype
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",  # experts that the router has not chosen
)  # fmt: skip
OWN_OPTIONS = (
    "--middleware", "torchtitan.inference.engines.vllm.serve.VLLMPrefixKeys",
    "--middleware", "torchtitan.inference.serving.middleware.TokenMiddleware",  # the last one is asked first
    "--enable-scale-out",  # tokens in, tokens and their weight versions out
    "--logprobs-mode", "processed_logprobs",  # those that the tokens were sampled with
    "--worker-extension-cls", "torchtitan.inference.engines.vllm.extension.WorkerExtension",
)  # fmt: skip
# vLLM's server as a program: the newer place first.
PROGRAMS = ("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server")
BACKEND = "torchtitan"
SERVER_PID_VARIABLE = "TORCHTITAN_ENGINE_SERVER_PID"


class VLLMPrefixKeys(PrefixKeyMiddleware):
    generate, weights_label = "/inference/v1/generate", "/weight_info"
    pause, resume = "/pause", "/resume"


def register() -> None:
    """Add the backend to vLLM's factory. May be called several times in a process.

    Also the entry point `vllm.general_plugins`, for environments of vLLM in which this package is installed.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # A ValueError says that it is there already.
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(
            BACKEND, "torchtitan.inference.engines.vllm.backend", "ReceivingBackend"
        )


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
    raise UserError(f"{sys.executable} has no vLLM of a supported version; see scripts/install_engine.sh")


def main(argv: list[str]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code."""
    arguments, engine_arguments = parse_arguments("vllm", __doc__, argv)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    take_over_environment(FIXED_VARIABLES, CLEARED_VARIABLES)
    os.environ[SERVER_PID_VARIABLE] = str(os.getpid())
    holding = prepare(arguments)
    port = holding.getsockname()[1]
    program = find_program()
    options = ["--host", arguments.host, "--port", str(port), *OWN_OPTIONS]
    # What was handed through comes last, and so counts.
    sys.argv = [program, *options, *engine_arguments]
    print(f"starting {shlex.join(['python', '-m', *sys.argv])}", flush=True)
    write_port_file(arguments.port_file, port)
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
