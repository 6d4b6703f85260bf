"""The command line of an agent, which starts a foreign engine and stands beside it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from torchtitan.config.derived import (
    ON_DEVICE,
    apply_timeout,
    drain_seconds,
    shares_devices,
    sleeps_between_batches,
    verification,
    world_size,
)
from torchtitan.config.engines import command_line
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.actor_main import shared_command, shared_settings
from torchtitan.inference.agent.engine import load_engine
from torchtitan.inference.placement import GIB, colocated_memory, device_bytes_of_driver, threads_per_actor
from torchtitan.models.costs import version_bytes
from torchtitan.models.shape import read_shape

# Both engines call it so.
RETURN_ROUTES = "enable-return-routed-experts"
# What an apply asks of the engine has to be over before the registry takes the actor for stuck; draining comes first.
SHARE_OF_APPLY_TIMEOUT = 0.9


def agent_command(engine: str, config: JobConfig, port_file: Path, number: int = 0) -> list[str]:
    """The command line of actor `number` with `engine`; the agent reports its own port in `port_file`.

    Raises UserError where the engine is not installed, or has no such route.
    """
    inference, name = config.inference, f"actor-{number}"
    memory_gb, device_share = memory_beside_trainer(config) or (inference.engine_memory_gb, 0.0)
    return [
        *shared_command("torchtitan.inference.agent", config, port_file),
        "--engine", engine,
        "--name", name,
        "--python", find_python(engine, inference.engine_python),
        "--log-file", str(port_file.with_name(f"{name}.engine.log")),
        *_settings_of_agents(engine, config),
        "--memory-gb", str(memory_gb),
        "--device-share", str(device_share),
        "--threads", str(max(1, threads_per_actor(inference) // inference.tensor_parallel_size)),
    ]  # fmt: skip


def agent_settings(engine: str, config: JobConfig) -> list[str]:
    """What the run's configuration says to an agent that it does not start itself (scripts/grpo_multinode.slurm)."""
    memory = ["--memory-gb", str(config.inference.engine_memory_gb)]
    return [*shared_settings(config), *_settings_of_agents(engine, config), *memory]


def _settings_of_agents(engine: str, config: JobConfig) -> list[str]:
    inference, sync, args = config.inference, config.weight_sync, read_shape(config)
    size, drain_s = 0 if args is None else version_bytes(config, args), drain_seconds(config)
    route = load_engine(engine).find_route(sync.route, f"weight_sync.route = {sync.route!r}")
    # The pool may add options of ours behind these, so the engine's own travel as one value.
    theirs = inference.engine_args | ({RETURN_ROUTES: True} if config.grpo.routing_replay else {})
    return [
        "--route", route,
        "--tensor-parallel-size", str(inference.tensor_parallel_size),
        "--sleep-level", str(inference.sleep_level if sleeps_between_batches(config) else 0),
        "--update-timeout", str((apply_timeout(sync, size, drain_s) - drain_s) * SHARE_OF_APPLY_TIMEOUT),
        "--startup-timeout", str(inference.startup_timeout_s),
        # These bring a version from device to device.
        *(["--stage-on-device"] if sync.transport in ON_DEVICE else []),
        *(["--verify-every", str(sync.verify_every)] if verification(config) == "digest" else []),
        *(["--disk-path", sync.disk_path] if sync.disk_path else []),
        "--engine-arguments", json.dumps(command_line(theirs)),
    ]  # fmt: skip


def memory_beside_trainer(config: JobConfig) -> tuple[float, float] | None:
    """(GiB of KV cache, share of a GPU) of an engine that has a rank's GPU in turns with the trainer; None for others.

    Raises UserError where not one sequence has room.
    """
    device_bytes = device_bytes_of_driver() if shares_devices(config) else None
    memory = colocated_memory(config, world_size(), device_bytes) if device_bytes else None
    if memory is None or device_bytes is None:
        return None
    if memory.kv_cache < memory.kv_one_sequence:
        raise UserError(
            "the engine does not fit beside the sleeping trainer: no room for one sequence of training.seq_len = "
            f"{config.training.seq_len} in its KV cache. Raise inference.tensor_parallel_size (see --dry-run)"
        )
    return memory.kv_cache / GIB, memory.utilization(device_bytes)


def find_python(engine: str, configured: str, key: str = "inference.engine_python") -> str:
    """The interpreter that runs the engine: the one that is configured under that key, or that of the environment that
    scripts/install_engine.sh made, the CPU build where only that is there. Raises UserError without one."""
    if configured:
        found = shutil.which(str(Path(configured).expanduser()))
        if found is None:
            raise UserError(f"{key} = {configured!r} is not a program")
        return found
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(os.environ.get("TORCHTITAN_ENGINES") or cache / "torchtitan" / "engines")
    for name in (engine, f"{engine}-cpu"):
        if (home / name / ".complete").exists():
            return str(home / name / "bin" / "python")
    raise UserError(
        f"{engine} is not installed: run scripts/install_engine.sh {engine} (or {engine}-cpu), or set "
        f"{key} to the Python of an environment that has it"
    )
