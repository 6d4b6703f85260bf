"""What [inference] must satisfy as a whole, with the engine's share of [weight_sync]. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from torchtitan.config.derived import is_loopback, shares_devices
from torchtitan.config.engine_args import check_engine_args
from torchtitan.config.fields import Problem, show
from torchtitan.config.job_config import JobConfig
from torchtitan.config.servers import SCHEME, slurm_urls
from torchtitan.errors import UserError
from torchtitan.inference.cores import actor_cores
from torchtitan.utils.gpus import has_gpu

# Per backend the routes of weights that there are.
ROUTES = {
    "embedded": ("auto",),
    "vllm": ("auto", "direct", "agent", "engine"),
    "sglang": ("auto", "agent", "engine"),
}
ON_CPU = "must be 0 without an NVIDIA GPU: on a CPU sleeping frees nothing"


def check_inference(config: JobConfig, ranks: int, planning: bool) -> Iterator[Problem]:
    """All problems of it. `planning`: nothing will be started, so what a start needs is not looked for."""
    inference = config.inference
    yield from _check_servers(config)
    yield from _check_engine(config, planning)
    if inference.mode == "colocate":
        yield from _check_colocated(config, ranks, planning)
    else:
        if inference.offload_optimizer:
            text = "needs inference.mode = colocate, where trainer and engine share a process"
            yield _refuse(config, "offload_optimizer", text)
        if inference.sleep_level:
            yield from _check_sleep(config, planning)
    if not inference.host.strip():
        yield _refuse(config, "host", "must be an address of this machine, such as 127.0.0.1")
    if inference.pin_cores and not inference.servers and not config.rollout.replay and inference.mode == "server":
        try:
            actor_cores(inference, 0)
        except UserError as error:
            yield _refuse(config, "pin_cores", str(error))
    if inference.health_timeout_s <= inference.health_interval_s:
        text = f"must be greater than inference.health_interval_s = {inference.health_interval_s:g}"
        yield _refuse(config, "health_timeout_s", text)


def _refuse(config: JobConfig, key: str, allowed: str) -> Problem:
    return Problem(
        f"inference.{key}", f"inference.{key} = {show(getattr(config.inference, key))} is not allowed: {allowed}"
    )


def _check_servers(config: JobConfig) -> Iterator[Problem]:
    inference = config.inference
    key = "inference.servers"
    if not inference.launch and not inference.servers and not config.rollout.replay:
        yield _refuse(config, "launch", "needs the actors that run already, in inference.servers")
    for server in inference.servers:
        text = f"{key}: {show(server)} is not allowed: must be"
        if server.startswith(SCHEME):
            # A good one has been replaced by its URLs.
            try:
                slurm_urls(server)
            except ValueError as error:
                yield Problem(key, f"{key}: {show(server)} is not allowed: {error}")
            continue
        url = re.fullmatch(r"https?://([^/\s:]+|\[[\da-fA-F:]+\])(:\d{1,5})?/?", server)
        if url is None:
            yield Problem(key, f"{text} a URL such as http://127.0.0.1:8000")
        elif not is_loopback(url[1].strip("[]")) and is_loopback(config.weight_sync.host):
            # The coordinator, from which servers fetch their weights, listens there only.
            text += " on this machine, such as http://127.0.0.1:8000"
            yield Problem(key, f"{text}, unless weight_sync.host is an address that others reach")
            return
    if len(set(inference.servers)) < len(inference.servers):
        twice = next(server for server in inference.servers if inference.servers.count(server) > 1)
        yield Problem(key, f"{key}: {show(twice)} is not allowed: every server may be named once")


def _check_engine(config: JobConfig, planning: bool) -> Iterator[Problem]:
    """What the engine can do, and what is only for another."""
    inference, sync = config.inference, config.weight_sync
    backend = inference.backend
    routes = ROUTES.get(backend, ())
    if routes and sync.route not in routes:
        text = f"with inference.backend {backend} it is {' or '.join(routes)}"
        yield Problem("weight_sync.route", f"weight_sync.route = {show(sync.route)} is not allowed: {text}")
    if backend == "embedded":
        if sync.verify == "digest" and config.lora.rank > 0:
            text = "actors merge adapters into their weights, which are then not what is sent: take probe (or auto)"
            yield Problem("weight_sync.verify", f"weight_sync.verify = {show(sync.verify)} is not allowed: {text}")
        for key, asked in (
            ("tensor_parallel_size", inference.tensor_parallel_size > 1),
            ("engine_args", bool(inference.engine_args)),
            ("engine_python", bool(inference.engine_python)),
            ("engine_memory_gb", inference.engine_memory_gb > 0),
        ):
            if asked:
                yield _refuse(config, key, "needs inference.backend vllm or sglang")
        return
    yield from check_engine_args(inference.engine_args)
    if sync.verify == "digest":
        text = f"inference.backend {backend} does not show its weights, take probe (or auto)"
        yield Problem("weight_sync.verify", f"weight_sync.verify = {show(sync.verify)} is not allowed: {text}")
    if inference.exact:
        yield _refuse(config, "exact", "needs inference.backend = embedded")
    if inference.update_mode == "drain" and backend == "sglang":
        # Its pause either stops at once or drops what runs.
        yield _refuse(config, "update_mode", "inference.backend sglang cannot let running requests end first")
    own_group = backend == "vllm" and sync.route == "engine" and "weight-transfer-config" not in inference.engine_args
    if own_group and not planning and not inference.servers and not has_gpu():
        text = "vLLM's own group is NCCL's, and there is no NVIDIA GPU: take direct or agent"
        yield Problem("weight_sync.route", f"weight_sync.route = {show(sync.route)} is not allowed: {text}")
    if inference.engine_python and not planning and not Path(inference.engine_python).is_file():
        yield _refuse(config, "engine_python", "there is no such file; empty takes what scripts/install_engine.sh made")


def _check_sleep(config: JobConfig, planning: bool) -> Iterator[Problem]:
    """Servers that sleep while the trainer trains."""
    inference = config.inference
    if config.grpo.async_weight_update:
        text = "needs grpo.async_weight_update = false (or inference.mode = colocate): else actors sample meanwhile"
        yield _refuse(config, "sleep_level", text)
    if inference.backend == "embedded":
        if inference.sleep_level == 2 and config.lora.rank:
            yield _refuse(config, "sleep_level", "must be at most 1 with lora.rank: embedded actors hold its base")
        return
    if not planning and not inference.servers and not has_gpu():
        yield _refuse(config, "sleep_level", ON_CPU)
    if shares_devices(config) and config.weight_sync.transport == "nccl":
        text = "must be tcp, disk or ipc with inference.sleep_level: NCCL has one member of a communicator per GPU"
        yield Problem("weight_sync.transport", f"weight_sync.transport = nccl is not allowed: {text}")
    if inference.backend == "vllm" and config.weight_sync.route == "engine":
        text = "must be direct or agent with inference.sleep_level, where no GPU is left for vLLM's own group"
        yield Problem("weight_sync.route", f"weight_sync.route = engine is not allowed: {text}")


def _check_colocated(config: JobConfig, ranks: int, planning: bool) -> Iterator[Problem]:
    inference, size = config.inference, config.inference.tensor_parallel_size
    if inference.backend != "vllm":
        text = f"inference.backend {inference.backend} runs with inference.mode server only, colocate is for vllm"
        yield _refuse(config, "mode", text)
        return
    if inference.servers:
        yield _refuse(config, "servers", "must be empty with inference.mode = colocate, which has no servers")
    if not inference.launch:
        yield _refuse(config, "launch", "must be true with inference.mode = colocate, which has no servers")
    if ranks % size:
        yield _refuse(config, "tensor_parallel_size", f"must divide the {ranks} rank{'s' if ranks > 1 else ''} (NGPU)")
    if config.weight_sync.route != "auto":
        text = "must be auto with inference.mode = colocate, where weights stay in the process"
        yield Problem(
            "weight_sync.route", f"weight_sync.route = {show(config.weight_sync.route)} is not allowed: {text}"
        )
    if inference.sleep_level and not planning and not has_gpu():
        yield _refuse(config, "sleep_level", ON_CPU)
    if inference.offload_optimizer and config.training.enable_cpu_offload:
        text = "training.enable_cpu_offload = true keeps the optimizer's state in host memory already"
        yield _refuse(config, "offload_optimizer", text)
