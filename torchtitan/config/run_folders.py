"""Which run's folder a launch goes on in, as its configuration and its launcher say. No torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from torchtitan.config.job_config import JobConfig
from torchtitan.utils.child_process import LAUNCH_VARIABLE

# The link to the newest run, in job.dump_folder.
LATEST = "latest"
# The folder of a run that has its checkpoints.
CHECKPOINTS = "checkpoint"
# The folder in job.dump_folder that has the functions and rows of runs from Python.
FROM_PYTHON = "from_python"
NEWEST = -1
_CHECKPOINT = re.compile(r"step-(\d+)")


def launch_link(config: JobConfig) -> Path | None:
    """The link to the run folder of this launch: the launcher's own, or one by the name that a person gave."""
    launch = os.environ.get(LAUNCH_VARIABLE, "")
    if os.path.isabs(launch):
        return Path(launch)
    return Path(config.job.dump_folder) / f".launch-{launch}" if launch else None


def resumed_folder(config: JobConfig) -> Path | None:
    """The run folder that checkpoint.resume names, or in which the named checkpoint is; None where it names nothing."""
    resume = config.checkpoint.resume
    if not resume:
        return None
    if resume == LATEST:
        return Path(config.job.dump_folder) / LATEST
    return Path(resume) if resumed_step(config) == NEWEST else Path(resume).parent.parent


def resumed_step(config: JobConfig) -> int:
    """The step of the checkpoint that checkpoint.resume names; NEWEST for a run folder."""
    path = Path(config.checkpoint.resume)
    match = _CHECKPOINT.fullmatch(path.name)
    return int(match[1]) if match is not None and path.parent.name == CHECKPOINTS else NEWEST
