"""vLLM beside an agent: how its server is started, and how weights get into it."""

from __future__ import annotations

import os

import psutil

from torchtitan.inference.agent.control import EngineControl
from torchtitan.inference.agent.engine import EngineOptions, Route
from torchtitan.inference.agent.hand_over import HandOver
from torchtitan.inference.vllm.control import VLLMControl
from torchtitan.inference.vllm.hand_over import DirectHandOver
from torchtitan.utils.gpus import has_gpu

GIGABYTE = 2**30
# Its own way of taking weights. Options that are handed through come after it, and so count.
ENGINE_TRANSFER = ("--weight-transfer-config", '{"backend": "nccl"}')
# Where its sockets lie, unless somebody has said that already.
SOCKETS = "VLLM_RPC_BASE_PATH"
SLEEP_MODE = "--enable-sleep-mode"
CPU_ARGUMENTS = (
    # Nothing is compiled: on a CPU that takes longer than what it saves in a run of minutes.
    "--enforce-eager",
    # A seeded request whose prompt is computed in parts ends vLLM 0.32 on a CPU ("CPU Generator does not use offset").
    "--no-enable-chunked-prefill",
)


class VLLM:
    """See agent.engine.ForeignEngine."""

    name = "vllm"
    routes: tuple[Route, ...] = ("direct", "agent", "engine")

    def command(self, options: EngineOptions) -> tuple[list[str], dict[str, str]]:
        own = [
            options.python, "-m", "torchtitan.inference.vllm.serve",
            "--host", options.host,
            "--port-file", str(options.port_file),
            "--token-env", options.token_env,
            "--parent-pid", str(options.parent_pid),
            *(() if options.route == "direct" else ("--stock",)),
            "--",
        ]  # fmt: skip
        theirs = [
            "--model", options.model,
            "--dtype", options.dtype,
            "--tensor-parallel-size", str(options.tensor_parallel_size),
            "--max-model-len", str(options.max_length),
            "--max-num-seqs", str(options.max_sequences),
            # Requests say all that matters; the checkpoint's own defaults would come on top.
            "--generation-config", "vllm",
            "--disable-uvicorn-access-log",
            *(ENGINE_TRANSFER if options.route == "engine" else ()),
        ]  # fmt: skip
        if options.sleep_level:
            theirs.append(SLEEP_MODE)
        if options.device_share:
            theirs += ["--gpu-memory-utilization", f"{options.device_share:.3f}"]
        memory_gb = options.memory_gb
        # Its /collective_rpc would unpickle what it is sent, whoever asked for that in this shell.
        environment = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "0"}
        if SOCKETS not in os.environ:
            environment[SOCKETS] = str(options.folder)
        if not has_gpu():
            # vLLM would have every actor on the same cores, and take nearly all of the machine's memory for each.
            environment["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            memory_gb = options.memory_gb or default_memory_gb()
            theirs += CPU_ARGUMENTS
        if memory_gb:
            theirs += ["--kv-cache-memory-bytes", str(int(memory_gb * GIGABYTE))]
        return [*own, *theirs, *options.arguments], environment

    def control(self, url: str, token: str, options: EngineOptions) -> EngineControl:
        masks = "--return-sampling-mask" in options.arguments
        sleeps = options.sleep_level > 0 or SLEEP_MODE in options.arguments
        return VLLMControl(url, token, options.update_timeout_s, options.in_flight_kv, kept_tokens=masks, sleeps=sleeps)

    def hand_over(self, control: EngineControl, options: EngineOptions) -> HandOver:
        assert isinstance(control, VLLMControl)
        if options.route == "direct":
            return DirectHandOver(control, options.host, options.update_timeout_s, options.stage_on_device)
        if options.route == "engine":
            from torchtitan.inference.vllm.collective import CollectiveHandOver

            return CollectiveHandOver(control, options)
        from torchtitan.inference.vllm.disk import VLLMDiskHandOver

        return VLLMDiskHandOver(control, options, ours=bool(options.python))


def default_memory_gb() -> float:
    """KV cache of an actor on a CPU, where nothing else is said: an eighth of what is free, at most 4 GiB."""
    return min(4.0, psutil.virtual_memory().available / GIGABYTE / 8)


ENGINE = VLLM()
