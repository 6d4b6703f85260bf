"""Rules for [inference] and [weight_sync] as wholes. No torch here."""

from __future__ import annotations

import os
import re

from torchtitan.config.job_config import JobConfig
from torchtitan.config.slurm import SLURM, slurm_urls
from torchtitan.config.transports import TRANSPORTS
from torchtitan.config.values import show
from torchtitan.inference.actor_client import TOKEN_VARIABLE
from torchtitan.inference.engines import checks
from torchtitan.inference.engines.registry import engine_of
from torchtitan.preflight.check import Check
from torchtitan.utils.machine import is_loopback
from torchtitan.weight_sync.transports.transport import load_transport, off_device


def engine_python(config: JobConfig) -> str | None:
    """Return the interpreter of the engine that this run starts; None if it starts none with an interpreter of its own,
    or none is installed here."""
    return engine_of(config).python(config)


def check_inference(check: Check) -> None:
    """Check [inference] and the engine's part of [weight_sync]."""
    config, inference, refuse = check.config, check.config.inference, check.refuse
    _check_servers(check)
    found = list(checks.problems(config, check.ranks))
    if not check.planning:
        found += checks.missing(config)
    for key, text in found:
        refuse(key, True, text)
    for text in checks.wrong_engine_args(config):
        check.say(inference.engine_key("args"), f"{inference.engine_key('args')}: {text}")
    samples_in_training = config.grpo.async_weight_update and not config.inference.spec.in_ranks
    text = f"needs grpo.async_weight_update = false (or {checks.engines_in_ranks()}): else actors sample meanwhile"
    if inference.sleep_level and samples_in_training:
        refuse("inference.sleep_level", True, text)
    for key, text in load_transport(config.weight_sync.transport).problems(config, lambda: engine_python(config)):
        refuse(key, True, text)


def _check_servers(check: Check) -> None:
    config, servers = check.config, check.config.inference.servers
    key = "inference.servers"
    starts = config.inference.num_actors > 0 or config.inference.spec.in_ranks
    none_there = not (starts or servers or config.inference.discover) and config.has_engines
    text = "needs inference.servers, the actors that run already, or inference.discover"
    check.refuse("inference.num_actors", none_there, text)
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
    if config.inference.spec.in_ranks or not config.has_engines:
        text = "needs an engine with actors, and rollouts"
    elif config.inference.sleep_level:
        text = "needs inference.sleep_level = 0: an actor may come while the others sleep"
    elif not check.planning and not os.environ.get(TOKEN_VARIABLE):
        text = f"needs {TOKEN_VARIABLE} in the environment, the token that actors join with"
    check.refuse("inference.discover", bool(text), text)


def check_weight_sync(check: Check) -> None:
    """Check [weight_sync] against the tables that it goes with."""
    config, sync, refuse = check.config, check.config.weight_sync, check.refuse
    inference = config.inference
    transport = TRANSPORTS[sync.transport]
    # With parameters in host memory and actors on a GPU, such a transport could never deliver anything.
    text = f"needs weight_sync.transport {off_device()}: {sync.transport} reads the parameters on their device"
    offloaded = config.training.enable_cpu_offload is True and transport.on_device
    refuse("training.enable_cpu_offload", offloaded, text)
    if config.grpo.async_weight_update:
        return
    longest = config.blocking_timeout_s
    text = f"must be less than {longest:g}, by comm.train_timeout_seconds = {config.comm.train_timeout_seconds}: in "
    text += "blocking mode, other ranks wait in a collective meanwhile"
    refuse("inference.drain_timeout_s", config.sleeps_between_batches and inference.drain_timeout_s >= longest, text)
