"""Which NCCL the trainer and an engine bring, from what is installed. No torch here.

Communicators need one version at all ends: NCCL refuses others with an error that says nothing of versions. Engines pin
a torch of their own, and with it an NCCL.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.agent.command import find_python


def nccl_version(python: str) -> str | None:
    """The version of NCCL's wheel in the environment of an interpreter; None where there is none."""
    # The link itself: what it points to lies outside of the environment.
    folder = Path(python).absolute().parent.parent
    for place in sorted(folder.glob("lib/python3*/site-packages/nvidia_nccl_cu*.dist-info")):
        if found := re.fullmatch(r"nvidia_nccl_cu\d+-(.+)\.dist-info", place.name):
            return found[1]
    return None


def differing_nccl(config: JobConfig) -> str | None:
    """What to say where the engine that this run starts has another NCCL than the trainer; None where it has not, or
    where that is not known (no engine is installed here, or it runs already)."""
    inference = config.inference
    if inference.backend == "embedded" or inference.mode == "colocate" or inference.servers or config.rollout.replay:
        return None
    try:
        theirs = nccl_version(find_python(inference.backend, inference.engine_python))
    except UserError:
        return None
    ours = nccl_version(sys.executable)
    if ours is None or theirs is None or ours == theirs:
        return None
    return (
        f"the trainer's NCCL is {ours} and {inference.backend}'s {theirs}: weights can only go by tcp or disk "
        "(weight_sync.transport); for nccl install a torch with that NCCL (TORCH_BACKEND)"
    )
