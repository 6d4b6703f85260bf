"""The command line of an embedded actor that a run starts."""

from __future__ import annotations

from pathlib import Path

import psutil

from torchtitan.config.derived import verification
from torchtitan.config.job_config import JobConfig
from torchtitan.inference.actor_main import shared_command
from torchtitan.inference.placement import actor_cores, threads_per_actor


def cache_megabytes(config: JobConfig) -> int:
    """Upper bound of one actor's KV cache: together they may take half of the memory that is free now."""
    return max(1, psutil.virtual_memory().available // (2 * max(1, config.inference.num_actors)) // 2**20)


def embedded_command(config: JobConfig, port_file: Path, number: int = 0) -> list[str]:
    """The command line of embedded actor `number`, which reports its port in `port_file` and serves nothing before it
    got its first weights version. Raises UserError where its cores are not there."""
    inference = config.inference
    command = [
        *shared_command("torchtitan.inference.embedded", config, port_file),
        "--cache-mb", str(cache_megabytes(config)),
        "--threads", str(threads_per_actor(inference)),
        "--verify-every", str(config.weight_sync.verify_every if verification(config) == "digest" else 0),
        "--require-version",
    ]  # fmt: skip
    if inference.pin_cores:
        command += ["--cores", ",".join(map(str, actor_cores(inference, number)))]
    return [*command, "--exact"] if inference.exact else command
