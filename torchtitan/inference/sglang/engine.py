"""SGLang beside an agent: how its server is started, and how weights get into it."""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from pathlib import Path

from torchtitan.inference.agent.control import EngineControl
from torchtitan.inference.agent.engine import EngineOptions, ForeignEngine
from torchtitan.inference.sglang.control import SGLangControl
from torchtitan.utils.machine import has_gpu, numa_nodes, usable_cores

# The cores of each tensor-parallel worker on a CPU, as 0-3|4-7.
CORES_VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"
NO_OVERLAP = "--disable-overlap-schedule"
# Logits of the head are fp32, as the trainer's are.
EXACT_HEAD = "--enable-fp32-lm-head"
# Arguments with a meaning of their own to us, which the engine's own may still override.
CPU_ARGUMENTS = (
    "--device", "cpu",
    "--attention-backend", "torch_native",
    "--sampling-backend", "pytorch",
    NO_OVERLAP,
    "--mem-fraction-static", "0.2",
    # Its schedulers would spin on the cores that the trainer computes with.
    "--sleep-on-idle",
)  # fmt: skip


class SGLang(ForeignEngine):
    """See agent.engine.ForeignEngine."""

    name = "sglang"
    routes = ("agent",)

    def server(self, options: EngineOptions) -> tuple[list[str], dict[str, str]]:
        on_cpu = not has_gpu()
        theirs = [
            "--model-path", options.model,
            "--dtype", options.dtype,
            "--tp-size", str(options.tensor_parallel_size),
            "--context-length", str(options.max_length),
            "--max-running-requests", str(options.max_sequences),
            "--skip-tokenizer-init",
            "--skip-server-warmup",
            "--log-level", "info",
            "--log-level-http", "warning",
        ]  # fmt: skip
        if options.sleep_level:
            # Without the second one weights that sleep are dropped.
            theirs += ["--enable-memory-saver", *(["--enable-weights-cpu-backup"] if options.sleep_level == 1 else [])]
        if options.device_share:
            theirs += ["--mem-fraction-static", f"{options.device_share:.3f}"]
        if on_cpu:
            theirs += CPU_ARGUMENTS
            # It sizes the cache by what is free on the machine, which others use too.
            theirs += ["--max-total-tokens", str(options.max_sequences * options.max_length)]
        elif options.in_flight_kv == "keep":
            theirs.append(NO_OVERLAP)  # see control.py
        if not on_cpu and options.dtype != "float32":
            theirs.append(EXACT_HEAD)
        # Its server in Rust would not ask for our token, whatever this shell's environment says.
        environment = {"HF_HUB_OFFLINE": "1", "SGLANG_RUST_SERVER": "0"}
        # Its sockets lie among the temporary files. So does what torch compiles for it, which is worth keeping.
        compiled = Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"
        environment["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled))
        environment["TMPDIR"] = str(options.folder)
        if on_cpu:
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
            if options.tensor_parallel_size > numa_nodes():
                # Without being told it gives every worker a NUMA node, and ends where there are fewer.
                own_cores = cores_of_workers(options.tensor_parallel_size, usable_cores())
                environment[CORES_VARIABLE] = os.environ.get(CORES_VARIABLE) or own_cores
        return theirs, environment

    def control(self, url: str, token: str, options: EngineOptions) -> EngineControl:
        return SGLangControl(url, token, options.update_timeout_s, options.in_flight_kv)


def _user() -> str:
    """As torch names the folder of what it compiles."""
    try:
        return re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError):  # a container without an entry for this user
        return str(os.getuid())


def cores_of_workers(workers: int, cores: list[int]) -> str:
    """An equal share of `cores` for each worker, in SGLang's notation; where there are too few, workers share them."""
    shares = [cores[i * len(cores) // workers : (i + 1) * len(cores) // workers] for i in range(workers)]
    return "|".join(",".join(map(str, share or [cores[i % len(cores)]])) for i, share in enumerate(shares))


ENGINE = SGLang()
