"""What a configuration may not ask of its engine: rules from the features of all engines, and each engine's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torchtitan.config.job_config import JobConfig
from torchtitan.config.values import show
from torchtitan.inference.engines.descriptor import EngineDescriptor
from torchtitan.inference.engines.options import wrong_options
from torchtitan.inference.engines.registry import all_engines, engine_of
from torchtitan.utils.machine import driver_version, has_gpu, wheel_version

CUDA_13_DRIVER = 580
ON_CPU = "must be 0 without an NVIDIA GPU: on a CPU sleeping frees nothing"


def problems(config: JobConfig, ranks: int) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) of each key that cannot be as it is with the configuration's engine, on any machine."""
    engine = engine_of(config)
    yield from _update_problems(config, engine)
    yield from engine.problems(config, ranks)


def missing(config: JobConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) of what this machine lacks to start the configuration's engine."""
    inference, engine = config.inference, engine_of(config)
    no_gpu = engine.spec.on_gpus and not inference.servers and not has_gpu()
    if inference.sleep_level and no_gpu:
        yield "inference.sleep_level", ON_CPU
    if config.grpo.routing_replay and config.has_engines and no_gpu and not engine.features.reports_experts_on_cpu:
        text = f"needs a GPU with inference.backend = {engine.spec.name}: its CPU build cannot report the experts of "
        yield "grpo.routing_replay", text + "its tokens"
    if inference.engine.python and not Path(inference.engine.python).is_file():
        text = "there is no such file; leave it empty to use what scripts/install_engine.sh made"
        yield inference.engine_key("python"), text
    python, driver = engine.python(config), driver_version()
    is_old = driver[:3].isdigit() and int(driver[:3]) < CUDA_13_DRIVER
    if python is not None and is_old and wheel_version(python, "nvidia_nccl_cu13"):
        text = f"{engine.spec.name} is built for CUDA 13, which needs an NVIDIA driver of {CUDA_13_DRIVER} or newer: "
        yield "inference.backend", f"{text}this is {driver}"
    yield from engine.missing(config)


def engines_in_ranks() -> str:
    """Return how to choose an engine in the trainer's own processes."""
    return f"inference.backend = {' or '.join(engine.spec.name for engine in all_engines() if engine.spec.in_ranks)}"


def engines_for_any_family(config: JobConfig) -> str:
    """Return the engines to choose instead where the configuration's does not compute models whose layers the trainer
    takes from transformers; an empty string where it does."""
    if engine_of(config).features.any_family:
        return ""
    return " or ".join(show(engine.spec.name) for engine in all_engines() if engine.features.any_family)


def wrong_engine_args(config: JobConfig) -> Iterator[str]:
    """Yield what is wrong with the options that are passed on to the engine."""
    yield from wrong_options(config.inference.engine.args)


def _update_problems(config: JobConfig, engine: EngineDescriptor) -> Iterator[tuple[str, str]]:
    """What concerns weights and memory."""
    inference, sync, features = config.inference, config.weight_sync, engine.features
    name = f"inference.backend {engine.spec.name}"
    if sync.verify == "digest" and (text := engine.digest_problem(config)):
        yield "weight_sync.verify", text
    if inference.update_mode not in features.update_modes:
        text = f"{name} cannot {inference.update_mode} running requests: use {' or '.join(features.update_modes)}"
        yield "inference.update_mode", text
    if inference.in_flight_kv not in features.in_flight_kv:
        yield "inference.in_flight_kv", f"must be {' or '.join(features.in_flight_kv)} with {name}"
    if inference.sleep_level and not features.sleeps:
        yield "inference.sleep_level", f"must be 0: {name} does not sleep"
    if config.grpo.routing_replay and config.has_engines and not features.reports_experts:
        yield "grpo.routing_replay", _without_experts(engine)


def _without_experts(engine: EngineDescriptor) -> str:
    able = sorted({other.spec.name for other in all_engines() if other.features.reports_experts})
    text = f"needs inference.backend = {' or '.join(able)}"
    return f"{text}: this engine ({engine.spec.about}) does not report the experts of its tokens"
