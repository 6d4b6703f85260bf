"""Rules for [inference] and [weight_sync] as wholes. No torch here."""

from __future__ import annotations

import os
import re
from pathlib import Path

from torchtitan.config.derived import (
    SLURM,
    from_torchrun,
    has_engines,
    sleeps_between_batches,
    slurm_urls,
    wrong_options,
)
from torchtitan.config.job_config import JobConfig
from torchtitan.config.transports import TRANSPORTS
from torchtitan.config.values import show
from torchtitan.errors import UserError
from torchtitan.inference.actor_client import TOKEN_VARIABLE
from torchtitan.inference.engines.sidecar.descriptor import load_foreign
from torchtitan.inference.engines.sidecar.sidecar_process import find_python
from torchtitan.preflight.check import Check
from torchtitan.utils.machine import driver_version, has_gpu, is_loopback, wheel_version
from torchtitan.weight_sync.transports.transport import load_transport, off_device

CUDA_13_DRIVER = 580
ON_CPU = "must be 0 without an NVIDIA GPU: on a CPU sleeping frees nothing"


def engine_python(config: JobConfig) -> str | None:
    """Return the interpreter of the engine that this run starts; None if it starts none, or none is installed here."""
    inference = config.inference
    if inference.backend == "embedded" or inference.mode == "colocate" or inference.servers or config.rollout.replay:
        return None
    try:
        return find_python(inference.backend, inference.engine_python)
    except UserError:
        return None


def check_inference(check: Check) -> None:
    """Check [inference] and the engine's part of [weight_sync]."""
    config, inference, refuse = check.config, check.config.inference, check.refuse
    _check_servers(check)
    _check_route(check)
    if inference.backend == "embedded":
        _check_embedded(check)
    else:
        _check_engine(check)
    if inference.mode == "colocate":
        _check_colocated(check)
    else:
        text = "needs inference.mode = colocate, where trainer and engine share a process"
        refuse("inference.offload_optimizer", inference.offload_optimizer, text)
        if inference.sleep_level:
            _check_sleep(check)
    if config.grpo.routing_replay:
        _check_replay(check)
    refuse("inference.host", not inference.host.strip(), "must be an address of this machine, such as 127.0.0.1")
    for key, text in load_transport(config.weight_sync.transport).problems(config, lambda: engine_python(config)):
        refuse(key, True, text)


def _check_servers(check: Check) -> None:
    config, servers = check.config, check.config.inference.servers
    key = "inference.servers"
    none_there = not (config.inference.launch or servers or config.inference.discover) and has_engines(config)
    text = "needs inference.servers, the actors that run already, or inference.discover"
    check.refuse("inference.launch", none_there, text)
    if config.inference.discover:
        _check_discover(check)
    for server in servers:
        text = f"{key}: {show(server)} is not allowed:"
        if server.startswith(SLURM):
            # A valid one has already been replaced by its URLs.
            try:
                slurm_urls(server)
            except ValueError as error:
                check.say(key, f"{text} {error}")
            continue
        url = re.fullmatch(r"https?://([^/\s:]+|\[[\da-fA-F:]+\])(:\d{1,5})?/?", server)
        if url is None:
            check.say(key, f"{text} must be a URL such as http://127.0.0.1:8000")
        elif not is_loopback(url[1].strip("[]")) and is_loopback(config.weight_sync.host):
            # Servers learn from the registry where to fetch their weights, and it listens only on this host.
            text += " must be on this machine, such as http://127.0.0.1:8000"
            check.say(key, f"{text}, unless weight_sync.host is an address that other machines reach")
            return
    for twice in sorted({server for server in servers if servers.count(server) > 1})[:1]:
        check.say(key, f"{key}: {show(twice)} is not allowed: each server may be named only once")


def _check_discover(check: Check) -> None:
    config, text = check.config, ""
    if config.inference.mode != "server" or not has_engines(config):
        text = "needs inference.mode = server, and rollouts"
    elif config.inference.sleep_level:
        text = "needs inference.sleep_level = 0: an actor may come while the others sleep"
    elif not check.planning and not os.environ.get(TOKEN_VARIABLE):
        text = f"needs {TOKEN_VARIABLE} in the environment, the token that actors join with"
    check.refuse("inference.discover", bool(text), text)


def _check_route(check: Check) -> None:
    config, sync = check.config, check.config.weight_sync
    if config.inference.mode == "colocate" and config.inference.backend == "vllm":
        text = "must be auto with inference.mode = colocate, where weights stay in the process"
        check.refuse("weight_sync.route", sync.route != "auto", text)
        return
    backend = config.inference.backend
    routes = ("auto", *(() if backend == "embedded" else load_foreign(backend).routes))
    text = f"must be {' or '.join(routes)} with inference.backend {backend}"
    check.refuse("weight_sync.route", sync.route not in routes, text)


def _check_embedded(check: Check) -> None:
    config, inference = check.config, check.config.inference
    text = "actors merge adapters into their weights, which then differ from what was sent: use probe (or auto)"
    check.refuse("weight_sync.verify", config.weight_sync.verify == "digest" and config.lora.rank > 0, text)
    for key, asked in (
        ("tensor_parallel_size", inference.tensor_parallel_size > 1),
        ("engine_args", inference.engine_args),
        ("engine_python", inference.engine_python),
        ("engine_memory_gb", inference.engine_memory_gb > 0),
    ):
        check.refuse(f"inference.{key}", asked, "needs inference.backend vllm or sglang")


def _check_engine(check: Check) -> None:
    """Refuse what vLLM or SGLang cannot do, and options of the embedded engine."""
    config, refuse = check.config, check.refuse
    inference, sync, backend = config.inference, config.weight_sync, config.inference.backend
    for problem in wrong_options(inference.engine_args):
        check.say("inference.engine_args", f"inference.engine_args: {problem}")
    shows = backend == "vllm" and inference.mode == "server" and sync.route != "agent" and not config.lora.rank
    text = f"inference.backend {backend} cannot check its weights in this setup: use probe (or auto)"
    refuse("weight_sync.verify", sync.verify == "digest" and not shows, text)
    refuse("inference.exact", inference.exact, "needs inference.backend = embedded")
    # SGLang's pause either stops immediately or drops running requests.
    text = "inference.backend sglang cannot drain running requests: use in_flight"
    refuse("inference.update_mode", inference.update_mode == "drain" and backend == "sglang", text)
    if check.planning:
        return
    python, driver = engine_python(config), driver_version()
    old = python is not None and driver[:3].isdigit() and int(driver[:3]) < CUDA_13_DRIVER
    text = (
        f"{backend} is built for CUDA 13, which needs an NVIDIA driver of {CUDA_13_DRIVER} or newer: this is {driver}"
    )
    refuse("inference.backend", old and wheel_version(str(python), "nvidia_nccl_cu13"), text)
    no_file = inference.engine_python and not Path(inference.engine_python).is_file()
    text = "there is no such file; leave it empty to use what scripts/install_engine.sh made"
    refuse("inference.engine_python", no_file, text)


def _check_replay(check: Check) -> None:
    """Routing replay needs engines that report the experts with which each token was sampled."""
    config, inference, key = check.config, check.config.inference, "grpo.routing_replay"
    text = "needs inference.mode = server: colocated engines do not report the experts of their tokens"
    check.refuse(key, inference.mode == "colocate" and has_engines(config), text)
    text = (
        "needs inference.in_flight_kv = keep with inference.backend = sglang: for recomputed tokens it would report "
        "the experts of the new weights but the log-probs of the old ones"
    )
    check.refuse(key, inference.backend == "sglang" and inference.in_flight_kv == "recompute", text)
    started_here = not check.planning and not inference.servers and has_engines(config)
    text = "needs a GPU with inference.backend = vllm: its CPU build cannot report the experts of its tokens"
    check.refuse(key, inference.backend == "vllm" and started_here and not has_gpu(), text)


def _check_sleep(check: Check) -> None:
    """Check servers that sleep during training."""
    config, inference, refuse = check.config, check.config.inference, check.refuse
    key = "inference.sleep_level"
    text = "needs grpo.async_weight_update = false (or inference.mode = colocate): else actors sample during training"
    refuse(key, config.grpo.async_weight_update, text)
    if inference.backend == "embedded":
        text = "must be at most 1 with lora.rank > 0: 2 would drop the base weights, which are never sent"
        refuse(key, inference.sleep_level == 2 and config.lora.rank, text)
        return
    refuse(key, not check.planning and not inference.servers and not has_gpu(), ON_CPU)


def _check_colocated(check: Check) -> None:
    config, inference, refuse = check.config, check.config.inference, check.refuse
    if inference.backend != "vllm":
        text = f"inference.backend {inference.backend} runs with inference.mode = server only: colocate is for vllm"
        refuse("inference.mode", True, text)
        return
    which_has_none = "with inference.mode = colocate, which has no servers"
    refuse("inference.servers", inference.servers, f"must be empty {which_has_none}")
    refuse("inference.launch", not inference.launch, f"must be true {which_has_none}")
    text = f"must divide the {check.ranks} rank{'s' if check.ranks > 1 else ''} (NGPU)"
    refuse("inference.tensor_parallel_size", check.ranks % inference.tensor_parallel_size, text)
    refuse("inference.sleep_level", inference.sleep_level and not check.planning and not has_gpu(), ON_CPU)
    text = "training.enable_cpu_offload keeps the optimizer's state in host memory already"
    refuse("inference.offload_optimizer", inference.offload_optimizer and config.training.enable_cpu_offload, text)


def check_weight_sync(check: Check) -> None:
    """Check [weight_sync] against the tables that it goes with."""
    config, sync, refuse = check.config, check.config.weight_sync, check.refuse
    limit = config.comm.train_timeout_seconds
    text = "must be a single address at which this machine can be reached"
    refuse("weight_sync.host", sync.host.strip() in ("", "0.0.0.0", "::"), text)
    transport = TRANSPORTS[sync.transport]
    able = {"relay": [name for name, one in TRANSPORTS.items() if one.over_channel]}
    able["delta"] = [name for name, one in TRANSPORTS.items() if one.over_channel or one.own_deltas]
    for key, names in able.items():
        text = f"weight_sync.transport {sync.transport} does not support it, only {' and '.join(names)} can"
        refuse(f"weight_sync.{key}", getattr(sync, key) and sync.transport not in names, text)
    # With parameters in host memory and actors on a GPU, such a transport could never deliver anything.
    text = f"needs weight_sync.transport {off_device()}: {sync.transport} reads the parameters on their device"
    offloaded = config.training.enable_cpu_offload is True and transport.on_device
    refuse("training.enable_cpu_offload", offloaded, text)
    drain_s = config.inference.drain_timeout_s
    text = f"must be greater than inference.drain_timeout_s = {drain_s:g}, which it includes"
    too_short = config.inference.update_mode == "drain" and 0 < sync.apply_timeout_s <= drain_s
    refuse("weight_sync.apply_timeout_s", too_short, text)
    text = f"must be at least weight_sync.apply_timeout_s = {sync.apply_timeout_s:g}"
    too_short = not config.grpo.async_weight_update and sync.blocking_timeout_s < sync.apply_timeout_s
    refuse("weight_sync.blocking_timeout_s", too_short, text)
    if check.ranks == 1:
        return
    several_machines = from_torchrun("LOCAL_WORLD_SIZE", str(check.ranks), least=1) < check.ranks
    text = f"must be greater than comm.train_timeout_seconds = {limit}, after which a machine notices that ranks of "
    text += "another are lost: until then, restarted ranks wait for it"
    refuse("comm.init_timeout_seconds", several_machines and config.comm.init_timeout_seconds <= limit, text)
    if not config.grpo.async_weight_update and sync.blocking_timeout_s >= limit:
        text = f"must be less than comm.train_timeout_seconds = {limit}: the other ranks wait in a collective meanwhile"
        refuse("weight_sync.blocking_timeout_s", True, text)
    elif sleeps_between_batches(config):
        text = "plus weight_sync.blocking_timeout_s, and plus inference.drain_timeout_s, it must be less than "
        text += f"three quarters of comm.train_timeout_seconds = {limit}: other ranks wait in a collective meanwhile"
        # The remaining quarter is for the next command.
        longest = config.inference.sleep_timeout_s + max(sync.blocking_timeout_s, drain_s)
        refuse("inference.sleep_timeout_s", longest >= 0.75 * limit, text)
