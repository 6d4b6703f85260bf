"""vLLM beside an agent: how its server is started, and how weights get into it."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import psutil

from torchtitan.inference.agent.control import EngineControl
from torchtitan.inference.agent.engine import EngineOptions, ForeignEngine
from torchtitan.inference.vllm.control import VLLMControl
from torchtitan.inference.vllm.plugin import BACKEND
from torchtitan.utils.machine import has_gpu

if TYPE_CHECKING:
    from torchtitan.inference.agent.applier import WeightLoader

GIGABYTE = 2**30
# Where its sockets lie, unless the environment says so already.
SOCKETS = "VLLM_RPC_BASE_PATH"
SLEEP_MODE = "--enable-sleep-mode"
# Of its Hugging Face configuration: products of the head are summed to fp32 logits, as the trainer's are. Rounding them
# to bfloat16 alone moves a sampled token's log-prob by some 0.03 nats. On a CPU it has packed the head's weight away.
EXACT_HEAD = {"head_dtype": "float32"}
CPU_ARGUMENTS = (
    # Nothing is compiled: on a CPU that takes longer than what it saves in a run of minutes.
    "--enforce-eager",
    # A seeded request whose prompt is computed in parts ends vLLM 0.32 on a CPU ("CPU Generator does not use offset").
    "--no-enable-chunked-prefill",
    # Requests share whole blocks of their prompts. A turn of a conversation adds a part of what vLLM would take, 128
    # tokens; it can have no fewer than 32 on a CPU.
    "--block-size", "32",
)  # fmt: skip


class VLLM(ForeignEngine):
    """See agent.engine.ForeignEngine."""

    name = "vllm"
    routes = ("direct", "agent")

    def server(self, options: EngineOptions) -> tuple[list[str], dict[str, str]]:
        theirs = [
            "--model", options.model,
            "--dtype", options.dtype,
            "--tensor-parallel-size", str(options.tensor_parallel_size),
            "--max-model-len", str(options.max_length),
            "--max-num-seqs", str(options.max_sequences),
            # Requests say all that matters; the checkpoint's own defaults would come on top.
            "--generation-config", "vllm",
            "--disable-uvicorn-access-log",
        ]  # fmt: skip
        if options.route == "direct":
            theirs += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
        if has_gpu() and options.dtype != "float32":
            theirs += ["--hf-overrides", json.dumps(EXACT_HEAD)]
        if options.sleep_level:
            theirs.append(SLEEP_MODE)
        if options.device_share:
            theirs += ["--gpu-memory-utilization", f"{options.device_share:.3f}"]
        memory_gb = options.memory_gb
        # Its /collective_rpc would unpickle what it is sent, whatever this shell's environment says.
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
        return theirs, environment

    def control(self, url: str, token: str, options: EngineOptions) -> EngineControl:
        return VLLMControl(
            url, token, options.update_timeout_s, options.in_flight_kv,
            kept_tokens="--return-sampling-mask" in options.arguments,
            sleeps=options.sleep_level > 0 or SLEEP_MODE in options.arguments,
            repacks_heads=bool(options.python),
            looks=options.verify_every > 0 and options.route == "direct",
        )  # fmt: skip

    def special_loader(self, control: EngineControl, options: EngineOptions) -> WeightLoader:
        from torchtitan.inference.vllm.direct import DirectLoader

        assert isinstance(control, VLLMControl)
        timeout_s, on_device = options.update_timeout_s, options.stage_on_device
        return DirectLoader(control, options.tensor_parallel_size, timeout_s, on_device, options.verify_every)


def default_memory_gb() -> float:
    """KV cache of an actor on a CPU, where nothing else is said: an eighth of what is free, at most 4 GiB."""
    return min(4.0, psutil.virtual_memory().available / GIGABYTE / 8)


ENGINE = VLLM()
