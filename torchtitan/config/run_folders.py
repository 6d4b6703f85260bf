"""Which run's folder a launch goes on in, as its configuration and its launcher say. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from torchtitan.config.job_config import JobConfig
from torchtitan.utils.child_process import LAUNCH_VARIABLE

# The link to the newest run, in job.dump_folder.
LATEST = "latest"


def launch_link(config: JobConfig) -> Path | None:
    """The link to the run folder of this launch: the launcher's own, or one by the name that a person gave."""
    launch = os.environ.get(LAUNCH_VARIABLE, "")
    if os.path.isabs(launch):
        return Path(launch)
    return Path(config.job.dump_folder) / f".launch-{launch}" if launch else None


def resumed_folder(config: JobConfig) -> Path | None:
    """The run folder that checkpoint.resume names, or None."""
    resume = config.checkpoint.resume
    if not resume:
        return None
    return Path(config.job.dump_folder) / LATEST if resume == LATEST else Path(resume)
