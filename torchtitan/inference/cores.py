"""How the actors that a run starts share the machine's cores. No torch here."""

from __future__ import annotations

import os

from torchtitan.config.job_config import Inference
from torchtitan.errors import UserError
from torchtitan.utils.cores import usable_cores


def threads_per_actor(config: Inference) -> int:
    """inference.threads_per_actor, or else an equal share of this process's cores."""
    return config.threads_per_actor or max(1, len(usable_cores()) // max(1, config.num_actors))


def actor_cores(config: Inference, number: int) -> list[int]:
    """The cores of started actor `number` (from 0) under inference.pin_cores: one per thread, from the last core down.

    Raises:
        UserError: there are not that many, or the platform cannot pin. The message is what pin_cores needs.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise UserError("needs a platform that can pin processes to cores, such as Linux")
    threads, cores = threads_per_actor(config), usable_cores()
    wanted = threads * config.num_actors
    if wanted > len(cores):
        raise UserError(
            f"needs {wanted} cores (inference.num_actors {config.num_actors} × {threads} threads each), and this job "
            f"may use {len(cores)}: lower inference.threads_per_actor or inference.num_actors"
        )
    end = len(cores) - number * threads
    return cores[end - threads : end]
