"""What a configuration may not ask of its engine: rules from the features of all engines, and each engine's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torchtitan.config.derived import has_engines
from torchtitan.config.engines import find_spec
from torchtitan.config.job_config import Inference, JobConfig
from torchtitan.config.values import show
from torchtitan.inference.engines.descriptor import EngineDescriptor
from torchtitan.inference.engines.options import wrong_options
from torchtitan.inference.engines.registry import all_engines, engine_of
from torchtitan.utils.machine import driver_version, has_gpu, wheel_version

CUDA_13_DRIVER = 580
ON_CPU = "must be 0 without an NVIDIA GPU: on a CPU sleeping frees nothing"


def problems(config: JobConfig, ranks: int) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) of each key that cannot be as it is with the configuration's engine, on any machine."""
    inference = config.inference
    if find_spec(inference.backend, inference.mode) is None:
        yield "inference.mode", _wrong_mode(inference)
        return
    engine = engine_of(config)
    yield from _option_problems(config, engine)
    yield from _update_problems(config, engine)
    yield from engine.problems(config, ranks)


def missing(config: JobConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) of what this machine lacks to start the configuration's engine."""
    inference, engine = config.inference, engine_of(config)
    no_gpu = engine.spec.on_gpus and not inference.servers and not has_gpu()
    if inference.sleep_level and no_gpu:
        yield "inference.sleep_level", ON_CPU
    if config.grpo.routing_replay and has_engines(config) and no_gpu and not engine.features.reports_experts_on_cpu:
        text = (
            f"needs a GPU with inference.backend = {engine.spec.backend}: its CPU build cannot report the experts of "
        )
        yield "grpo.routing_replay", text + "its tokens"
    if inference.engine_python and not Path(inference.engine_python).is_file():
        text = "there is no such file; leave it empty to use what scripts/install_engine.sh made"
        yield "inference.engine_python", text
    python, driver = engine.python(config), driver_version()
    is_old = driver[:3].isdigit() and int(driver[:3]) < CUDA_13_DRIVER
    if python is not None and is_old and wheel_version(python, "nvidia_nccl_cu13"):
        text = (
            f"{engine.spec.backend} is built for CUDA 13, which needs an NVIDIA driver of {CUDA_13_DRIVER} or newer: "
        )
        yield "inference.backend", f"{text}this is {driver}"
    yield from engine.missing(config)


def _wrong_mode(inference: Inference) -> str:
    able = [engine.spec.backend for engine in all_engines() if engine.spec.mode == inference.mode]
    has = [engine.spec.mode for engine in all_engines() if engine.spec.backend == inference.backend]
    text = f"inference.backend {inference.backend} runs with inference.mode = {' or '.join(has)} only"
    return f"{text}: {inference.mode} is for {' or '.join(able)}"


def _option_problems(config: JobConfig, engine: EngineDescriptor) -> Iterator[tuple[str, str]]:
    """Options that only other engines have, and options that are handed on to the engine but must not be."""
    inference, usual = config.inference, Inference()
    for key in sorted({key for other in all_engines() for key in other.features.options}):
        if key not in engine.features.options and getattr(inference, key) != getattr(usual, key):
            yield f"inference.{key}", f"needs {engines_with(key)}"


def engines_with(option: str) -> str:
    """Return how to choose an engine that has a use for this key of [inference]."""
    specs = [engine.spec for engine in all_engines() if option in engine.features.options]
    actors = sorted({spec.backend for spec in specs if not spec.in_ranks})
    if actors:
        return f"inference.backend = {' or '.join(actors)}"
    return f"inference.mode = {' or '.join(spec.mode for spec in specs)}"


def engines_in_ranks() -> str:
    """Return how to choose an engine in the trainer's own processes."""
    return f"inference.mode = {' or '.join(engine.spec.mode for engine in all_engines() if engine.spec.in_ranks)}"


def problem_of_family(config: JobConfig) -> tuple[str, str] | None:
    """Return the key by which another engine is chosen, and what it must be, where the configuration's engine does not
    compute models whose layers the trainer takes from transformers; None where it does."""
    engine = engine_of(config)
    if engine.features.any_family:
        return None
    able = [other.spec for other in all_engines() if other.features.any_family]
    if engine.spec.in_ranks:
        return "inference.mode", show(" or ".join(sorted({spec.mode for spec in able})))
    return "inference.backend", " or ".join(show(backend) for backend in sorted({spec.backend for spec in able}))


def wrong_engine_args(config: JobConfig) -> Iterator[str]:
    """Yield what is wrong with [inference.engine_args], of an engine that takes them."""
    if "engine_args" in engine_of(config).features.options:
        yield from wrong_options(config.inference.engine_args)


def _update_problems(config: JobConfig, engine: EngineDescriptor) -> Iterator[tuple[str, str]]:
    """What concerns weights and memory."""
    inference, sync, features = config.inference, config.weight_sync, engine.features
    name = f"inference.backend {engine.spec.backend}"
    if sync.route not in ("auto", *features.routes):
        chosen_by = name
        if engine.spec.in_ranks:
            chosen_by = f"inference.mode = {engine.spec.mode}, where weights stay in the process"
        yield "weight_sync.route", f"must be {' or '.join(('auto', *features.routes))} with {chosen_by}"
    if sync.verify == "digest" and (text := engine.digest_problem(config)):
        yield "weight_sync.verify", text
    if inference.update_mode not in features.update_modes:
        text = f"{name} cannot {inference.update_mode} running requests: use {' or '.join(features.update_modes)}"
        yield "inference.update_mode", text
    if inference.in_flight_kv not in features.in_flight_kv:
        yield "inference.in_flight_kv", f"must be {' or '.join(features.in_flight_kv)} with {name}"
    if inference.sleep_level not in features.sleep_levels:
        levels = " or ".join(map(str, features.sleep_levels))
        yield "inference.sleep_level", f"must be {levels} with {name}"
    if config.grpo.routing_replay and has_engines(config) and not features.reports_experts:
        yield "grpo.routing_replay", _without_experts(engine)


def _without_experts(engine: EngineDescriptor) -> str:
    able = sorted({other.spec.backend for other in all_engines() if other.features.reports_experts})
    text = f"needs inference.backend = {' or '.join(able)}"
    if engine.spec.in_ranks:
        text = "needs inference.mode = server"
    return f"{text}: this engine ({engine.spec.about}) does not report the experts of its tokens"
